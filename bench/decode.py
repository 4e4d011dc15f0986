"""`sparsekv bench decode`: decode steps by a plan and dense, attention alone and whole tokens.

Attention alone is one step of all layers, on CUDA a graph, against every dense kernel in turn. A whole token is what
`generate` takes for one more: 65 tokens less 1, over 64, greedily and without an end token; the unmodified model, and
this runtime dense and by each plan, in turn. Nothing is prefilled: caches are filled with random keys and values. Other
programs are no rows here: `benchmarks/` is the place for named projects.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from sparsekv.bench.harness import (
    BenchRow,
    DensePeers,
    free_memory,
    in_short,
    measure,
    once,
    repeat_in_turn,
    replayed,
    time_calls,
    try_each,
    wait_for,
)
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.step_attention import Fillable, StepAttention, fill
from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import DecodePlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.plan_checks import check_plan
from sparsekv.runtime.stores.store import Layout

RANDOM_NOTE = (
    "Keys and values are random, of normal distribution, and so are queries where attention is timed alone: which "
    "tokens are chosen means nothing, how many are is what the plan says."
)
UNMODIFIED, OURS = "transformers", "sparsekv dense"  # ways to run dense
ATTENTION, TOKEN = "attention", "token"  # rows
WARM_UP_TOKENS = 3  # steps like all others, of which the first is captured


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """What to time: every length with every batch.

    Attributes:
        lengths: tokens of a row once the last token is there.
        repeats: of each, in turn.
        new_tokens: that a whole token is the mean of.
        backend: of kernels, or "auto".
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    new_tokens: int = 64
    backend: str = "auto"
    seed: int = 0
    allow_mismatch: bool = False

    @property
    def fewest_tokens(self) -> int:
        """That a row has at the end: one, and all that are generated behind it."""
        return 1 + WARM_UP_TOKENS + 1 + 1 + self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(BenchRow):
    """One step of attention alone, or one token of the whole model, in milliseconds.

    Attributes:
        name: "attention" or "token".
        density: tokens attended to over tokens cached, over all layers.
        selector, window: how the plan's filter layers weigh the last queries.
        plan: what it is, in words.
        unmodified_ms: of a token, the model without this runtime.
        replay_ms, dense_replay_ms: of a token, the captured step alone: without the head, sampling and the host.
        gbytes_per_second, dense_gbytes_per_second: keys and values that attention has to read, over its time.
    """

    model: str
    weights: str
    plan: str
    layers: int
    batch: int
    selector: str = ""
    window: int = 1
    unmodified_ms: float | None = None
    replay_ms: float | None = None
    dense_replay_ms: float | None = None
    gbytes_per_second: float | None = None
    dense_gbytes_per_second: float | None = None

    @property
    def dense_case(self) -> str:
        """What the dense peers were timed on."""
        return f"{format_length(self.length)}, batch {self.batch}, {self.name}"

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        times = ("unmodified_ms", "replay_ms", "dense_replay_ms", "gbytes_per_second", "dense_gbytes_per_second")
        return self.with_keys("batch", "selector", "window", *times, "model", "weights", "plan", "layers")


def check_decode(info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench) -> None:
    """Refuses what cannot be timed on a model, from its description alone.

    Raises:
        UsageError: no lengths, batches or repeats; a length without room for the tokens that are timed; a plan without
            decode.
        PromptError: a length beyond the model's context.
        PlanMismatchError, UnsupportedError: a plan is not for this model.
    """
    if not (bench.lengths and bench.batches) or min(*bench.batches, bench.repeats, bench.new_tokens) < 1:
        raise UsageError("expected at least one length, one row and one repeat, found none")
    if min(bench.lengths) < bench.fewest_tokens:
        raise UsageError(
            f"expected lengths of {bench.fewest_tokens} tokens or more, most of which are generated to time them, "
            f"found {min(bench.lengths)}"
        )
    if max(bench.lengths) > info.context_length:
        raise PromptError(
            f"expected lengths within the model's context of {info.context_length} tokens, found {max(bench.lengths)}"
        )
    for plan in plans.values():
        if plan.decode is None:
            raise UsageError("expected a plan with a decode phase, found one without; make one by hand: --budget 2k")
        check_plan(plan, info, bench.allow_mismatch)
        Program.of(None, plan.decode, info)


def selector_of(plan: DecodePlan) -> tuple[str, int]:
    """The selectors of a plan's filter layers, and the most queries that one looks at."""
    segments = [segment for bucket in plan.lengths for segment in bucket.segments]
    names = dict.fromkeys(segment.selector for segment in segments)
    return "+".join(names) or "none", max((s.window for s in segments if s.selector != "last"), default=1)


# --- whole tokens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens generated once.

    Attributes:
        milliseconds: of one token.
        replay_ms: of the captured step alone.
        density: tokens attended to over tokens cached, where this runtime ran.
        why_not: why steps were not captured, on CUDA.
    """

    milliseconds: float
    replay_ms: float | None = None
    density: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class DecodeRuns:
    """Tokens of one model: unmodified, by this runtime dense, and by plans."""

    subject: BenchModel
    plans: Mapping[str, Plan]
    bench: DecodeBench

    @property
    def model(self) -> PreTrainedModel:
        """The subject's."""
        return self.subject.model

    @property
    def ways(self) -> tuple[str, ...]:
        """The two dense ones, and the name of every plan."""
        return (UNMODIFIED, OURS, *self.plans)

    def run(self, way: str, length: int, batch: int) -> Run:
        """Generates until the rows have `length` tokens.

        Raises:
            Whatever the model raises: out of memory, a kernel that does not run here.
        """
        free_memory(self.model.device)
        with self._prepared(way) as prepared, greedy(self.model):
            handle = prepared if isinstance(prepared, Handle) else None
            cache = self.filled(handle, length, batch)  # grows with all that follows
            if handle is None:
                return Run(self.token_ms(cache, batch))
            milliseconds = self.token_ms(cache, batch, handle.reset_stats)
            return Run(milliseconds, self.replay_ms(handle), handle.stats().decode_share, self.why_not(handle))

    def token_ms(self, cache: Cache, batch: int, begin: Callable[[], None] = lambda: None) -> float:
        """Milliseconds of one more token; `begin` is called before those that are timed."""
        self.seconds(cache, batch, WARM_UP_TOKENS)
        first = self.seconds(cache, batch, 1)
        begin()
        return self._each(first, self.seconds(cache, batch, 1 + self.bench.new_tokens))

    def seconds(self, cache: Cache, batch: int, tokens: int) -> float:
        """Of `generate`, for so many new tokens behind the cached ones and one more."""
        wait_for(self.model.device)
        start = time.perf_counter()
        self.generate(cache, batch, tokens)
        wait_for(self.model.device)
        return time.perf_counter() - start

    def generate(self, cache: Cache, batch: int, tokens: int, **options: Any) -> None:
        """So many new tokens behind the cached ones and one more, with more options of `generate`."""
        generator = torch.Generator().manual_seed(self.bench.seed)
        size, device = (batch, cache.get_seq_length() + 1), self.model.device
        ids_BS = torch.randint(1, self.model.config.vocab_size, size, generator=generator).to(device)
        mask_BS = torch.ones_like(ids_BS)
        generate: Any = self.model.generate
        generate(ids_BS, attention_mask=mask_BS, past_key_values=cache, max_new_tokens=tokens, **options)

    def _each(self, first: float, all_of_them: float) -> float:
        """Milliseconds of a token from the seconds of one, and of all."""
        if all_of_them <= first:
            raise RuntimeError(f"{self.bench.new_tokens} tokens more took no longer than one; measure again")
        return (all_of_them - first) / self.bench.new_tokens * 1e3

    def replay_ms(self, handle: Handle) -> float | None:
        """Of the captured step alone."""
        latest = handle.steps.latest if handle.steps else None
        return once(latest.run, self.model.device) if latest else None

    def why_not(self, handle: Handle) -> str:
        """Why steps were not captured, on CUDA."""
        if handle.steps is None:
            return "no captured steps on this device and backend" if self.model.device.type == "cuda" else ""
        return handle.steps.why_not

    def filled(self, handle: Handle | None, length: int, batch: int, answer: int | None = None) -> Cache:
        """A cache with so many tokens that `length` are reached at the end.

        Args:
            answer: how many of them decode adds, where room is to be left for what a prompt of the others would make
                on its way; None leaves none, as no prompt runs.
        """
        tokens = length - self.bench.fewest_tokens + 1
        layouts = [replace(layout, batch=batch) for layout in layouts_of(self.model)]
        if handle is None:
            cache: Cache = DynamicCache(config=self.model.config)
            layers: Iterable[Fillable] = (_Appended(cache, layer) for layer in range(len(layouts)))
        else:
            cache = handle.new_cache(length, batch, answer=length - 1 if answer is None else answer)
            layers = (layer for layer in cache.layers if isinstance(layer, SparseLayer))
        fill(layers, tokens, layouts, self.bench.seed)
        return cache

    def _prepared(self, way: str) -> AbstractContextManager[object]:
        if way == UNMODIFIED:
            return nullcontext()
        plan = self.plans.get(way) or next(iter(self.plans.values()))
        return apply(
            self.model,
            plan,
            prefill=False,
            decode=way != OURS,
            info=self.subject.info,
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
        )


class _Appended:
    """A layer of transformers' own cache, to be filled."""

    def __init__(self, cache: Cache, layer: int) -> None:
        self._cache = cache
        self._layer = layer

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return layout.empty(tokens), layout.empty(tokens)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self._cache.update(k_BGSD, v_BGSD, self._layer)


@contextmanager
def greedy(model: PreTrainedModel) -> Iterator[None]:
    """Without what the checkpoint's own settings would have `generate` do, an end token among it."""
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = own


# --- rows -------------------------------------------------------------------------------------------------------------


def bench_decode(
    subject: BenchModel,
    plans: Mapping[str, Plan],
    words: str,
    bench: DecodeBench,
    progress: Progress | None = None,
    runs: type[DecodeRuns] = DecodeRuns,
) -> Iterator[DecodeRow]:
    """Times every length with every batch, and gives two rows a plan as soon as they are known.

    A case that fails or does not fit in memory is rows with a note.

    Args:
        plans: by name; `check_decode` has seen them.
        words: what the plans are, for the rows.

    Raises:
        BackendError: the backend cannot run here.
    """
    model = subject.model
    backend = choose_backend(model.device, model.dtype, subject.info.attention[0].head_dim, bench.backend).name
    ways, cases = runs(subject, plans, bench), list(product(bench.lengths, bench.batches))
    with (progress or Progress()).stage("decode", total=2 * len(cases)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what plans warn of was said before; what is not captured stands in the rows
        for length, batch in cases:
            blank = DecodeRow(
                name=ATTENTION,
                length=length,
                batch=batch,
                backend=backend,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                model=subject.name,
                weights=subject.weights,
                plan=words,
                layers=subject.info.layers,
                note=subject.note,
            )
            what = f"{format_length(length)} tokens, batch {batch}"
            step.advance(0, note=f"{what}: attention")
            yield from _attention_rows(blank, ways)
            free_memory(model.device)
            step.advance(note=f"{what}: whole tokens")
            yield from _token_rows(replace(blank, name=TOKEN), ways)
            free_memory(model.device)
            step.advance()


def _named(blank: DecodeRow, ways: DecodeRuns) -> dict[str, tuple[DecodeRow, DecodePlan]]:
    """The row of each plan, and its decode phase."""
    found = {}
    for name, plan in ways.plans.items():
        assert plan.decode is not None, "check_decode has seen it"
        selector, window = selector_of(plan.decode)
        row = replace(blank, selector=selector, window=window)
        if plan.decode.offload and row.name == ATTENTION:
            row = _noted(row, "attention alone has all keys on the device, tokens read offloaded layers from the host")
        found[name] = row, plan.decode
    return found


def _noted(row: DecodeRow, *notes: str) -> DecodeRow:
    return replace(row, note="; ".join(filter(None, (row.note, *notes))))


def _attention_rows(blank: DecodeRow, ways: DecodeRuns) -> list[DecodeRow]:
    bench, subject, device, named = ways.bench, ways.subject, ways.model.device, _named(blank, ways)
    layouts = tuple(replace(layout, batch=blank.batch) for layout in layouts_of(subject.model))
    try:
        attention = StepAttention(subject.info, layouts, blank.length, blank.backend, bench.seed)
        calls = {name: replayed(call, device) for name, call in attention.dense().items()}
        peers = time_calls(calls, blank.length, device, bench.repeats)
        turns = {"dense": calls[peers.fastest]} if peers.fastest else {}
        calls.clear()  # and the memory of graphs
        sparse = {name: replayed(attention.by_plan(plan), device) for name, (_, plan) in named.items()}
        ran, failed = try_each(sparse, lambda name: sparse[name]())
        times = measure(turns | {name: sparse[name] for name in ran}, device, bench.repeats)
    except Exception as error:  # out of memory
        return [_noted(row, f"{row.dense_case}: {in_short(error)}") for row, _ in named.values()]
    group, item = subject.info.attention[0], layouts[0].dtype.itemsize
    token_bytes, token_flops = 2 * group.kv_heads * group.head_dim * item, 4 * group.heads * group.head_dim
    rows = []
    for name, (row, plan) in named.items():
        row = replace(row, dense_ms=times.get("dense"), dense_peers=peers)
        if name in failed:
            rows.append(_noted(row, f"{row.dense_case}, by the plan: {failed[name]}"))
            continue
        counts, ms = attention.counted(plan), times[name]
        cached = counts.decode_tokens_cached * token_bytes
        rows.append(
            replace(
                row,
                sparse_ms=ms,
                density=counts.decode_share,
                tflops=counts.decode_tokens_attended * token_flops / ms / 1e9,
                gbytes_per_second=counts.decode_tokens_attended * token_bytes / ms / 1e6,
                dense_gbytes_per_second=cached / row.dense_ms / 1e6 if row.dense_ms else None,
            )
        )
    return rows


def _token_rows(blank: DecodeRow, ways: DecodeRuns) -> list[DecodeRow]:
    def run(way: str) -> Run:
        return ways.run(way, blank.length, blank.batch)

    first, failed = try_each(ways.ways, run)
    found = {way: [one] for way, one in first.items()}
    ended = repeat_in_turn(found, run, ways.bench.repeats)
    medians = {way: statistics.median(one.milliseconds for one in several) for way, several in found.items()}
    dense = {way: medians[way] for way in (UNMODIFIED, OURS) if way in medians}
    peers = DensePeers(blank.length, dense, {way: failed[way] for way in (UNMODIFIED, OURS) if way in failed})
    blank = replace(
        blank,
        dense_ms=dense.get(peers.fastest or ""),
        unmodified_ms=dense.get(UNMODIFIED),
        dense_replay_ms=_replay_ms(found.get(OURS, [])),
        dense_peers=peers,
    )
    why_not = found[OURS][-1].why_not if OURS in found else ""
    blank = _noted(blank, why_not and f"dense steps are not captured: {why_not}")
    rows = []
    for name, (row, _) in _named(blank, ways).items():
        if name not in found:
            rows.append(_noted(row, f"{row.dense_case}, by the plan: {failed[name]}", ended))
            continue
        last = found[name][-1]
        row = replace(row, sparse_ms=medians[name], density=last.density, replay_ms=_replay_ms(found[name]))
        rows.append(_noted(row, last.why_not and f"steps by the plan are not captured: {last.why_not}", ended))
    return rows


def _replay_ms(runs: list[Run]) -> float | None:
    times = [run.replay_ms for run in runs if run.replay_ms is not None]
    return statistics.median(times) if times else None
