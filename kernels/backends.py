"""Which backend runs, the attention calls of a sparse layer, and what happens when a kernel fails.

A backend is chosen once (`choose_backend`) by what it promises to run, and then named in every call. It can still run
out of memory, fail to compile on this driver, or meet another version of a library than it was written for. None of
that has to end a run when another backend computes the same mask (`Fallback`); but a wrong output must never come of
it, so errors that are not known to be harmless are raised. Triton and flash-attn-4 are only imported when their kernels
are used, and the device is only asked about when it is a GPU.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, Q the one query of a decode step, D head
size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch

from sparsekv.kernels.decode.selection import Scoring, Selection, check_scoring, check_selection
from sparsekv.kernels.index.build import BuilderName, builds_by_triton
from sparsekv.kernels.keys import KeyView, check_keys
from sparsekv.kernels.prefill.flash.limits import device_obstacle, shape_obstacle, untested
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex, check_chunk, check_index, check_qkv
from sparsekv.plans.errors import BackendError, ShapeError, SparseKVError
from sparsekv.plans.patterns import TileShape

Found = TypeVar("Found")

BACKENDS = ("flash", "triton", "cpu", "reference")  # the first that can run is chosen; reference never is
_REASONS = {
    "flash": "flash-attn-4 for this GPU",
    "triton": "Triton kernels for this GPU",
    "cpu": "torch operations for cpu",
}
_PREFILL = {
    "flash": "sparsekv.kernels.prefill.flash.backend",
    "triton": "sparsekv.kernels.prefill.triton",
    "cpu": "sparsekv.kernels.prefill.cpu",
    "reference": "sparsekv.kernels.reference",
}
_DECODE = {
    "flash": "sparsekv.kernels.decode.triton",  # flash-attn-4 has no list of tokens
    "triton": "sparsekv.kernels.decode.triton",
    "cpu": "sparsekv.kernels.decode.cpu",
    "reference": "sparsekv.kernels.decode.cpu",  # it is float32 and has one softmax already
}


# What a kernel's failure is told by: where its error is defined, its type, or what a plain RuntimeError says.
_COMPILERS = ("triton", "cutlass")
_FAILURES = (BackendError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_FAILURE_WORDS = ("Triton Error", "DefaultCPUAllocator: can't allocate memory")


class PrefillBackend(Protocol):
    """Sparse prefill of one layer: tensors and an index in, output out. It sees no plan and no model."""

    def __call__(
        self,
        q_BHSD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        index: TileIndex,
        chunk: Chunk,
        *,
        scale: float,
        window: int | None = None,
        want_lse: bool = False,
    ) -> AttentionOutput: ...


class DecodeBackend(Protocol):
    """Attention of one query token a batch row, over all tokens or a selection of them."""

    def __call__(
        self,
        q_BHQD: torch.Tensor,
        keys: KeyView,
        selection: Selection | None,
        *,
        scale: float,
        window: int | None = None,
        want_lse: bool = False,
        scoring: Scoring | None = None,
    ) -> AttentionOutput: ...


USE_AUTO = "; use --backend auto"  # what ends the message about a backend that was asked for and cannot run


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that runs, why, and why the ones before it do not."""

    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    requested: str = "auto",
    tile: TileShape | None = None,
) -> BackendChoice:
    """The first backend that runs on this device, or the requested one.

    Args:
        requested: "auto" or one of BACKENDS.
        tile: of the plan; without one, backends are not asked whether they take its tiles.

    Raises:
        BackendError: there is no such backend, or it cannot run here; the message says why and what to do.
    """
    device = torch.device(device)
    if requested not in ("auto", *BACKENDS):
        raise BackendError(f"backend must be auto or one of {', '.join(BACKENDS)}, found {requested!r}")
    if requested != "auto":
        obstacle = _obstacle(requested, device, dtype, head_dim, tile)
        if obstacle:
            raise BackendError(f"backend {requested!r} cannot run on {device}: {obstacle}{USE_AUTO}")
        return BackendChoice(requested, "requested")
    rejected: list[tuple[str, str]] = []
    for name in ("flash", "triton", "cpu"):
        obstacle = _obstacle(name, device, dtype, head_dim, tile) or (untested() if name == "flash" else None)
        if obstacle is None:
            return BackendChoice(name, _REASONS[name], tuple(rejected))
        rejected.append((name, obstacle))
    why = "; ".join(f"{name}: {obstacle}" for name, obstacle in rejected)
    raise BackendError(f"no backend runs {dtype} with head size {head_dim} on {device} ({why})")


def backends_after(name: str, q_BHSD: torch.Tensor, tile: TileShape | None = None) -> tuple[str, ...]:
    """The backends behind `name` in the order of choice that take such tensors where they are; never another device."""
    behind = [other for other in BACKENDS[BACKENDS.index(name) + 1 :] if other != "reference"]
    call = (q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[-1], tile)
    return tuple(other for other in behind if _obstacle(other, *call) is None)


def prefill_attention(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    index: TileIndex,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
    want_lse: bool = False,
    backend: str,
) -> AttentionOutput:
    """Causal attention over the tiles and single columns of an index, all heads of a layer in one call.

    Args:
        q_BHSD: the chunk's queries; any strides for B, H and S. Rows past a batch row's length are padding.
        k_BGKD: all keys so far; memory past a row's length may hold anything.
        index: built for this chunk; see tiles.py for the mask it stands for.
        scale: of the scores, usually 1 / sqrt(D).
        window: the layer's own sliding window in tokens, or None.
        want_lse: whether to return the natural log-sum-exp of each row.
        backend: the name that `choose_backend` gave.

    Raises:
        ShapeError: the tensors, the chunk and the index do not fit together.
        BackendError: the backend does not exist, or cannot run these tensors.
    """
    run: PrefillBackend = _module(backend, _PREFILL).prefill
    check_qkv(q_BHSD, k_BGKD, v_BGKD, scale)
    check_chunk(q_BHSD, k_BGKD, chunk, window)
    check_index(q_BHSD, index, chunk)
    return run(q_BHSD, k_BGKD, v_BGKD, index, chunk, scale=scale, window=window, want_lse=want_lse)


def dense_by_flash(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, chunk: Chunk, *, backend: str
) -> bool:
    """Whether `dense_prefill` goes to flash-attn-4: it is the backend, takes the tensors as they lie, and pays."""
    if backend != "flash":
        return False
    from sparsekv.kernels.prefill.flash.backend import takes_dense

    return takes_dense(q_BHSD, k_BGKD, v_BGKD, chunk)


def dense_prefill(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
    backend: str,
) -> AttentionOutput:
    """Dense causal attention of a whole layer: by flash-attn-4 where `dense_by_flash` says so, else by torch.

    Arguments, shapes and errors as in `dense_attention`; no log-sum-exp.

    Raises:
        BackendError: the backend does not exist.
    """
    _check_known(backend, _PREFILL)
    if dense_by_flash(q_BHSD, k_BGKD, v_BGKD, chunk, backend=backend):
        from sparsekv.kernels.prefill.flash.backend import dense

        check_qkv(q_BHSD, k_BGKD, v_BGKD, scale)
        check_chunk(q_BHSD, k_BGKD, chunk, window)
        return dense(q_BHSD, k_BGKD, v_BGKD, chunk, scale=scale, window=window)
    from sparsekv.kernels.prefill.dense import dense_attention  # parts of torch that load Triton

    return dense_attention(q_BHSD, k_BGKD, v_BGKD, chunk, scale=scale, window=window)


def decode_attention(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None = None,
    *,
    scale: float,
    window: int | None = None,
    want_lse: bool = False,
    scoring: Scoring | None = None,
    backend: str,
) -> AttentionOutput:
    """Attention of the newest token of each batch row. Lengths, counts and lists stay on the device.

    Args:
        q_BHQD: one query token a batch row: Q is 1.
        keys: contiguous or paged; a row of length 0 gives 0 and -inf.
        selection: which tokens each row attends to; all of them when None.
        scale: of the scores, usually 1 / sqrt(D).
        window: the layer's own sliding window in tokens, or None; selected tokens outside it are left out.
        want_lse: whether to return the natural log-sum-exp of each row.
        scoring: also return how much attention each token gets, in these rows; without selection and window.
        backend: the name that `choose_backend` gave.

    Raises:
        ShapeError: Q is not 1, or tensors and selection do not fit together.
        BackendError: the backend does not exist, or cannot run these tensors.
    """
    run: DecodeBackend = _module(backend, _DECODE).decode
    check_keys(q_BHQD, keys)
    _check_one_query(q_BHQD)
    if selection is not None:
        check_selection(keys, selection)
    if scoring is not None:
        check_scoring(keys, scoring, selection, window)
    return run(
        q_BHQD,
        keys,
        selection,
        scale=scale,
        window=window,
        want_lse=want_lse,
        scoring=scoring,
    )


def decode_scores(q_BHQD: torch.Tensor, keys: KeyView, scoring: Scoring, *, scale: float, backend: str) -> torch.Tensor:
    """The scores that `decode_attention` gives with `scoring`, without attending: values are not read.

    Returns:
        float32 [g, tokens]; anything where no row's scores lie.

    Raises:
        ShapeError, BackendError: as `decode_attention`.
    """
    check_keys(q_BHQD, keys)
    _check_one_query(q_BHQD)
    check_scoring(keys, scoring, None, None)
    found: torch.Tensor = _module(backend, _DECODE).score(q_BHQD, keys, scoring, scale=scale)
    return found


def _check_one_query(q_BHQD: torch.Tensor) -> None:
    if q_BHQD.shape[2] != 1:
        raise ShapeError(
            f"decode attention takes one query token a call, found {q_BHQD.shape[2]}: "
            "call it once a token, or use prefill attention"
        )


def _module(backend: str, modules: dict[str, str]) -> Any:
    _check_known(backend, modules)
    return import_module(modules[backend])


def _check_known(backend: str, modules: dict[str, str]) -> None:
    if backend not in modules:
        raise BackendError(f"backend must be one of {', '.join(modules)}, found {backend!r}: ask choose_backend")


def _obstacle(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tile: TileShape | None = None
) -> str | None:
    """Why a backend cannot run there; None when it can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, float16 and bfloat16, found {dtype}"
    if name == "flash":
        return device_obstacle(device) or shape_obstacle(dtype, head_dim, tile)
    if name == "triton":
        return _triton_obstacle(device, head_dim)
    if name == "cpu" and device.type != "cpu":
        return f"it works on tensors in main memory, not on {device.type}"
    return None


def _triton_obstacle(device: torch.device, head_dim: int) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it needs a CUDA or ROCm GPU that torch can see"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    from sparsekv.kernels.triton_support import head_size_obstacle

    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"Triton serves compute capability 8.0 (Ampere) and newer, found {major}.{minor}"
    return head_size_obstacle(head_dim)


class BackendWarning(UserWarning):
    """A backend failed, and its fallback computes from now on."""


class Fallback:
    """The backend in use, and its fallbacks when it fails: one object for the lifetime of an engine.

    Args:
        backend: the name that `choose_backend` gave.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend  # that the next call runs on
        self.failed: dict[str, str] = {}  # backends that are not tried again, and why
        self.decode_failed = ""  # why decode is computed by torch; empty where nothing failed
        self.builder_failed = ""  # why indices are no longer built by Triton; empty where nothing failed

    def run(self, call: Callable[[str], Found], q_BHSD: torch.Tensor, tile: TileShape | None = None) -> Found:
        """`call(backend)`, on the present backend or the first fallback that runs it.

        Args:
            call: computes everything from its inputs, so that it may be begun again: it writes to no input.
            q_BHSD: the queries, for what other backends would be given. Tensors are never moved to another device.
            tile: of the index.

        Raises:
            Exception: what the backend raised, when the input is at fault (any error of ours but a BackendError), no
                other backend takes these tensors where they are, or the device works no more.
        """
        while True:
            try:
                return call(self.backend)
            except Exception as error:
                behind = [name for name in backends_after(self.backend, q_BHSD, tile) if name not in self.failed]
                if _of_input(error) or not behind or not _alive(q_BHSD.device):
                    raise
                self._replace(error, behind[0])
            # Only here is the memory of the failed attempt, which the error's traceback held, free again.
            if q_BHSD.is_cuda:
                torch.cuda.empty_cache()

    def build(self, call: Callable[[BuilderName], Found], device: torch.device) -> Found:
        """`call(builder)`: an index, by the builders of this device, or by torch's once those have failed.

        Raises:
            Exception: what the builder raised, when the input is at fault, torch was the builder, or the device works
                no more.
        """
        if self.builder_failed:
            return call("torch")
        try:
            return call("auto")
        except Exception as error:
            if _of_input(error) or not builds_by_triton(device) or not _alive(device):
                raise
            self.builder_failed = _summary(error)
            warnings.warn(
                f"building indices by Triton failed ({self.builder_failed}); torch builds them from here on, which is "
                "slower",
                BackendWarning,
                stacklevel=3,
            )
        return call("torch")

    def decode(self, call: Callable[[str], Found], backend: str, device: torch.device) -> Found:
        """`call(backend)`: a decode step of a layer, or by torch operations once that has failed.

        Raises:
            Exception: what the backend raised, when the input is at fault, torch computed it, or the device works no
                more.
        """
        if self.decode_failed:
            return call("reference")
        try:
            return call(backend)
        except Exception as error:
            if (
                _of_input(error)
                or isinstance(error, torch.OutOfMemoryError)
                or backend in ("cpu", "reference")
                or not _alive(device)
            ):
                raise
            self.decode_failed = _summary(error)
            warnings.warn(
                f"decode by Triton failed ({self.decode_failed}); torch computes it from here on, which is slower",
                BackendWarning,
                stacklevel=3,
            )
        return call("reference")

    def _replace(self, error: Exception, fallback: str) -> None:
        self.failed[self.backend] = _summary(error)
        warnings.warn(
            f"the {self.backend} backend failed ({self.failed[self.backend]}); {fallback} computes prefill from "
            f"here on, which may be slower. Ask for it with --backend {fallback} to avoid the attempt.",
            BackendWarning,
            stacklevel=4,
        )
        self.backend = fallback


def is_backend_failure(error: Exception, device: torch.device) -> bool:
    """Whether a kernel did not compile or launch, or found no memory, on a device that still works: not an error in the
    code that called it."""
    is_kernels = isinstance(error, _FAILURES) or type(error).__module__.partition(".")[0] in _COMPILERS
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in _FAILURE_WORDS)
    return (is_kernels or says_so) and _alive(device)


def _of_input(error: Exception) -> bool:
    return isinstance(error, SparseKVError) and not isinstance(error, BackendError)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _alive(device: torch.device) -> bool:
    """Whether the device still works: after a bad access every later call fails as well, and what was computed before
    it cannot be trusted. Waits for the device, once for a failure."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
