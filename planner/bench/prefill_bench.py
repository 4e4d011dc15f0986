"""`sparsekv bench prefill`: a model end to end, by its plan and dense.

Dense is the fastest way there is: the unmodified model, or this runtime with the fastest dense kernel; each is tried at
every length. Runs alternate, and medians are compared. A run is timed from the tokens to the last logits; caches are
made before the clock starts, so that page-locking host memory is not counted.

Shapes: S tokens.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from sparsekv.kernels.backends import BackendWarning, choose_backend
from sparsekv.planner.bench.random_model import BenchModel
from sparsekv.planner.bench.timing import (
    FLASH_ATTN,
    RANKED_FROM,
    BenchRow,
    DensePeers,
    fastest_that_runs,
    flash_attn_4,
    free_memory,
    in_short,
    part_of,
    wait_for,
)
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply, check_plan
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.describe import attention_groups, decoder_of, device_name, dtype_name
from sparsekv.runtime.hf.generate import piece_sizes

MakeCache = Callable[[int], Cache]
Told = tuple[RunStats | None, str | None, str]  # see Run
Way = Callable[[], AbstractContextManager[tuple[MakeCache, Callable[[], Told]]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One prefill."""

    milliseconds: float
    peak: int | None  # most bytes of device memory, weights included; None on a CPU
    stats: RunStats | None  # where a plan was applied
    backend: str | None = None  # that computed prefill in the end, where a plan was applied: one that fails is replaced
    builder_failed: str = ""  # why torch built the indices in place of Triton


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share."""

    model: PreTrainedModel
    plan: Plan
    backend: str
    kv_host_layers: int | None
    chunk: int | None  # most tokens given to the model at once; None is all

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def sparse(self) -> Way:
        """By the plan."""
        return lambda: _applied(self, True)

    def dense(self) -> dict[str, Way]:
        """Every way to run dense: the unmodified model, this runtime, and the model with flash-attn-4 in its place."""
        model = self.model
        ways: dict[str, Way] = {
            "transformers, SDPA": lambda: _unmodified(model),
            "sparsekv dense": lambda: _applied(self, False),  # by the backend's own dense kernel
        }
        if self.device.type == "cuda":  # whatever the backend is: where it is installed, it counts
            ways[f"transformers, {FLASH_ATTN}"] = lambda: _captured(model, _by_flash_attn)
        return ways


def run_prefill(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
    """Prefills once.

    Args:
        layers: only the first of the model's; None for all.

    Raises:
        Whatever the model raises: out of memory, a kernel that does not run here.
    """
    device, length = setting.device, ids_1S.shape[1]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad(), way() as (new_cache, told), _first_layers(setting.model, layers):
        # Room for layers that do not run may be more than there is.
        cache: Any = new_cache(length if layers is None else 1)
        for layer in cache.layers[: layers or 0]:
            if isinstance(layer, SparseLayer):
                layer.reserve(length)
        wait_for(device)
        start = time.perf_counter()
        at = 0
        for size in [length] if setting.chunk is None else piece_sizes(length, setting.chunk):
            setting.model(ids_1S[:, at : at + size], past_key_values=cache, use_cache=True, logits_to_keep=1)
            at += size
        wait_for(device)
        elapsed = (time.perf_counter() - start) * 1e3
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Run(elapsed, peak, *told())


@contextmanager
def _first_layers(model: PreTrainedModel, count: int | None) -> Iterator[None]:
    """The model without its layers from `count` on, for what one layer costs."""
    if count is None:
        yield
        return
    decoder: Any = decoder_of(model)
    whole = decoder.layers
    decoder.layers = whole[:count]
    try:
        yield
    finally:
        decoder.layers = whole


def layer_flops(model: PreTrainedModel, tokens: int) -> float:
    """Operations of the matrix products of the decoder layers, attention aside."""
    decoder: Any = decoder_of(model)
    weights: Iterator[torch.Tensor] = decoder.layers.parameters()
    return 2.0 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)


@contextmanager
def _unmodified(model: PreTrainedModel) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    yield lambda length: DynamicCache(config=model.config), lambda: (None, None, "")


@contextmanager
def _applied(setting: Setting, sparse: bool) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    handle: Handle = apply(
        setting.model,
        setting.plan,
        prefill=sparse,
        backend=setting.backend,
        allow_mismatch=True,  # asked before anything was timed
        kv_host_layers=setting.kv_host_layers,
    )
    with handle:
        yield handle.new_cache, lambda: (handle.stats(), handle.backend.name, handle.builder_failed)


@contextmanager
def _captured(
    model: PreTrainedModel, observer: Callable[[AttentionCall], torch.Tensor | None]
) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    with capture_attention(model, observer):
        yield lambda length: DynamicCache(config=model.config), lambda: (None, None, "")


def _by_flash_attn(call: AttentionCall) -> torch.Tensor | None:
    """Layers with a window of their own are left to torch."""
    if call.window is not None:
        return None
    return flash_attn_4(call.q_BHSD, *(x[:, :, : call.chunk.longest] for x in (call.k_BGKD, call.v_BGKD)))


Found = TypeVar("Found")

# A first run as long as this is no warm-up: what is prepared once does not show in it.
_LONG_MS = 5000.0
_WARM_UP_TOKENS = 4096  # of the prompt that kernels are compiled with
_OUT_OF_REACH = 1.3  # over the fastest dense run: no longer in the running


@dataclass(frozen=True, slots=True)
class PrefillBench:
    """How to time.

    Attributes:
        repeats: runs of each, alternating.
        chunk: most tokens given to the model at once; None is all.
        backend: of sparse attention, or "auto".
        kv_host_layers: layers whose keys and values go to host memory, in place of what the plan says.
        dense_layers: measure dense on so many layers, and multiply; None measures the whole model.
    """

    lengths: tuple[int, ...]
    repeats: int = 3
    chunk: int | None = None
    backend: str = "auto"
    kv_host_layers: int | None = None
    dense_layers: int | None = None
    seed: int = 0
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or self.repeats < 1:
            raise UsageError("expected at least one length and one repeat, found none")
        if self.dense_layers is not None and self.dense_layers < 1:
            raise UsageError(f"expected at least one layer to measure dense on, found {self.dense_layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow(BenchRow):
    """Prefill of a whole model, end to end, dense and by a plan.

    Attributes:
        dense_ms, sparse_ms: medians over the repeats.
        tflops: of the sparse run: matrix products of the layers, and attention on the tiles that are computed.
        weights: "random" or "loaded".
        plan: what the sparse run follows, in words.
        dense_peak, sparse_peak: most bytes of device memory, weights included; None on a CPU.
        kv_device, kv_host: bytes of the sparse run's cache.
    """

    weights: str
    plan: str
    layers: int
    dense_peak: int | None = None
    sparse_peak: int | None = None
    kv_device: int | None = None
    kv_host: int | None = None

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        own = {
            "weights": self.weights,
            "plan": self.plan,
            "layers": self.layers,
            "dense_peak_bytes": self.dense_peak,
            "sparse_peak_bytes": self.sparse_peak,
            "peak_ratio": self.sparse_peak / self.dense_peak if self.sparse_peak and self.dense_peak else None,
            "kv_bytes_device": self.kv_device,
            "kv_bytes_host": self.kv_host,
        }
        return self.with_keys(own)


def bench_prefill(
    subject: BenchModel, plan: Plan, words: str, bench: PrefillBench, progress: Progress | None = None
) -> Iterator[PrefillRow]:
    """Times every length, and gives one row each as soon as it is known.

    Args:
        words: what the plan is, for the rows.

    Raises:
        PromptError: a length is beyond the model's context.
        PlanMismatchError, UnsupportedError: the plan is not for this model.
        BackendError: the backend cannot run here.
        UsageError: dense is to be measured on, or host memory is to hold, more layers than there are.
    """
    model, info = subject.model, subject.info
    if max(bench.lengths) > info.context_length:
        raise PromptError(
            f"expected lengths within the model's context of {info.context_length} tokens, found {max(bench.lengths)}"
        )
    if bench.dense_layers is not None and bench.dense_layers + 1 > info.layers:
        raise UsageError(f"expected --dense-layers below the model's {info.layers} layers, found {bench.dense_layers}")
    if bench.kv_host_layers is not None and bench.kv_host_layers > info.layers:
        raise UsageError(f"expected --kv-host-layers up to {info.layers}, found {bench.kv_host_layers}")
    check_plan(plan, info, bench.allow_mismatch)
    tile = plan.prefill.tile if plan.prefill else None
    backend = choose_backend(model.device, model.dtype, info.attention[0].head_dim, bench.backend, tile).name
    setting = Setting(model, plan, bench.backend, bench.kv_host_layers, bench.chunk)
    with (progress or NoProgress()).stage("prefill", total=len(bench.lengths)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the plan warns of was said above
        warnings.simplefilter("default", BackendWarning)
        for length in bench.lengths:
            step.advance(0, note=f"{format_length(length)} tokens")
            blank = PrefillRow(
                name=subject.name,
                length=length,
                backend=backend,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                weights=subject.weights,
                plan=words,
                layers=info.layers,
                note=subject.note,
            )
            yield _row(blank, setting, bench)
            free_memory(model.device)
            step.advance()


def _row(blank: PrefillRow, setting: Setting, bench: PrefillBench) -> PrefillRow:
    ids_1S = _prompt(setting, blank.length, bench.seed)
    try:
        sparse = [_warmed(setting, setting.sparse(), ids_1S)]
    except Exception as error:  # out of memory, or a kernel that fails
        blank, sparse = _noted(blank, f"sparse: {in_short(error)}"), []
    tried, refused = _try_dense(setting, bench, ids_1S)
    ways, dense_note = setting.dense(), ""
    if bench.dense_layers is not None:
        dense_note = f"dense is {bench.dense_layers} measured layer(s) times {blank.layers}, once"
        if 0 < (bench.kv_host_layers or 0) < blank.layers:
            dense_note += ", without the copies of layers in host memory"
    again = tried if bench.dense_layers is None else {}
    broken = _alternate(setting, ways, again, sparse, ids_1S, bench.repeats)
    timed_ms = {name: statistics.median(run.milliseconds for run in runs) for name, runs in tried.items()}
    peers = DensePeers(blank.length, timed_ms, refused)
    row = _noted(_noted(replace(blank, dense_peers=peers), dense_note), broken)
    if peers.fastest:
        row = replace(row, dense_ms=timed_ms[peers.fastest], dense_peak=_peak(tried[peers.fastest], bench))
    return _with_sparse(row, setting, sparse) if sparse else row


def _try_dense(
    setting: Setting, bench: PrefillBench, ids_1S: torch.Tensor
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """One run of each way, and why others do not run."""
    ways, few = setting.dense(), bench.dense_layers

    def whole(name: str) -> list[Run]:
        try:
            way = ways[name]
            return [_warmed(setting, way, ids_1S) if few is None else _extrapolated(setting, way, ids_1S, few)]
        finally:
            free_memory(setting.device)

    # A model of one layer has no second one, by which ways are compared.
    if ids_1S.shape[1] < RANKED_FROM or setting.model.config.num_hidden_layers == 1:
        return _each(ways, whole)
    part_1S = ids_1S[:, : part_of(ids_1S.shape[1])]
    on_part, failed = _each(ways, lambda name: _extrapolated(setting, ways[name], part_1S, 1).milliseconds)
    tried, refused = fastest_that_runs(on_part, ids_1S.shape[1], whole)
    return tried, failed | refused


def _each(names: Iterable[str], run: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """What every way gives, and why others do not run."""
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            found[name] = run(name)
        except Exception as error:
            refused[name] = in_short(error)
    return found, refused


def _alternate(
    setting: Setting,
    ways: dict[str, Way],
    tried: dict[str, list[Run]],
    sparse: list[Run],
    ids_1S: torch.Tensor,
    repeats: int,
) -> str:
    """The other repeats: dense ways that may be the fastest, and sparse, every other round backwards.

    What fails ends the repeats, as the others would no longer be timed in turn with it; returns what there is to say.
    """
    least = min((runs[0].milliseconds for runs in tried.values()), default=0.0)
    near = [name for name, runs in tried.items() if runs[0].milliseconds <= _OUT_OF_REACH * least]
    turns = [(tried[name], ways[name]) for name in near] + ([(sparse, setting.sparse())] if sparse else [])
    for number in range(1, repeats):
        for runs, way in turns[:: -1 if number % 2 else 1]:
            try:
                runs.append(run_prefill(setting, way, ids_1S))
            except Exception as error:
                return f"repeat {number + 1} failed, and the ones before it are shown: {in_short(error)}"
    return ""


def _warmed(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
    """A run after kernels were compiled: by a short prompt, and by one layer, because long prompts may take others.

    A run that is short is repeated, so that nothing is new to it.
    """
    if setting.device.type == "cuda":
        run_prefill(setting, way, ids_1S[:, :_WARM_UP_TOKENS], layers)
        run_prefill(setting, way, ids_1S, 1)
    run = run_prefill(setting, way, ids_1S, layers)
    return run if run.milliseconds > _LONG_MS else run_prefill(setting, way, ids_1S, layers)


def _extrapolated(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int) -> Run:
    """The whole model's time, from one layer and from `layers` more."""
    count = setting.model.config.num_hidden_layers
    one = _warmed(setting, way, ids_1S, 1)
    more = _warmed(setting, way, ids_1S, 1 + layers)
    each = (more.milliseconds - one.milliseconds) / layers
    if each <= 0.0:
        raise RuntimeError("a layer more took no longer, which cannot be multiplied; measure more --dense-layers")
    return Run(one.milliseconds + (count - 1) * each, None, None)


def _with_sparse(row: PrefillRow, setting: Setting, runs: list[Run]) -> PrefillRow:
    milliseconds = statistics.median(run.milliseconds for run in runs)
    stats, plan, ran = runs[-1].stats, setting.plan.prefill, runs[-1].backend
    if ran is not None and ran != row.backend:
        row = _noted(replace(row, backend=ran), f"{row.backend} failed, and {ran} took over")
    if runs[-1].builder_failed:
        row = _noted(row, f"torch built the indices, which is slower: Triton failed ({runs[-1].builder_failed})")
    if stats is None:
        return replace(row, sparse_ms=milliseconds, sparse_peak=runs[-1].peak)
    tile = plan.tile if plan else TileShape()  # what the runtime counts in where there is no plan
    head_dim = attention_groups(setting.model.config)[0].head_dim
    attention = 4.0 * head_dim * tile.query * tile.key * stats.prefill_tiles_computed
    return replace(
        row,
        sparse_ms=milliseconds,
        sparse_peak=runs[-1].peak,
        density=stats.prefill_density,
        tflops=(layer_flops(setting.model, row.length) + attention) / milliseconds / 1e9,
        kv_device=stats.kv_bytes_device,
        kv_host=stats.kv_bytes_host,
    )


def _prompt(setting: Setting, length: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, setting.model.config.vocab_size, (1, length), generator=random).to(setting.device)


def _peak(runs: list[Run], bench: PrefillBench) -> int | None:
    peaks = [run.peak for run in runs if run.peak is not None]
    return max(peaks) if peaks and bench.dense_layers is None else None


def _noted(row: PrefillRow, note: str) -> PrefillRow:
    return replace(row, note="; ".join(part for part in (row.note, note) if part))
