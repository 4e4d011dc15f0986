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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from sparsekv.bench.dense_kernels import FLASH_ATTN, flash_attn_4
from sparsekv.bench.harness import (
    PARTS,
    RANKED_FROM,
    Columns,
    DensePeers,
    Row,
    bytes_in_short,
    fastest_that_runs,
    free_memory,
    number,
    repeat_in_turn,
    try_each,
    wait_for,
)
from sparsekv.bench.random_model import BenchModel
from sparsekv.kernels.backends import BackendWarning, choose_backend
from sparsekv.planner.options import check_lengths
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.attention import NAME
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.describe import attention_modules, cache_inputs, decoder_of
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention
from sparsekv.runtime.hf.placement import warn_of_host_layers
from sparsekv.runtime.model_config import device_name, dtype_name, rope_switch
from sparsekv.runtime.plan_checks import check_plan

COLUMNS: Columns = {
    "length": ("length", format_length),
    "backend": ("backend", str),
    "density": ("density", number(".3f")),
    "dense s": ("dense_ms", number(".3f", 1e3)),
    "sparse s": ("sparse_ms", number(".3f", 1e3)),
    "speedup": ("speedup", number(".2f")),
    "TFLOP/s": ("tflops", number(".3g")),
    "dense peak": ("dense_peak_bytes", bytes_in_short),
    "sparse peak": ("sparse_peak_bytes", bytes_in_short),
    "KV device": ("kv_bytes_device", bytes_in_short),
    "KV host": ("kv_bytes_host", bytes_in_short),
}
SPARSE = "by the plan"
_SDPA, _OURS, _FLASH_ATTN = "transformers, SDPA", "sparsekv dense", f"transformers, {FLASH_ATTN}"
# A first run as long as this is no warm-up: what is prepared once does not show in it.
_LONG_MS = 5000.0
_WARM_UP_TOKENS = 4096  # of the prompt that kernels are compiled with
_MEMORY = ("dense_peak_bytes", "sparse_peak_bytes", "peak_ratio", "kv_bytes_device", "kv_bytes_host")
_RUNS = ("dense_runs_ms", "sparse_runs_ms")  # of each repeat
_OUT_OF_REACH = 1.3  # over the fastest dense run: no longer in the running


@dataclass(frozen=True, slots=True)
class PrefillBench:
    """Says how to time.

    Attributes:
        chunk: tokens of a prompt at once by the plan; dense ways take it whole.
        kv_host_layers: layers whose keys and values go to host memory, instead of those that the plan says.
        dense_layers: measure dense on so many layers, and multiply; None measures the whole model.
        ranked_from: tokens from which the ways to run dense are compared on a part, and the fastest alone runs on all.
        sparse: where the plan is executed, as `apply` takes it.
        prompts: tokens by length; of other lengths they are random.
    """

    lengths: tuple[int, ...]
    repeats: int = 3
    chunk: int | None = None
    backend: str = "auto"
    kv_host_layers: int | None = None
    dense_layers: int | None = None
    seed: int = 0
    allow_mismatch: bool = False
    ranked_from: int = RANKED_FROM
    sparse: str = "always"
    prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.lengths or self.repeats < 1:
            raise UsageError("expected at least one length and one repeat, found none")
        if self.dense_layers is not None and self.dense_layers < 1:
            raise UsageError(f"expected at least one layer to measure dense on, found {self.dense_layers}")


@dataclass(frozen=True, slots=True)
class Run:
    """One prefill."""

    milliseconds: float
    peak: int | None = None  # most bytes of device memory, weights included; None on a CPU
    stats: RunStats | None = None  # where a plan was applied
    backend: str | None = None  # that computed prefill in the end, where a plan was applied: one that fails is replaced
    builder_failed: str = ""  # why torch built the indices instead of Triton


@dataclass(frozen=True)
class PrefillRuns:
    """Prefills of one model: by its plan, and in every way that there is to run dense."""

    model: PreTrainedModel
    plan: Plan
    bench: PrefillBench

    @property
    def dense(self) -> tuple[str, ...]:
        """The unmodified model, this runtime, and the model with flash-attn-4, wherever that is installed."""
        return (_SDPA, _OURS, _FLASH_ATTN) if self.model.device.type == "cuda" else (_SDPA, _OURS)

    @property
    def compiles(self) -> bool:
        """Returns whether kernels are compiled when they are first launched."""
        return self.model.device.type == "cuda"

    def prompt(self, length: int) -> torch.Tensor:
        if (ids := self.bench.prompts.get(length)) is not None:
            return torch.tensor([ids], device=self.model.device)
        random = torch.Generator().manual_seed(self.bench.seed)
        ids_1S = torch.randint(1, self.model.config.vocab_size, (1, length), generator=random)
        return ids_1S.to(self.model.device)

    def run(self, way: str, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
        """Prefills once.

        Args:
            way: SPARSE, or one of `dense`.
            layers: only the first of the model's; None for all.
        """
        device, length = self.model.device, ids_1S.shape[1]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        # A plan is applied to the whole model, which it is for.
        with torch.no_grad(), self._prepared(way) as prepared, _first_layers(self.model, layers):
            handle = prepared if isinstance(prepared, Handle) else None
            # Room for layers that do not run may be more than there is.
            room = length if layers is None else 1
            cache: Any = handle.new_cache(room) if handle else DynamicCache(config=self.model.config)
            if handle and layers is not None:
                _leave(cache, layers, length)
            wait_for(device)
            start = time.perf_counter()
            at = 0
            switch, chunk = rope_switch(self.model.config), self.bench.chunk if way == SPARSE else None
            # The cut is of sparse attention.
            if handle and chunk and not any(handle.pays.prefill.pays(rows, length) for rows in (chunk, length)):
                chunk = None
            for size in [length] if chunk is None else piece_sizes(length, chunk, switch):
                piece = ids_1S[:, at : at + size]
                self.model(piece, use_cache=True, logits_to_keep=1, **cache_inputs(self.model, cache, piece))
                at += size
            wait_for(device)
            elapsed = (time.perf_counter() - start) * 1e3
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            told = (handle.stats(), handle.backend.name, handle.builder_failed) if handle else ()
            return Run(elapsed, peak, *told)

    def warmed(self, way: str, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
        """A run after kernels were compiled: by a short prompt, and by one layer, because long prompts may take others.

        A run that is short is repeated, so that nothing is new to it.
        """
        if self.compiles:
            self.run(way, ids_1S[:, :_WARM_UP_TOKENS], layers)
            self.run(way, ids_1S, 1)
        run = self.run(way, ids_1S, layers)
        return run if run.milliseconds > _LONG_MS else self.run(way, ids_1S, layers)

    def multiplied(self, way: str, ids_1S: torch.Tensor, layers: int) -> Run:
        """The whole model's time, from one layer and from `layers` more."""
        one = self.warmed(way, ids_1S, 1)
        more = self.warmed(way, ids_1S, 1 + layers)
        each = (more.milliseconds - one.milliseconds) / layers
        if each <= 0.0:
            raise RuntimeError("a layer more took no longer, which cannot be multiplied; measure more dense_layers")
        return Run(one.milliseconds + (self.model.config.num_hidden_layers - 1) * each)

    def _prepared(self, way: str) -> AbstractContextManager[object]:
        if way == _SDPA:
            return nullcontext()
        if way == _FLASH_ATTN:
            return capture_attention(self.model, _by_flash_attn)
        return apply(
            self.model,
            self.plan,
            prefill=way == SPARSE,  # else by the backend's own dense kernel
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
            kv_host_layers=self.bench.kv_host_layers,
            sparse=self.bench.sparse,
        )


@contextmanager
def _first_layers(model: PreTrainedModel, count: int | None) -> Iterator[None]:
    """The model without its layers from `count` on, for what one layer costs."""
    decoder: Any = decoder_of(model)
    whole, attached = decoder.layers, vars(attention_modules(model)[0]).get(NAME)
    shapes = getattr(attached, "shapes", {})
    if count is not None:
        decoder.layers = whole[:count]
        if attached is not None:  # which sees to it that all layers attend
            attached.shapes = {layer: shape for layer, shape in shapes.items() if layer < count}
    try:
        yield
    finally:
        decoder.layers = whole
        if attached is not None:
            attached.shapes = shapes


def _leave(cache: Any, count: int, length: int) -> None:
    """Leaves the first layers of a cache alone, with memory for so many tokens: the others would be given some, too."""
    ours = [at for at, layer in enumerate(cache.layers) if isinstance(layer, SparseLayer)]
    del cache.layers[max(count, ours[0] + 1) :]  # lengths are those of one of ours
    for at in ours:
        if at < count:
            cache.layers[at].reserve(length)


def _by_flash_attn(call: AttentionCall) -> torch.Tensor | None:
    """Layers with a window of their own are left to torch."""
    if call.window is not None:
        return None
    return flash_attn_4(call.q_BHSD, *(x[:, :, : call.chunk.longest] for x in (call.k_BGKD, call.v_BGKD)))


def bench_prefill(
    subject: BenchModel, plan: Plan, words: str, bench: PrefillBench, progress: Progress | None = None
) -> Iterator[Row]:
    """Times every length, and gives one row each as soon as it is known.

    Of a row's own: peaks of device memory, weights included (None on a CPU), and the bytes of the sparse run's cache.
    `tflops` is of the sparse run: matrix products of the layers, and attention on the tiles that are computed.

    Args:
        words: what the plan is, for the rows.
    """
    model, info = subject.model, subject.info
    check_lengths(bench.lengths, info.context_length)
    if bench.dense_layers is not None and bench.dense_layers + 1 > info.layers:
        raise UsageError(f"expected dense_layers below the model's {info.layers} layers, found {bench.dense_layers}")
    if bench.kv_host_layers is not None and bench.kv_host_layers > info.layers:
        raise UsageError(f"expected --kv-host-layers up to {info.layers}, found {bench.kv_host_layers}")
    warn_of_host_layers(model.device, None, bench.kv_host_layers)
    check_plan(plan, info, bench.allow_mismatch, "--random-weights")
    tile = plan.prefill.tile if plan.prefill else None
    backend = choose_backend(model.device, model.dtype, info.largest_head, bench.backend, tile).name
    runs = PrefillRuns(model, plan, bench)
    own = {"weights": subject.weights, "plan": words, "layers": info.layers}
    with (
        (progress or Progress()).stage("prefill", total=sum(map(prefill_work, bench.lengths))) as step,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what the plan warns of was said above
        warnings.simplefilter("default", BackendWarning)
        for length in bench.lengths:
            step.advance(0, note=f"{format_length(length)} tokens")
            yield _timed(
                Row(
                    name=subject.name,
                    length=length,
                    backend=backend,
                    device=device_name(model.device),
                    dtype=dtype_name(model.dtype),
                    own=own | dict.fromkeys((*_MEMORY, *_RUNS)),
                    note=subject.note,
                ),
                runs,
            )
            free_memory(model.device)
            step.advance(prefill_work(length))


def _timed(row: Row, runs: PrefillRuns) -> Row:
    bench, ids_1S = runs.bench, runs.prompt(row.length)
    sparse, failed = try_each([SPARSE], lambda way: [runs.warmed(way, ids_1S)])
    dense, refused = _try_dense(runs, ids_1S)
    row = row.plus(*(f"sparse: {why}" for why in failed.values()))
    turns = sparse
    if bench.dense_layers is None:
        least = min((found[0].milliseconds for found in dense.values()), default=0.0)
        near = {way: found for way, found in dense.items() if found[0].milliseconds <= _OUT_OF_REACH * least}
        turns = near | sparse
    else:
        copies = ", without the copies of layers in host memory"
        copies = copies if 0 < (bench.kv_host_layers or 0) < row.own["layers"] else ""
        row = row.plus(f"dense is {bench.dense_layers} measured layer(s) times {row.own['layers']}, once{copies}")
    row = row.plus(repeat_in_turn(turns, lambda way: runs.run(way, ids_1S), bench.repeats))
    timed_ms = {way: statistics.median(run.milliseconds for run in found) for way, found in dense.items()}
    peers = DensePeers(row.length, timed_ms, refused)
    fastest = dense[peers.fastest] if peers.fastest else []
    peaks = [run.peak for run in fastest if run.peak is not None]
    row = row.plus(peers=peers, dense_ms=peers.least_ms, dense_peak_bytes=max(peaks, default=None))
    row = row.plus(dense_runs_ms=[run.milliseconds for run in fastest])
    return _with_sparse(row, runs, sparse[SPARSE]) if sparse else row


def _try_dense(runs: PrefillRuns, ids_1S: torch.Tensor) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """One run of each way, and why others do not run."""
    few = runs.bench.dense_layers

    def whole(way: str) -> list[Run]:
        try:
            return [runs.warmed(way, ids_1S) if few is None else runs.multiplied(way, ids_1S, few)]
        finally:
            free_memory(runs.model.device)

    # A model of one layer has no second one, by which ways are compared.
    if ids_1S.shape[1] < runs.bench.ranked_from or runs.model.config.num_hidden_layers == 1:
        return try_each(runs.dense, whole)
    part_1S = ids_1S[:, : ids_1S.shape[1] // PARTS]
    on_part, failed = try_each(runs.dense, lambda way: runs.multiplied(way, part_1S, 1).milliseconds)
    tried, refused = fastest_that_runs(on_part, ids_1S.shape[1], whole)
    return tried, failed | refused


def _with_sparse(row: Row, runs: PrefillRuns, found: list[Run]) -> Row:
    last, milliseconds = found[-1], statistics.median(run.milliseconds for run in found)
    notes = []
    if last.backend not in (None, row.backend):
        notes.append(f"{row.backend} failed, and {last.backend} replaced it")
    if last.builder_failed:
        notes.append(f"torch built the indices, which is slower: Triton failed ({last.builder_failed})")
    row = row.plus(
        *notes, backend=last.backend or row.backend, sparse_ms=milliseconds, sparse_peak_bytes=(peak := last.peak)
    ).plus(sparse_runs_ms=[run.milliseconds for run in found])
    if peak and row.own["dense_peak_bytes"]:
        row = row.plus(peak_ratio=peak / row.own["dense_peak_bytes"])
    if last.stats is None:
        return row
    # Without a plan, tiles are what the runtime counts in.
    tile = runs.plan.prefill.tile if runs.plan.prefill else TileShape()
    attention = 4.0 * runs.plan.model.largest_head * tile.query * tile.key * last.stats.prefill_tiles_computed
    return row.plus(
        density=last.stats.prefill_density,
        tflops=(layer_flops(runs.model, row.length) + attention) / milliseconds / 1e9,
        kv_bytes_device=last.stats.kv_bytes_device,
        kv_bytes_host=last.stats.kv_bytes_host,
    )


def layer_flops(model: PreTrainedModel, tokens: int) -> float:
    """Operations of the matrix products of the decoder layers, attention aside."""
    decoder: Any = decoder_of(model)
    weights: Iterator[torch.Tensor] = decoder.layers.parameters()
    return 2.0 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)
