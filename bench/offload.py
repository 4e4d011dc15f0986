"""`sparsekv bench decode --offload`: whole tokens by a plan, with all keys and values on the device and with layers in
host memory, in turn.

With random weights a choice finds next to nothing in the hot set: every step then fetches all that it reads.

Shapes: B batch, G KV heads, g lists of a row, M tokens of a list, C tokens on the host, R rows on the device, D head
size, P = 2 for key and value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import torch
from transformers import Cache

from sparsekv.bench.harness import Columns, Row, is_out_of_memory, number, once, repeat_in_turn, replayed, try_each
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.token_runs import DecodeBench, DecodeRuns, Run, median_ms, median_replay_ms
from sparsekv.kernels.decode.place import PlacedStep, gather_missed
from sparsekv.kernels.keys import COLUMNS as TABLE_COLUMNS
from sparsekv.kernels.keys import HEAD, HOST, HOST_TOKENS, ROWS
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.placement import OffloadMode, warn_of_host_layers
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.stores.bank import in_host_memory
from sparsekv.runtime.stores.pinned import HostMemory

ON_DEVICE: OffloadMode = "never"
_MANY, _FEW = 2048, 200  # tokens
_LISTS = 8  # fetched one after the other, so that nothing is found in a cache of the GPU's
_OWN = (
    *("device_ms", "device_replay_ms", "offloaded_ms", "offloaded_replay_ms", "slowdown"),
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
        link: of the memory that was read; None where nothing was, or not by a GPU.
    """

    host_layers: int = 0
    link: LinkRate | None = None


@dataclass(frozen=True)
class OffloadRuns(DecodeRuns):
    """Tokens of one model by one plan; a way to run is a mode of `--offload`."""

    memory: HostMemory = field(default_factory=HostMemory)

    @property
    def plan(self) -> Plan:
        (plan,) = self.plans.values()
        return plan

    @contextmanager
    def applied(self, way: str, length: int) -> Iterator[Handle]:
        with apply(
            self.model,
            self.plan,
            prefill=False,
            info=self.subject.info,
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
            offload=cast(OffloadMode, way),
            memory=self.memory,
            sparse="always",
        ) as handle:
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
        replay_ms = None if stores else self.replay_ms(handle)  # of one choice time and again: nothing is fetched
        return OffloadRun(milliseconds, replay_ms, None, stats, why_not, len(stores), link)


def check_offload(plans: Mapping[str, Plan]) -> None:
    """Refuses plans that permit no layer to be offloaded."""
    if any(one.decode and one.decode.offload is None for one in plans.values()):
        raise UsageError(
            "expected a plan that permits layers to be in host memory, found one that does not; compile it with "
            "`plan --set offload=true`, or make one by hand: --set budget=2k"
        )


def bench_offload(
    subject: BenchModel,
    plans: Mapping[str, Plan],
    words: str,
    bench: DecodeBench,
    mode: OffloadMode,
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
                own=own,
                note=subject.note,
            )
            lost: list[torch.AcceleratorError] = []
            yield _timed(row, OffloadRuns(subject, {name: plan}, bench, memory), mode, lost)
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
