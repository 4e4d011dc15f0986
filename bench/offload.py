"""`sparsekv bench decode --offload`: whole tokens by a plan, with all keys and values on the device and with layers in
host memory, in turn.

With random weights a choice finds next to nothing in the hot set; `miss_rate` puts a list with a stated share of new
tokens in its place, on the device as well: the choice is made and timed as always, and what is attended to is then a
list of a kernel here, which changes by so many tokens a step.

Shapes: B batch, G KV heads, g lists of a row, M or N tokens of a list, C tokens on the host, R rows on the device, D
head size, P = 2 for key and value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any, cast, no_type_check
from unittest import mock

import torch
import triton
import triton.language as tl
from transformers import Cache

from sparsekv.bench.harness import Columns, Row, is_out_of_memory, number, once, repeat_in_turn, replayed, try_each
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.token_runs import DecodeBench, DecodeRuns, Run, median_ms, median_replay_ms
from sparsekv.kernels.decode.gather import gather_missed
from sparsekv.kernels.decode.place import PlacedStep
from sparsekv.kernels.decode.selection import ALL, choose
from sparsekv.kernels.keys import COLUMNS as TABLE_COLUMNS
from sparsekv.kernels.keys import HEAD, HOST, HOST_TOKENS, ROWS
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core import select
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.placement import OffloadMode, warn_of_host_layers
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.stores.bank import in_host_memory
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import allocated_slots

_STEP = 0x5E3779B1  # odd, so that multiples of it pass through all numbers below a power of two


def span_of(segment: SegmentProgram, tokens: int) -> int:
    """Tokens among which a list of this segment is drawn: the largest power of two of those that may be chosen."""
    return _span(segment.sink, segment.recent, tokens)


def _span(sink: int, recent: int, tokens: int) -> int:
    return 1 << (max(2, tokens - sink - recent).bit_length() - 1)


@contextmanager
def swapped_choices(share: float, tokens: int, filters: int) -> Iterator[None]:
    """Within it another list is in place of every choice, with `share` of new tokens in each step; the others are those
    of the step before, and a token comes back after all others.

    Args:
        share: of the chosen tokens, above 0 and up to 1.
        tokens: cached when the first step begins; new ones are drawn from `span_of` them.
        filters: layers that choose in a step, one after the other.
    """
    millis, layers = max(1, round(1000 * share)), cycle(range(filters))
    lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by filter layer: lists, and tokens so far

    def swapped(
        scores_gT: torch.Tensor, scoring: Any, lengths_B: torch.Tensor, counts_B: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        chosen_BgN = choose(scores_gT, scoring, lengths_B, counts_B, **how)
        layer = next(layers)
        if layer not in lists:
            with torch.inference_mode(False):
                cursor_Bg = chosen_BgN.new_zeros(chosen_BgN.shape[:2], dtype=torch.int64)
                lists[layer] = torch.full_like(chosen_BgN, -1), cursor_Bg
        swap(*lists[layer], counts_B, how["sink"], _span(how["sink"], how["recent"], tokens), millis)
        return lists[layer][0]

    with mock.patch.object(select, "choose", swapped):
        yield


def swap(
    list_BgN: torch.Tensor, cursor_Bg: torch.Tensor, counts_B: torch.Tensor, sink: int, span: int, millis: int
) -> None:
    """Makes room in lists for so many thousandths of new tokens, and writes these."""
    batch, lists, most = list_BgN.shape
    with torch.cuda.device_of(list_BgN):
        swap_kernel[(lists, batch)](
            list_BgN, cursor_Bg, counts_B, sink, span, most, millis,
            STEP=_STEP, BLOCK_N=triton.next_power_of_2(most), num_warps=8,
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["sink", "span", "most", "millis"])
def swap_kernel(list_ptr, cursor_ptr, counts_ptr, sink, span, most, millis, STEP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (lists, batch). The oldest tokens of a list make room for the next of a sequence without repetition."""
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    lanes_N = tl.arange(0, BLOCK_N)
    count = tl.maximum(tl.load(counts_ptr + tl.program_id(1)), 0)
    cursor = tl.load(cursor_ptr + row)
    new = (count * millis + 999) // 1000
    new = tl.where(cursor == 0, count, new)
    age_N = (lanes_N - cursor % tl.maximum(count, 1) + count) % tl.maximum(count, 1)
    token_N = sink + (((cursor + age_N) * STEP) & (span - 1))
    at_N = list_ptr + row.to(tl.int64) * most + lanes_N
    tl.store(at_N, token_N.to(tl.int32), mask=(lanes_N < count) & (age_N < new))
    tl.store(at_N, tl.full([BLOCK_N], -1, tl.int32), mask=(lanes_N >= count) & (lanes_N < most))
    tl.store(cursor_ptr + row, cursor + new)


ON_DEVICE: OffloadMode = "never"
_MANY, _FEW = 2048, 200  # tokens
_LISTS = 8  # fetched one after the other, so that nothing is found in a cache of the GPU's
_OWN = (
    *("miss_rate", "device_ms", "device_replay_ms", "offloaded_ms", "offloaded_replay_ms", "slowdown"),
    *("replay_slowdown", "misses", "miss_share", "fetched_bytes", "link_gbytes_per_second", "link_200_tokens_us"),
)

COLUMNS: Columns = {
    "selector": ("selector", str),
    "length": ("length", format_length),
    "batch": ("batch", number("d")),
    "host layers": ("host_layers", number("d")),
    "device ms": ("device_ms", number(".3f")),
    "offloaded ms": ("offloaded_ms", number(".3f")),
    "ratio": ("slowdown", number(".3f")),
    "device replay": ("device_replay_ms", number(".3f")),
    "offloaded replay": ("offloaded_replay_ms", number(".3f")),
    "ratio of replays": ("replay_slowdown", number(".3f")),
    "misses": ("misses", number(".1f")),
    "share": ("miss_share", number(".3f")),
    "MB a step": ("fetched_bytes", number(".2f", 1e6)),
    "link GB/s": ("link_gbytes_per_second", number(".1f")),
    "200 tokens us": ("link_200_tokens_us", number(".1f")),
}


@dataclass(frozen=True, slots=True)
class OffloadRun(Run):
    """Tokens generated once; `replay_ms` is None where the step would find the tokens of its one choice in the hot set.

    Attributes:
        host_layers: that were in host memory.
        link: of the memory that was read; None where nothing was, or not by a GPU.
    """

    host_layers: int = 0
    link: LinkRate | None = None


@dataclass(frozen=True)
class OffloadRuns(DecodeRuns):
    """Tokens of one model by one plan; a way to run is a mode of `--offload`.

    Attributes:
        miss_rate: share of new tokens in each choice; None leaves the choices.
        memory: blocks of host memory, which all runs use in turn.
    """

    miss_rate: float | None = None
    memory: HostMemory = field(default_factory=HostMemory)

    @property
    def plan(self) -> Plan:
        """The one plan."""
        (plan,) = self.plans.values()
        return plan

    @contextmanager
    def applied(self, way: str, length: int) -> Iterator[Handle]:
        """The plan at work, with choices as the miss rate has them."""
        with ExitStack() as stack:
            handle = stack.enter_context(
                apply(
                    self.model,
                    self.plan,
                    prefill=False,
                    info=self.subject.info,
                    backend=self.bench.backend,
                    allow_mismatch=True,  # asked before anything was timed
                    offload=cast(OffloadMode, way),
                    memory=self.memory,
                )
            )
            if self.miss_rate is not None:
                if handle.steps is None:
                    raise UsageError("expected captured steps for miss_rate, found none on this device; leave it out")
                program = Program.of(None, self.plan.decode, self.subject.info)
                tokens = cached_tokens(self.bench, length)
                stack.enter_context(swapped_choices(self.miss_rate, tokens, len(program.segments)))
            yield handle

    def result(self, handle: Handle, cache: Cache, milliseconds: float) -> OffloadRun:
        """Returns what there is to say of the tokens that were generated, and of the memory that they were read
        from."""
        stats, why_not = handle.stats(), self.why_not(handle)
        layers = [layer.store for layer in cache.layers if isinstance(layer, SparseLayer)]
        memories = [store.step_memory().host_CBPGD for store in in_host_memory(layers)]
        stores = [host_CBPGD for host_CBPGD in memories if host_CBPGD is not None]
        device = self.model.device
        link = link_rate(stores[0], device) if stores and device.type == "cuda" else None
        # replays make one choice time and again, unless it is swapped: nothing would be fetched
        replay_ms = None if stores and self.miss_rate is None else self.replay_ms(handle)
        return OffloadRun(milliseconds, replay_ms, None, stats, why_not, len(stores), link)


def cached_tokens(bench: DecodeBench, length: int) -> int:
    """That a row has before the first step, at least."""
    return length - bench.fewest_tokens


def check_offload(
    info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench, miss_rate: float | None = None
) -> None:
    """Refuses plans that permit no layer to be offloaded, and with a miss rate what `check_miss_rate` refuses.

    Raises:
        UsageError: a plan that `check_decode` has seen permits none, or lengths are too short for the miss rate.
    """
    if any(one.decode and one.decode.offload is None for one in plans.values()):
        raise UsageError(
            "expected a plan that permits layers to be in host memory, found one that does not; compile it with "
            "`plan --set offload=true`, or make one by hand: --set budget=2k"
        )
    if miss_rate is not None:
        check_miss_rate(info, plans, bench)


def check_miss_rate(info: ModelInfo, plans: Mapping[str, Plan], bench: DecodeBench) -> None:
    """Refuses lengths that have too few tokens to state how many of a choice are new: new tokens are drawn in turn from
    a span of the context, and all that were chosen lately are in the hot set.

    Args:
        plans: `check_decode` has seen them, and their decode phases permit layers to be offloaded.

    Raises:
        UsageError: the span is not larger than the slots of a layer, or has not two choices.
    """
    for length, plan in product(bench.lengths, plans.values()):
        assert plan.decode is not None, "check_decode has seen it"
        assert plan.decode.offload is not None, "checked before"
        program = Program.of(None, plan.decode, info)
        for layer in map(program.layers.__getitem__, plan.decode.offload.layers):
            follower = layer.role.follows
            chosen = ALL if follower is None else follower.segment.count(length)
            if follower is None or chosen == ALL:
                continue
            span = span_of(follower.segment, cached_tokens(bench, length))
            needed = max(2 * chosen, 1 + allocated_slots(plan.decode.offload.hot, layer.role.hot_reads, length))
            if span < needed:
                raise UsageError(
                    f"expected {needed} tokens or more to draw new ones from for miss_rate, found {span} at "
                    f"{format_length(length)}: more than the hot set has slots, and twice the budget of layer "
                    f"{layer.layer}; use longer --lengths, or a smaller budget"
                )


def bench_offload(
    subject: BenchModel,
    plans: Mapping[str, Plan],
    words: str,
    bench: DecodeBench,
    mode: OffloadMode,
    miss_rate: float | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Times a token of the whole model at every length with every batch, and gives a row a plan as soon as it is known.

    A case that fails or does not fit in memory is a row with a note. An error of the device ends the bench with the
    row: all that comes after it would fail too. Of a row's own: a token and the captured step alone with all keys and
    values on the device (`device_ms`) and with those of `host_layers` in host memory (`offloaded_ms`, `sparse_ms` as
    well); `misses` (tokens that such a layer fetches in a step, of all batch rows, and of all KV heads where these
    choose for themselves), their share of the tokens that it needs beside the recent ones, the bytes of a step in all
    layers (None where some layers choose for each KV head and others do not), and what fetching alone takes.

    Args:
        plans: by name; `check_decode` has seen them, and their decode phases permit layers to be offloaded.
        words: what the plans are, for the rows.
        mode: which of these layers are.
        miss_rate: share of new tokens in each choice, which `check_miss_rate` has seen; None leaves the choices.
    """
    model, cases = subject.model, list(product(bench.lengths, bench.batches, plans.items()))
    warn_of_host_layers(model.device, mode, None)
    with (
        closing(HostMemory()) as memory,
        (progress or Progress()).stage("decode", total=len(cases)) as step,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what plans warn of was said before; what is not captured stands in the rows
        for length, batch, (name, plan) in cases:
            step.advance(0, note=f"{format_length(length)} tokens, batch {batch}")
            own = {"batch": batch, "selector": name, "plan": words, "mode": mode}
            own |= {"model": subject.name, "weights": subject.weights, "host_layers": 0} | dict.fromkeys(_OWN)
            row = Row(
                name="offload",
                length=length,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                own=own | {"miss_rate": miss_rate},
                note=subject.note,
            )
            lost: list[torch.AcceleratorError] = []
            yield _timed(row, OffloadRuns(subject, {name: plan}, bench, miss_rate, memory), mode, lost)
            if lost:
                return
            step.advance()


def _timed(row: Row, runs: OffloadRuns, mode: OffloadMode, lost: list[torch.AcceleratorError]) -> Row:
    """Times a case; to `lost` goes an error of the device, after which nothing runs any more."""

    def run(way: str) -> Run:
        if lost:
            raise lost[0]
        try:
            return runs.run(way, row.length, row.own["batch"])
        except torch.AcceleratorError as error:
            if not is_out_of_memory(error):
                lost.append(error)
            raise

    first, failed = try_each(dict.fromkeys((ON_DEVICE, mode)), run)
    found = {way: [one] for way, one in first.items()}
    notes = [repeat_in_turn(found, run, runs.bench.repeats)]
    words: dict[str, str] = {ON_DEVICE: "on the device", mode: f"--offload {mode}"}
    notes += [f"{words[way]}: {why}" for way, why in failed.items()]
    notes += [f"{words[way]}: not captured: {some[-1].why_not}" for way, some in found.items() if some[-1].why_not]
    row = row.plus(*notes)
    if ON_DEVICE in found:
        row = row.plus(device_ms=median_ms(found[ON_DEVICE]), device_replay_ms=median_replay_ms(found[ON_DEVICE]))
    return row if mode not in found or mode == ON_DEVICE else _offloaded(row, runs, found[mode])


def _offloaded(row: Row, runs: OffloadRuns, found: list[Run]) -> Row:
    last, milliseconds, replay_ms = found[-1], median_ms(found), median_replay_ms(found)
    assert isinstance(last, OffloadRun)
    assert last.stats is not None
    on_device, replayed_there = row.own["device_ms"], row.own["device_replay_ms"]
    return row.plus(
        sparse_ms=milliseconds,
        offloaded_ms=milliseconds,
        offloaded_replay_ms=replay_ms,
        slowdown=milliseconds / on_device if on_device else None,
        replay_slowdown=replay_ms / replayed_there if replay_ms and replayed_there else None,
        host_layers=last.host_layers,
        misses=last.stats.misses_a_step,
        miss_share=last.stats.miss_share,
        fetched_bytes=_fetched_bytes(runs.plan, runs.subject.info, last),
        link_gbytes_per_second=last.link and last.link.gbytes_per_second,
        link_200_tokens_us=last.link and last.link.few_us,
    )


def _fetched_bytes(plan: Plan, info: ModelInfo, run: OffloadRun) -> float | None:
    """Returns the bytes of a step: a miss brings the keys and values of all heads, or of one where heads choose for
    themselves."""
    if plan.decode is None or run.link is None or run.stats is None or run.stats.misses_a_step is None:
        return None
    offload = plan.decode.offload
    layers = [Program.of(None, plan.decode, info).layers[at] for at in (offload.layers if offload else ())]
    lists = {layer.role.follows.lists for layer in layers if layer.role.follows is not None}
    if len(lists) != 1:
        return None
    return run.stats.misses_a_step * run.host_layers * run.link.row_bytes / lists.pop()


# --- the link ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Holds what fetching random tokens takes.

    Attributes:
        row_bytes: keys and values of a token.
        gbytes_per_second: of 2,048 tokens.
        few_us: microseconds of 200 tokens.
    """

    row_bytes: int
    gbytes_per_second: float
    few_us: float


def link_rate(host_CBPGD: torch.Tensor, device: torch.device) -> LinkRate:
    """Fetches random tokens into rows of its own, by the kernel that decode steps fetch them with.

    Args:
        host_CBPGD: read alone; pinned where the device is a GPU.
        device: that reads it.
    """
    _, batch, _, heads, size = host_CBPGD.shape
    rows_PBGRD = torch.empty((2, batch, heads, max(1, _MANY // batch), size), dtype=host_CBPGD.dtype, device=device)
    row_bytes = 2 * heads * size * rows_PBGRD.element_size()

    def milliseconds(count: int) -> float:
        each = max(1, count // batch)
        lists = [_random(rows_PBGRD, len(host_CBPGD), each, number) for number in range(_LISTS)]

        def fetch() -> None:
            for placed in lists:
                gather_missed(
                    where_X, placed, lengths_B, kv_heads=heads, token_bytes=size * rows_PBGRD.element_size(), slots=0,
                    ring=1, recent=2,
                )  # fmt: skip

        timed = replayed(fetch, device)
        timed()
        return once(timed, device) / _LISTS

    where_X = _table(rows_PBGRD, host_CBPGD)
    lengths_B = torch.ones(batch, dtype=torch.int32, device=device)  # no token leaves
    many = max(1, _MANY // batch) * batch
    return LinkRate(row_bytes, many * row_bytes / milliseconds(_MANY) / 1e6, milliseconds(_FEW) * 1e3)


def _table(rows_PBGRD: torch.Tensor, host_CBPGD: torch.Tensor) -> torch.Tensor:
    where = [0] * TABLE_COLUMNS
    where[HEAD], where[ROWS], where[HOST] = rows_PBGRD.shape[3], rows_PBGRD.data_ptr(), host_CBPGD.data_ptr()
    where[HOST_TOKENS] = len(host_CBPGD)
    return torch.tensor(where, dtype=torch.int64, device=rows_PBGRD.device)


def _random(rows_PBGRD: torch.Tensor, tokens: int, count: int, seed: int) -> PlacedStep:
    batch, device = rows_PBGRD.shape[1], rows_PBGRD.device
    draws = torch.Generator(device).manual_seed(seed)
    shape = (batch, 1, count)
    missed_BgM = torch.randint(tokens, shape, generator=draws, dtype=torch.int32, device=device)
    into_M = torch.arange(count, dtype=torch.int32, device=device) % rows_PBGRD.shape[3]
    into_BgM = into_M.expand(shape).contiguous()
    misses_Bg = torch.full(shape[:2], count, dtype=torch.int32, device=device)
    return PlacedStep(into_BgM, misses_Bg[:, 0], missed_BgM, into_BgM, misses_Bg)
