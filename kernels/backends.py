"""Decides which backend runs, the attention calls of a sparse layer, and what happens when a kernel fails.

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
from typing import Any, TypeVar

import torch

from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.index.build import BuilderName, builds_by_triton
from sparsekv.kernels.keys import MOST_QUERIES, PLAIN, KeyView, Softmax, check_keys
from sparsekv.kernels.prefill.flash.limits import device_obstacle, shape_obstacle, untested
from sparsekv.kernels.tiles import AttentionOutput, Chunk, PrefillCall, TileIndex, has_triton
from sparsekv.plans.errors import BackendError, SparseKVError, install_command
from sparsekv.plans.patterns import TileShape

Found = TypeVar("Found")

_CHOICES = ("flash", "triton", "cpu")  # the first that can run is chosen
BACKENDS = (*_CHOICES, "reference")
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
_BY_TORCH = ("cpu", "reference")  # in decode, over keys of any strides


# What a kernel's failure is told by: where its error is defined, its type, or what a plain RuntimeError says.
_COMPILERS = ("triton", "cutlass")
_FAILURES = (BackendError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
_FAILURE_WORDS = ("Triton Error", "DefaultCPUAllocator: can't allocate memory")


USE_AUTO = "; use --set backend=auto"  # what ends the message about a backend that was asked for and cannot run


@dataclass(frozen=True, slots=True)
class BackendChoice:
    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    requested: str = "auto",
    tile: TileShape | None = None,
    capped: bool = False,
) -> BackendChoice:
    """The first backend that runs on this device, or the requested one.

    Args:
        requested: "auto" or one of BACKENDS.
        tile: of the plan; without one, backends are not asked whether they take its tiles.
        capped: whether the scores of the model have a soft cap.

    Raises:
        BackendError: there is no such backend, or it cannot run here; the message says why and what to do.
    """
    device = torch.device(device)
    if requested not in ("auto", *BACKENDS):
        raise BackendError(f"backend must be auto or one of {', '.join(BACKENDS)}, found {requested!r}")
    rejected: list[tuple[str, str]] = []
    for name in _CHOICES if requested == "auto" else (requested,):
        obstacle = _obstacle(name, device, dtype, head_dim, tile)
        if name == "flash" and capped and obstacle is None:
            obstacle = "its lists of tiles know no soft cap of scores"
        if obstacle is None and requested == "auto" and name == "flash":
            obstacle = untested()
        if obstacle is None:
            return BackendChoice(name, _REASONS[name] if requested == "auto" else "requested", tuple(rejected))
        rejected.append((name, obstacle))
    if requested != "auto":
        raise _cannot_run(requested, device, rejected[0][1])
    why = "; ".join(f"{name}: {obstacle}" for name, obstacle in rejected)
    raise BackendError(f"no backend runs {dtype} with head size {head_dim} on {device} ({why})")


def check_backend(requested: str, device: torch.device) -> None:
    """Refuses a backend that cannot run on this device, whatever the model."""
    if requested != "auto" and (obstacle := _machine_obstacle(requested, device)):
        raise _cannot_run(requested, device, obstacle)


def backends_after(name: str, q_BHSD: torch.Tensor, tile: TileShape | None = None) -> tuple[str, ...]:
    """The backends behind `name` in the order of choice that take such tensors where they are; never another device."""
    call = (q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[-1], tile)
    return tuple(other for other in _CHOICES[BACKENDS.index(name) + 1 :] if _obstacle(other, *call) is None)


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
    softmax: Softmax = PLAIN,
    backend: str,
) -> AttentionOutput:
    """Causal attention over the tiles and single columns of an index, all heads of a layer in one call.

    Args:
        q_BHSD: the chunk's queries; any strides for B, H and S. Rows past a batch row's length are padding.
        k_BGKD: all keys so far; memory past a row's length may hold anything.
        index: built for this chunk; see tiles.py for the mask it stands for.
        scale: of the scores, usually 1 / sqrt(D).
        window: the layer's own sliding window in tokens, or None.
        want_lse: whether to return the natural log-sum-exp of each row, of its keys.

    Raises:
        ShapeError: the tensors and the chunk do not fit together.
        BackendError: the backend does not exist, or cannot run these tensors.
    """
    module = _module(backend, _PREFILL)
    call = PrefillCall(q_BHSD, k_BGKD, v_BGKD, chunk, scale, window, softmax.cap).check()
    attended: AttentionOutput = module.prefill(call, index, want_lse or softmax.sinks_H is not None)
    if softmax.sinks_H is not None:
        assert attended.lse_BHS is not None
        attended.out_BHSD.mul_(softmax.kept(attended.lse_BHS)[..., None])
    return attended


def dense_by_flash(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, chunk: Chunk, *, backend: str
) -> bool:
    """True where `dense_prefill` goes to flash-attn-4: the backend, where it takes the tensors as they lie, and
    pays."""
    if backend != "flash":
        return False
    from sparsekv.kernels.prefill.flash.backend import takes_dense

    return takes_dense(q_BHSD, k_BGKD, v_BGKD, chunk)


def dense_by_triton(q_BHSD: torch.Tensor, *, backend: str) -> bool:
    """True where `dense_prefill` goes to our own kernel: torch's fast ones end at a head size of 256."""
    return backend == "triton" and q_BHSD.is_cuda and q_BHSD.shape[3] > 256 and q_BHSD.shape[2] > 1


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
    """Dense causal attention of a whole layer: by flash-attn-4 or our own kernel where `dense_by_flash` or
    `dense_by_triton` say so, else by torch. As `dense_attention`; no log-sum-exp."""
    module = _module(backend, _PREFILL)
    call = PrefillCall(q_BHSD, k_BGKD, v_BGKD, chunk, scale, window).check()
    if dense_by_triton(q_BHSD, backend=backend) or dense_by_flash(q_BHSD, k_BGKD, v_BGKD, chunk, backend=backend):
        dense: AttentionOutput = module.dense(call)
        return dense
    from sparsekv.kernels.prefill.dense import dense_attention  # parts of torch that load Triton

    return dense_attention(q_BHSD, k_BGKD, v_BGKD, chunk, scale=scale, window=window)


def decode_attention(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None = None,
    *,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
    out: torch.Tensor | None = None,
    new_B: torch.Tensor | None = None,
    backend: str,
) -> AttentionOutput:
    """Attention of the newest tokens of each batch row, causal among themselves. Lengths, counts and lists stay on the
    device.

    Args:
        q_BHQD: queries of the newest tokens of each batch row: Q is 1 to MOST_QUERIES; above 1 without selection,
            scoring and out.
        keys: contiguous or paged; a row of length 0 gives 0.
        selection: which tokens each row attends to; all of them when None.
        scale: of the scores, usually 1 / sqrt(D).
        window: the layer's own sliding window in tokens, or None; selected tokens outside it are left out.
        scoring: also return how much attention each token gets, in these rows; without selection and window.
        out: where the output goes, of the shape of q and with stride 1 in its last dimension; rows of length 0 are left
            as they are.
        new_B: int32 on the device: how many of the Q tokens each row has, the first ones; all of them when None. The
            others give 0, and a row without any reads no key.

    Raises:
        ShapeError: Q is none of these, or the tensors do not fit together.
        BackendError: the backend does not exist, or cannot run these tensors.
    """
    module, chooses = _module(backend, _DECODE), not (selection is None and scoring is None and out is None)
    check_keys(q_BHQD, keys, scale, backend in _BY_TORCH, 1 if chooses else MOST_QUERIES)
    attended: AttentionOutput = module.decode(
        q_BHQD, keys, selection, scale=scale, window=window, scoring=scoring, out=out, new_B=new_B
    )
    return attended


def decode_scores(q_BHQD: torch.Tensor, keys: KeyView, scoring: Scoring, *, scale: float, backend: str) -> torch.Tensor:
    """float32 [g, tokens]: the scores of `decode_attention` with `scoring`, without reading values."""
    module = _module(backend, _DECODE)
    check_keys(q_BHQD, keys, scale, backend in _BY_TORCH)
    scores_gT: torch.Tensor = module.score(q_BHQD, keys, scoring, scale=scale)
    return scores_gT


def _module(backend: str, modules: dict[str, str]) -> Any:
    if backend not in modules:
        raise BackendError(f"backend must be one of {', '.join(modules)}, found {backend!r}: ask choose_backend")
    return import_module(modules[backend])


def _cannot_run(name: str, device: torch.device, obstacle: str) -> BackendError:
    return BackendError(f"backend {name!r} cannot run on {device}: {obstacle}{USE_AUTO}")


def _obstacle(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tile: TileShape | None = None
) -> str | None:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, float16 and bfloat16, found {dtype}"
    if obstacle := _machine_obstacle(name, device):
        return obstacle
    if name == "flash":
        return shape_obstacle(dtype, head_dim, tile)
    if name == "triton":
        from sparsekv.kernels.triton_support import head_size_obstacle

        return head_size_obstacle(head_dim)
    return None


def float8_obstacle(backend: str, device: torch.device) -> str | None:
    """The reason why a backend does not read keys and values in e4m3 there; None when it does."""
    if backend in _BY_TORCH or device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "Triton reads another format of 8 bits on a ROCm GPU"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        return f"Triton reads e4m3 from compute capability 8.9 (Ada) on, found {capability[0]}.{capability[1]}"
    return None


def _machine_obstacle(name: str, device: torch.device) -> str | None:
    if name == "flash":
        return device_obstacle(device)
    if name == "cpu" and device.type != "cpu":
        return f"it works on tensors in main memory, not on {device.type}"
    if name != "triton":
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it needs a CUDA or ROCm GPU that torch can see"
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"Triton serves compute capability 8.0 (Ampere) and newer, found {capability[0]}.{capability[1]}"
    if not has_triton():
        return f"Triton is not installed: {install_command('gpu')}"
    return None


class BackendWarning(UserWarning):
    """A backend failed, and its fallback computes from now on."""


class Fallback:
    """The backend in use, and its fallbacks when it fails: one object for the lifetime of an engine. `relieve` gives
    unused memory of the device back; whether there was any."""

    def __init__(self, backend: str, relieve: Callable[[], bool] = lambda: False) -> None:
        self.backend = backend  # that the next call runs on
        self._relieve = relieve
        self.failed: dict[str, str] = {}  # backends that are not tried again, and why
        self._by_torch: dict[str, str] = {}  # what Triton no longer computes, and why

    @property
    def builder_failed(self) -> str:
        """The reason why indices are no longer built by Triton; empty where nothing failed."""
        return self._by_torch.get("index building", "")

    def run(self, call: Callable[[str], Found], q_BHSD: torch.Tensor, tile: TileShape | None = None) -> Found:
        """`call(backend)`, on the present backend or the first fallback that runs it.

        Args:
            call: computes everything from its inputs, so that it may be begun again: it writes to no input.
            q_BHSD: the queries, for what other backends would be given. Tensors are never moved to another device.

        Raises:
            Exception: what the backend raised, when the input is at fault (any error of ours but a BackendError), no
                other backend takes these tensors where they are, or the device works no more.
        """
        while True:
            try:
                return self._attempt(call, self.backend)
            except Exception as error:
                behind = [name for name in backends_after(self.backend, q_BHSD, tile) if name not in self.failed]
                if not behind or not _recoverable(error, q_BHSD.device):
                    raise
                self.failed[self.backend] = summary(error)
                _warn(
                    f"the {self.backend} backend", error, f"{behind[0]}; --set backend={behind[0]} avoids the attempt"
                )
                self.backend = behind[0]
            # Only here is the memory of the failed attempt, which the error's traceback held, free again.
            if q_BHSD.is_cuda:
                torch.cuda.empty_cache()

    def build(self, call: Callable[[BuilderName], Found], device: torch.device) -> Found:
        """`call(builder)`: an index, by this device's builders, or by torch's once those have failed. Raises as
        `run`."""
        return self._or_torch("index building", call, ("auto", "torch"), device if builds_by_triton(device) else None)

    def dense(self, call: Callable[[str], Found], device: torch.device) -> Found:
        """`call(backend)`: dense attention by our own kernel, or by torch once that has failed. Raises as `run`."""
        return self._or_torch("dense attention", call, (self.backend, "reference"), device)

    def decode(self, call: Callable[[str], Found], backend: str, device: torch.device) -> Found:
        """`call(backend)`: a decode step, or by torch once that has failed. Raises as `run`, and for want of memory."""
        return self._or_torch("decode", call, (backend, "reference"), None if backend in _BY_TORCH else device)

    def _attempt(self, call: Callable[[Any], Found], name: Any) -> Found:
        """Once more where memory ran out and some could be given back."""
        try:
            return call(name)
        except torch.OutOfMemoryError:
            if not self._relieve():
                raise
        return call(name)

    def _or_torch(
        self, part: str, call: Callable[[Any], Found], names: tuple[str, str], device: torch.device | None
    ) -> Found:
        """`call` by the first name, or by the second once that failed; without a device there is no second."""
        if part not in self._by_torch:
            try:
                return self._attempt(call, names[0])
            except Exception as error:
                short = part == "decode" and isinstance(error, torch.OutOfMemoryError)
                if device is None or short or not _recoverable(error, device):
                    raise
                self._by_torch[part] = summary(error)
                _warn(part, error, "torch, which is slower")
        return call(names[1])


def is_backend_failure(error: Exception, device: torch.device) -> bool:
    """A kernel did not compile or launch, or found no memory, on a device that still works."""
    is_kernels = isinstance(error, _FAILURES) or type(error).__module__.partition(".")[0] in _COMPILERS
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in _FAILURE_WORDS)
    return (is_kernels or says_so) and _alive(device)


def _recoverable(error: Exception, device: torch.device) -> bool:
    """Returns whether the same call may be tried elsewhere: not the input's fault, and the device still works."""
    return (not isinstance(error, SparseKVError) or isinstance(error, BackendError)) and _alive(device)


def _warn(what: str, error: Exception, instead: str) -> None:
    warnings.warn(f"{what} failed ({summary(error)}); from here on by {instead}", BackendWarning, stacklevel=4)


def summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _alive(device: torch.device) -> bool:
    """The device still works: after a bad access every later call fails as well, and results from
    before it cannot be trusted. Waits for the device, once for a failure."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
