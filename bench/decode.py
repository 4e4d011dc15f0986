"""`sparsekv bench decode`: decode steps by a plan and dense, attention alone and whole tokens.

Attention alone is one step of all layers, on CUDA a graph, against every dense kernel in turn. A whole token is the
mean of those that `generate` adds, greedily and without an end token, once the first steps have captured what is
replayed; the unmodified model, and this runtime dense and by each plan, in turn. Nothing is prefilled: caches are
filled with random keys and values.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria

from sparsekv.bench.dense_kernels import time_calls
from sparsekv.bench.harness import (
    Columns,
    DensePeers,
    Row,
    case_of,
    free_memory,
    in_short,
    measure,
    number,
    once,
    repeat_in_turn,
    replayed,
    try_each,
    wait_for,
)
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.step_attention import Fillable, StepAttention, fill
from sparsekv.kernels.backends import choose_backend
from sparsekv.kernels.softmax import Softmax
from sparsekv.planner.options import check_lengths
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import DecodePlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.attention import Phase
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.describe import attention_modules
from sparsekv.runtime.hf.drafts import DraftLength, Verdict
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.plan_checks import check_plan
from sparsekv.runtime.stores.store import Layout

RANDOM_NOTE = (
    "Keys and values are random, of normal distribution, and so are queries where attention is timed alone: which "
    "tokens are chosen means nothing, how many are is what the plan says."
)
UNMODIFIED, OURS = "transformers", "sparsekv dense"  # ways to run dense
ATTENTION, TOKEN, EXACT = "attention", "token", "exact"  # rows
WARM_UP_TOKENS = 3  # steps like all others, of which the first is captured
WARM_UP_EXACT = 96  # until drafts are as long as they stay
NEW_TOKENS, NEW_EXACT = 64, 256  # the mean of which is timed; rows that accept for themselves end apart
CHECKED = 7  # tokens of the check that is timed alone
_TIMES = (
    "acceptance",
    "check_ms",
    "unmodified_ms",
    "replay_ms",
    "dense_replay_ms",
    "gbytes_per_second",
    "dense_gbytes_per_second",
)

COLUMNS: Columns = {
    "of one": ("name", str),
    "selector": ("selector", str),
    "window": ("window", number("d")),
    "backend": ("backend", str),
    "length": ("length", format_length),
    "batch": ("batch", number("d")),
    "tokens read": ("density", number(".4f")),
    "dense ms": ("dense_ms", number(".3f")),
    "sparse ms": ("sparse_ms", number(".3f")),
    "speedup": ("speedup", number(".2f")),
    "GB/s": ("gbytes_per_second", number(".4g")),
    "dense GB/s": ("dense_gbytes_per_second", number(".4g")),
    "unmodified ms": ("unmodified_ms", number(".3f")),
    "replay ms": ("replay_ms", number(".3f")),
    "dense replay ms": ("dense_replay_ms", number(".3f")),
    "accepted": ("acceptance", number(".3f")),
    f"check of {CHECKED} ms": ("check_ms", number(".3f")),
}


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """What to time: every length with every batch.

    Attributes:
        lengths: tokens of a row once the last token is there.
        repeats: of each, in turn.
        new_tokens: that a whole token is the mean of.
        backend: of kernels, or "auto".
        exact: also time tokens that plans draft and dense attention checks; the unmodified model is left out.
        acceptance: the share of drafts that are taken to count, whatever the check says; None asks it.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    new_tokens: int = NEW_TOKENS
    backend: str = "auto"
    seed: int = 0
    allow_mismatch: bool = False
    exact: bool = False
    acceptance: float | None = None

    @property
    def warm_up(self) -> int:
        """Tokens that are generated before time is taken."""
        return WARM_UP_EXACT if self.exact else WARM_UP_TOKENS

    @property
    def fewest_tokens(self) -> int:
        """That a row has at the end: one, and all that are generated behind it."""
        return 1 + self.warm_up + self.new_tokens


def check_decode(info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench) -> None:
    """Refuses what cannot be timed on a model, from its description alone.

    Raises:
        UsageError: no lengths, batches or repeats; a length without room for the tokens that are timed, or beyond the
            model's context; a plan without decode.
        PlanMismatchError, UnsupportedError: a plan is not for this model.
    """
    if not (bench.lengths and bench.batches) or min(*bench.batches, bench.repeats, bench.new_tokens) < 1:
        raise UsageError("expected at least one length, one row and one repeat, found none")
    if min(bench.lengths) < bench.fewest_tokens:
        raise UsageError(
            f"expected lengths of {bench.fewest_tokens} tokens or more, most of which are generated to time them, "
            f"found {min(bench.lengths)}"
        )
    check_lengths(bench.lengths, info.context_length)
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
        check_ms: of the captured check of `CHECKED` tokens alone.
        stats: of the generated tokens, where this runtime ran.
        why_not: why steps were not captured, on CUDA.
    """

    milliseconds: float
    replay_ms: float | None = None
    check_ms: float | None = None
    stats: RunStats | None = None
    why_not: str = ""


class _Clock(StoppingCriteria):
    """Stops nothing: begins to measure when the captured step is warm, at the first row with so many tokens."""

    def __init__(self, device: torch.device, begin: Callable[[], None], tokens: int) -> None:
        self._device = device
        self._begin = begin
        self._tokens = tokens
        self.began = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any) -> torch.BoolTensor:
        """Is called with every new token."""
        if not self.began and input_ids.shape[1] >= self._tokens:
            self._begin()
            self.began = self.latest()
        goes_on: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return goes_on  # type: ignore[no-any-return]

    def latest(self) -> float:
        """Seconds, once the device is done."""
        wait_for(self._device)
        return time.perf_counter()


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
        """The dense ones, and the name of every plan."""
        exact = [exactly(name) for name in self.plans] if self.bench.exact else []
        return (*(() if exact else (UNMODIFIED,)), OURS, *self.plans, *exact)

    def run(self, way: str, length: int, batch: int) -> Run:
        """Generates until the rows have `length` tokens.

        Raises:
            Whatever the model raises: out of memory, a kernel that does not run here.
        """
        free_memory(self.model.device)
        with self.applied(way, length) as handle, greedy(self.model):
            cache = self.filled(handle, length, batch)  # grows with all that follows
            if handle is None:
                return Run(self.token_ms(cache, batch, lambda: None))
            if handle.loop is not None:
                handle.loop.paces = defaultdict(Measured)
            if handle.loop is not None and self.bench.acceptance is not None:
                judge = Forced(self.bench.acceptance, self.bench.seed)
                handle.loop.judge_of = lambda config: judge
            milliseconds = self.token_ms(cache, batch, handle.reset_stats)
            return self.result(handle, cache, milliseconds)

    def token_ms(self, cache: Cache, batch: int, begin: Callable[[], None]) -> float:
        """Milliseconds of one more token; `begin` is called before those that are timed."""
        generator = torch.Generator().manual_seed(self.bench.seed)
        size, device = (batch, cache.get_seq_length() + 1), self.model.device
        ids_BS = torch.randint(1, self.model.config.vocab_size, size, generator=generator).to(device)
        warm_up = self.bench.warm_up
        clock, new = _Clock(device, begin, ids_BS.shape[1] + warm_up), warm_up + self.bench.new_tokens
        generate: Any = self.model.generate
        options = {"attention_mask": torch.ones_like(ids_BS), "max_new_tokens": new, "stopping_criteria": [clock]}
        generate(ids_BS, past_key_values=cache, **options)
        return (clock.latest() - clock.began) / self.bench.new_tokens * 1e3

    def result(self, handle: Handle, cache: Cache, milliseconds: float) -> Run:
        """What there is to say of the tokens that were generated."""
        check = handle.steps.captured(Phase.CHECK, CHECKED) if handle.steps else None
        check_ms = once(check.run, self.model.device) if check else None
        return Run(milliseconds, self.replay_ms(handle), check_ms, handle.stats(), self.why_not(handle))

    def replay_ms(self, handle: Handle) -> float | None:
        """Of the captured step alone."""
        latest = handle.steps.latest if handle.steps else None
        return once(latest.run, self.model.device) if latest else None

    def why_not(self, handle: Handle) -> str:
        """Why steps were not captured, on CUDA."""
        if handle.steps is None:
            return "no captured steps on this device and backend" if self.model.device.type == "cuda" else ""
        return handle.steps.why_not

    def filled(self, handle: Handle | None, length: int, batch: int) -> Cache:
        """A cache with so many tokens that `length` are reached at the end; it leaves no room for what a prompt would
        make on its way, as none runs."""
        tokens = length - self.bench.fewest_tokens + 1
        layouts = [replace(layout, batch=batch) for layout in layouts_of(self.model)]
        if handle is None:
            cache: Cache = DynamicCache(config=self.model.config)
            layers: Iterable[Fillable] = (_Appended(cache, layer) for layer in range(len(layouts)))
        else:
            room = length + DRAFTS[-1] if handle.loop else length
            cache = handle.new_cache(room, batch, answer=room - 1)
            layers = (layer for layer in cache.layers if isinstance(layer, SparseLayer))
        fill(layers, tokens, layouts, self.bench.seed)
        return cache

    def applied(self, way: str, length: int) -> AbstractContextManager[Handle | None]:
        """The model ready to run in a way, up to this length."""
        if way == UNMODIFIED:
            return nullcontext()
        exact = {exactly(name): plan for name, plan in self.plans.items()}
        plan = self.plans.get(way) or exact.get(way) or next(iter(self.plans.values()))
        return apply(
            self.model,
            plan,
            prefill=False,
            decode=way != OURS,
            exact=way in exact,
            info=self.subject.info,
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
        )


def exactly(name: str) -> str:
    """The way to run in which a plan drafts."""
    return f"{EXACT}, {name}"


class Forced:
    """A judge that takes drafts to count with a given chance: of random weights, whose drafts mean nothing."""

    def __init__(self, chance: float, seed: int) -> None:
        self._chance = chance
        self._seed = seed
        self._generator: torch.Generator | None = None

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The likeliest."""
        return scores_BV.argmax(-1)

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """Each draft counts by chance, behind those that count."""
        likeliest_BQ = scores_BQV.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(drafts_BK.device).manual_seed(self._seed)
        drawn_BK = torch.rand(drafts_BK.shape, generator=self._generator, device=drafts_BK.device)
        accepted_B = (drawn_BK < self._chance).int().cumprod(1).sum(1)
        return Verdict(accepted_B, likeliest_BQ.gather(1, accepted_B[:, None])[:, 0])


class Measured(DraftLength):
    """Tries every length first, so that none is captured while time is taken."""

    def next(self, most: int) -> int:
        """See DraftLength."""
        untried = (size for size in DRAFTS if size <= most and size not in self._seconds)
        return next(untried, None) or super().next(most)


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
    subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench, progress: Progress | None = None
) -> Iterator[Row]:
    """Times every length with every batch, and gives two rows a plan as soon as they are known: one step of attention
    alone, and one token of the whole model.

    A case that fails or does not fit in memory is rows with a note. `density` is tokens attended to over tokens cached,
    over all layers. Of a row's own: how filter layers weigh the last queries; of attention, the keys and values that it
    has to read over its time; of a token, the unmodified model, and captured steps alone (without the head, sampling
    and the host).

    Args:
        plans: by name; `check_decode` has seen them.
        words: what the plans are, for the rows.

    Raises:
        BackendError: the backend cannot run here.
    """
    model = subject.model
    backend = choose_backend(model.device, model.dtype, subject.info.attention[0].head_dim, bench.backend).name
    runs, cases = DecodeRuns(subject, plans, bench), list(product(bench.lengths, bench.batches))
    own = {"model": subject.name, "weights": subject.weights, "plan": words, "layers": subject.info.layers}
    with (progress or Progress()).stage("decode", total=2 * len(cases)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what plans warn of was said before; what is not captured stands in the rows
        for length, batch in cases:
            row = Row(
                name=ATTENTION,
                length=length,
                backend=backend,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                own={"batch": batch, "selector": "", "window": 1} | dict.fromkeys(_TIMES) | own,
                note=subject.note,
            )
            what = f"{format_length(length)} tokens, batch {batch}"
            step.advance(0, note=f"{what}: attention")
            yield from _attention_rows(row, runs)
            free_memory(model.device)
            step.advance(note=f"{what}: whole tokens")
            yield from _token_rows(row.plus(name=TOKEN), runs)
            free_memory(model.device)
            step.advance()


def _named(row: Row, runs: DecodeRuns) -> dict[str, tuple[Row, DecodePlan]]:
    """The row of each plan, and its decode phase."""
    found = {}
    for name, plan in runs.plans.items():
        assert plan.decode is not None, "check_decode has seen it"
        selector, window = selector_of(plan.decode)
        elsewhere = plan.decode.offload and row.name == ATTENTION
        note = "attention alone has all keys on the device, tokens read offloaded layers from the host"
        found[name] = row.plus(note if elsewhere else "", selector=selector, window=window), plan.decode
    return found


def _attention_rows(row: Row, runs: DecodeRuns) -> list[Row]:
    bench, subject, device, named = runs.bench, runs.subject, runs.model.device, _named(row, runs)
    layouts = tuple(replace(layout, batch=row.own["batch"]) for layout in layouts_of(subject.model))
    try:
        softmax = softmax_of(subject.model)
        attention = StepAttention(subject.info, layouts, row.length, row.backend, bench.seed, softmax)
        calls = {name: replayed(call, device) for name, call in attention.dense().items()}
        peers = time_calls(calls, row.length, device, bench.repeats)
        turns = {"dense": calls[peers.fastest]} if peers.fastest else {}
        calls.clear()  # and the memory of graphs
        sparse = {name: replayed(attention.by_plan(plan), device) for name, (_, plan) in named.items()}
        ran, failed = try_each(sparse, lambda name: sparse[name]())
        times = measure(turns | {name: sparse[name] for name in ran}, device, bench.repeats)
    except Exception as error:  # out of memory
        return [row.plus(f"{case_of(row)}: {in_short(error)}") for row, _ in named.values()]
    group, item = subject.info.attention[0], layouts[0].dtype.itemsize
    token_bytes, token_flops = 2 * group.kv_heads * group.head_dim * item, 4 * group.heads * group.head_dim
    rows, dense_ms = [], times.get("dense")
    for name, (named_row, plan) in named.items():
        row = named_row.plus(dense_ms=dense_ms, peers=peers)
        if name in failed:
            rows.append(row.plus(f"{case_of(row)}, by the plan: {failed[name]}"))
            continue
        counts, ms = attention.counted(plan), times[name]
        rows.append(
            row.plus(
                sparse_ms=ms,
                density=counts.decode_share,
                tflops=counts.decode_tokens_attended * token_flops / ms / 1e9,
                gbytes_per_second=counts.decode_tokens_attended * token_bytes / ms / 1e6,
                dense_gbytes_per_second=counts.decode_tokens_cached * token_bytes / dense_ms / 1e6
                if dense_ms
                else None,
            )
        )
    return rows


def softmax_of(model: PreTrainedModel) -> Softmax:
    """The soft cap and the sinks of a model, of its first layer."""
    sinks_H = getattr(attention_modules(model)[0], "sinks", None)
    return Softmax(getattr(model.config, "attn_logit_softcapping", None) or 0.0, sinks_H)


def _token_rows(row: Row, runs: DecodeRuns) -> list[Row]:
    def run(way: str) -> Run:
        return runs.run(way, row.length, row.own["batch"])

    first, failed = try_each(runs.ways, run)
    found = {way: [one] for way, one in first.items()}
    ended = repeat_in_turn(found, run, runs.bench.repeats)
    dense = {way: median_ms(found[way]) for way in (UNMODIFIED, OURS) if way in found}
    peers = DensePeers(row.length, dense, {way: failed[way] for way in (UNMODIFIED, OURS) if way in failed})
    row = row.plus(
        *(f"dense steps are not captured: {one.why_not}" for one in found.get(OURS, [])[-1:] if one.why_not),
        dense_ms=peers.least_ms,
        unmodified_ms=dense.get(UNMODIFIED),
        dense_replay_ms=median_replay_ms(found.get(OURS, [])),
        peers=peers,
    )
    rows = []
    for name, (named, _) in _named(row, runs).items():
        if name not in found:
            rows.append(named.plus(f"{case_of(row)}, by the plan: {failed[name]}", ended))
            continue
        last = found[name][-1]
        why_not = last.why_not and f"steps by the plan are not captured: {last.why_not}"
        share = last.stats and last.stats.decode_share
        times = {"sparse_ms": median_ms(found[name]), "replay_ms": median_replay_ms(found[name])}
        rows.append(named.plus(why_not, ended, density=share, **times))
        if runs.bench.exact:
            rows.append(_exact_row(named, found, failed, exactly(name), ended))
    return rows


def _exact_row(row: Row, found: Mapping[str, Sequence[Run]], failed: Mapping[str, str], way: str, ended: str) -> Row:
    if way not in found:
        return row.plus(f"{case_of(row)}, {way}: {failed[way]}", name=EXACT)
    last = found[way][-1]
    assert last.stats is not None
    return row.plus(
        last.why_not and f"steps of {way} are not captured: {last.why_not}",
        ended,
        name=EXACT,
        sparse_ms=median_ms(found[way]),
        density=last.stats.decode_share,
        acceptance=last.stats.acceptance,
        check_ms=last.check_ms,
    )


def median_ms(runs: Iterable[Run]) -> float:
    """Of a token."""
    return statistics.median(run.milliseconds for run in runs)


def median_replay_ms(runs: Iterable[Run]) -> float | None:
    """Of the captured step, where every run has one."""
    times = [run.replay_ms for run in runs if run.replay_ms is not None]
    return statistics.median(times) if times else None
