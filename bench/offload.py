"""`sparsekv bench decode --offload`: whole tokens by a plan, with all keys and values on the device and with layers in
host memory, in turn.

With random weights a choice finds next to nothing in the hot set; `--miss-rate` puts a list with a stated share of new
tokens in its place (miss_rate.py), on the device as well.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers import Cache, StoppingCriteria

from sparsekv.bench.decode import WARM_UP_TOKENS, DecodeBench, DecodeRuns, greedy
from sparsekv.bench.harness import free_memory, is_out_of_memory, repeat_in_turn, try_each, wait_for
from sparsekv.bench.link import LinkRate, link_rate
from sparsekv.bench.miss_rate import MissRate, span_of, swapped_choices
from sparsekv.bench.random_model import BenchModel
from sparsekv.kernels.decode.selection import ALL
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.placement import OffloadMode, reads_of
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.stores.bank import HostStore, allocated_slots
from sparsekv.runtime.stores.pinned import HostMemory

ON_DEVICE: OffloadMode = "never"


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """Tokens generated once.

    Attributes:
        milliseconds: of one token.
        replay_ms: of the captured step alone; None where it would find the tokens of its one choice in the hot set.
        host_layers: that were in host memory.
        stats: of the generated tokens.
        link: of the memory that was read; None where nothing was, or not by a GPU.
        why_not: why steps were not captured.
    """

    milliseconds: float
    replay_ms: float | None
    host_layers: int
    stats: RunStats
    link: LinkRate | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRow:
    """One token of the whole model, in milliseconds, medians.

    Attributes:
        device_ms, device_replay_ms: with all keys and values on the device: a token, and the captured step alone.
        offloaded_ms, offloaded_replay_ms: with those of `host_layers` layers in host memory.
        misses: tokens that a layer in host memory fetches in a step, of all batch rows, and of all KV heads where these
            choose for themselves.
        miss_share: of the tokens that it needs beside the recent ones.
        fetched_bytes: of a step, all layers; None where some layers choose for each KV head and others do not.
        link: what fetching alone takes.
    """

    length: int
    batch: int
    plan: str
    mode: str
    device: str
    dtype: str
    model: str
    weights: str
    miss_rate: float | None = None
    device_ms: float | None = None
    device_replay_ms: float | None = None
    offloaded_ms: float | None = None
    offloaded_replay_ms: float | None = None
    host_layers: int = 0
    misses: float | None = None
    miss_share: float | None = None
    fetched_bytes: float | None = None
    link: LinkRate | None = None
    note: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is any number."""
        return self.device_ms is not None or self.offloaded_ms is not None

    @property
    def slowdown(self) -> float | None:
        """A token from host memory over one on the device."""
        return self.offloaded_ms / self.device_ms if self.offloaded_ms and self.device_ms else None

    @property
    def replay_slowdown(self) -> float | None:
        """The captured step from host memory over that on the device."""
        if not self.offloaded_replay_ms or not self.device_replay_ms:
            return None
        return self.offloaded_replay_ms / self.device_replay_ms

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "link"}
        link = self.link
        return own | {
            "slowdown": self.slowdown,
            "replay_slowdown": self.replay_slowdown,
            "link_gbytes_per_second": link and link.gbytes_per_second,
            "link_200_tokens_us": link and link.few_us,
        }


class _Clock(StoppingCriteria):
    """Stops nothing: begins to measure when the captured step is warm."""

    def __init__(self, device: torch.device, begin: Callable[[], None]) -> None:
        self._device = device
        self._begin = begin
        self._tokens = 0
        self.began = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any) -> torch.BoolTensor:
        """Is called with every new token."""
        self._tokens += 1
        if self._tokens == WARM_UP_TOKENS:
            self._begin()
            self.began = self.latest()
        goes_on: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return goes_on  # type: ignore[no-any-return]

    def latest(self) -> float:
        """Seconds, once the device is done."""
        wait_for(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class OffloadRuns(DecodeRuns):
    """Tokens of one model by one plan; a way to run is a mode of `--offload`.

    Attributes:
        miss_rate: share of new tokens in each choice; None leaves the choices.
        memory: blocks of host memory, which all runs use in turn.
    """

    miss_rate: float | None = None
    memory: HostMemory = field(default_factory=HostMemory)

    def run_mode(self, mode: OffloadMode, plan: Plan, length: int, batch: int) -> OffloadRun:
        """Generates behind a cache of so many random tokens that the rows end with about `length`.

        Raises:
            Whatever the model raises: out of memory, a kernel that does not run here.
        """
        free_memory(self.model.device)
        share, cached = self.miss_rate, cached_tokens(self.bench, length)
        swapped = swapped_choices(None if share is None else MissRate(share, cached))
        with swapped, self.applied(mode, plan) as handle, greedy(self.model):
            self._check_captured(handle)
            cache = self.filled(handle, length, batch)
            milliseconds = self.token_ms(cache, batch, handle.reset_stats)
            stats, why_not = handle.stats(), self.why_not(handle)
            link, layers = self._link(cache)
            # replays make one choice time and again, unless it is swapped: nothing would be fetched
            replay_ms = None if layers and self.miss_rate is None else self.replay_ms(handle)
            return OffloadRun(milliseconds, replay_ms, layers, stats, link, why_not)

    def token_ms(self, cache: Cache, batch: int, begin: Callable[[], None] = lambda: None) -> float:
        """Milliseconds of one more token, without those that warm up: the first ones fill the hot set."""
        clock = _Clock(self.model.device, begin)
        self.generate(cache, batch, WARM_UP_TOKENS + self.bench.new_tokens, stopping_criteria=[clock])
        return (clock.latest() - clock.began) / self.bench.new_tokens * 1e3

    def applied(self, mode: OffloadMode, plan: Plan) -> Handle:
        """The plan at work."""
        return apply(
            self.model,
            plan,
            prefill=False,
            info=self.subject.info,
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
            offload=mode,
            memory=self.memory,
        )

    def _check_captured(self, handle: Handle) -> None:
        if self.miss_rate is not None and handle.steps is None:
            raise UsageError("expected captured steps for --miss-rate, found none on this device; leave it out")

    def _link(self, cache: Cache) -> tuple[LinkRate | None, int]:
        """Its rate, and how many layers are in host memory."""
        layers = [layer for layer in cache.layers if isinstance(layer, SparseLayer)]
        stores = [layer.store for layer in layers if isinstance(layer.store, HostStore) and layer.store.is_long()]
        if not stores or self.model.device.type != "cuda":
            return None, len(stores)
        _, host_CBPGD = stores[0].memory_of_step
        return link_rate(host_CBPGD, self.model.device), len(stores)


def cached_tokens(bench: DecodeBench, length: int) -> int:
    """That a row has before the first step, at least."""
    return length - bench.fewest_tokens


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
        for layer in (program.layers[number] for number in plan.decode.offload.layers):
            chosen = ALL if layer.follows is None else layer.follows.count(length)
            if layer.follows is None or chosen == ALL:
                continue
            span = span_of(layer.follows, cached_tokens(bench, length))
            needed = max(2 * chosen, 1 + allocated_slots(plan.decode.offload.hot, reads_of(layer), length))
            if span < needed:
                raise UsageError(
                    f"expected {needed} tokens or more to draw new ones from for --miss-rate, found {span} at "
                    f"{format_length(length)}: more than the hot set has slots, and twice the budget of layer "
                    f"{layer.layer}; use longer --lengths, or a smaller --budget"
                )


def bench_offload(
    subject: BenchModel,
    plans: Mapping[str, Plan],
    words: str,
    bench: DecodeBench,
    mode: OffloadMode,
    miss_rate: float | None = None,
    progress: Progress | None = None,
) -> Iterator[OffloadRow]:
    """Times every length with every batch, and gives a row a plan as soon as it is known.

    A case that fails or does not fit in memory is a row with a note. An error of the device ends the bench with the
    row: all that comes after it would fail too.

    Args:
        plans: by name; `check_decode` has seen them, and their decode phases permit layers to be offloaded.
        words: what the plans are, for the rows.
        mode: which of these layers are.
        miss_rate: share of new tokens in each choice, which `check_miss_rate` has seen; None leaves the choices.
    """
    model, cases = subject.model, list(product(bench.lengths, bench.batches, plans.items()))
    runs = OffloadRuns(subject, plans, bench, miss_rate)
    lost: list[torch.AcceleratorError] = []
    with (
        closing(runs.memory),
        (progress or Progress()).stage("decode", total=len(cases)) as step,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what plans warn of was said before; what is not captured stands in the rows
        for length, batch, (name, plan) in cases:
            step.advance(0, note=f"{format_length(length)} tokens, batch {batch}")
            blank = OffloadRow(
                length=length,
                batch=batch,
                plan=words if len(plans) == 1 else f"{words}; selector {name}",
                mode=mode,
                device=device_name(model.device),
                dtype=dtype_name(model.dtype),
                model=subject.name,
                weights=subject.weights,
                miss_rate=miss_rate,
                note=subject.note,
            )
            yield _row(blank, runs, plan, mode, lost)
            if lost:
                return
            step.advance()


def _row(
    blank: OffloadRow, runs: OffloadRuns, plan: Plan, mode: OffloadMode, lost: list[torch.AcceleratorError]
) -> OffloadRow:
    """Times a case; to `lost` goes an error of the device, after which nothing runs any more."""

    def run(way: str) -> OffloadRun:
        if lost:
            raise lost[0]
        try:
            return runs.run_mode(mode if way == mode else ON_DEVICE, plan, blank.length, blank.batch)
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
    times = {way: statistics.median(one.milliseconds for one in some) for way, some in found.items()}
    replays = {
        way: statistics.median(one.replay_ms for one in some if one.replay_ms is not None)
        for way, some in found.items()
        if all(one.replay_ms is not None for one in some)
    }
    row = replace(
        blank,
        device_ms=times.get(ON_DEVICE),
        device_replay_ms=replays.get(ON_DEVICE),
        note="; ".join(filter(None, (blank.note, *notes))),
    )
    if mode not in found or mode == ON_DEVICE:
        return row
    last = found[mode][-1]
    misses, layers = last.stats.misses_a_step, last.host_layers
    return replace(
        row,
        offloaded_ms=times[mode],
        offloaded_replay_ms=replays.get(mode),
        host_layers=layers,
        misses=misses,
        miss_share=last.stats.miss_share,
        fetched_bytes=_fetched_bytes(plan, runs.subject.info, last),
        link=last.link,
    )


def _fetched_bytes(plan: Plan, info: ModelInfo, run: OffloadRun) -> float | None:
    """Of a step: a miss brings the keys and values of all heads, or of one where heads choose for themselves."""
    if plan.decode is None or run.link is None or run.stats.misses_a_step is None:
        return None
    offload = plan.decode.offload
    layers = [Program.of(None, plan.decode, info).layers[number] for number in (offload.layers if offload else ())]
    lists = {1 if layer.follows.heads == "max" else layer.kv_heads for layer in layers if layer.follows}
    if len(lists) != 1:
        return None
    return run.stats.misses_a_step * run.host_layers * run.link.row_bytes / lists.pop()
