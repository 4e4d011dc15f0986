"""Measures in an engine where its plan is faster than the engine's own attention, once a place.

Timed is one layer over random keys in scattered pages: the engine's kernel beside the kernels that run in its place,
the copy of a past and the index of a chunk included. Captured steps of decode are compared whole, the engine's program
included, which a small model's device waits for.

Shapes: T rows of a request's chunk, H query heads, G KV heads, D head size, P pages of a request, B requests of a
decode step, R their rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

import torch

from sparsekv.kernels.keys import FLOAT8, PLAIN, KeyView, Scales, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.core.pays import Pays, parse
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.core.timed_layers import BUSY, Launch, RuleFile, TimedLayers, Timer, Timers, rule_key
from sparsekv.runtime.model_config import device_name
from sparsekv.runtime.paged.plan_host import PlanHost
from sparsekv.runtime.paged.step_rows import DecodeRows
from sparsekv.runtime.settings import cache_folder

Made = TypeVar("Made")

_SECONDS = 5.0
_PROGRAM_US = 1400.0  # of a captured step, scheduler and sampling included: of vLLM 0.33 on a server's CPU of 2025
_REQUEST_US = 25.0  # more for each request: steps of 16 took 0.3 to 0.4 ms more than of one; more were not measured
_OTHERS_US = 30.0  # of a layer of few rows on an H200 but for attention and reading weights: norms, writes, launches
_WEIGHTS = 12  # of a layer, each of as many numbers as its heads have squared: products read them once a step
_MOST_WEIGHTS = 1 << 27  # numbers that are read to time them
_SHORT = 128  # tokens: nothing chooses among so few
_MOST_TEXT = 1 << 14  # bytes of a rule; one that is longer is measured anew
_FINITE = 0x7F  # bytes below it are numbers in e4m3
_MOST_BYTES = 1 << 31  # of pages, many times a device's cache; more rows share them in another order


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer in pages, and the pages of each row."""

    cache: Any  # as the engine's kernel takes it
    pages: tuple[torch.Tensor, torch.Tensor]  # the same as ours do, [N, G, S, D] each
    table_BP: torch.Tensor  # int32


def _of_first_rank(gain: Callable[..., float]) -> Callable[..., float]:
    """All ranks return what the first one measured; nan where the memory of one does not suffice."""

    @wraps(gain)
    def agreed(self: EngineLayers, *args: Any) -> float:
        try:
            return self.agreed(gain(self, *args))
        except torch.OutOfMemoryError:
            return self.agreed(math.nan)

    return agreed


@dataclass(frozen=True, slots=True)
class EngineLayers(TimedLayers):
    """The layers of an engine beside its kernel, which takes queries in e4m3 beside a cache in 8 bits."""

    mixes: ClassVar[bool] = True

    host: PlanHost
    device: torch.device
    size: int  # of a head
    scales: Scales | None = None  # of a cache in 8 bits; queries have none
    softmax: Softmax = PLAIN  # of the layers
    costs: dict[int, float | None] = field(default_factory=dict)  # microseconds of a step's idle kernels, by rows
    products: dict[int, float] = field(default_factory=dict)  # microseconds of all but attention, by rows
    replays: dict[tuple[int, int, int | None], list[float]] = field(default_factory=dict)
    issued: list[float] = field(default_factory=list)  # microseconds of the program for a layer of each kind
    begun: list[float] = field(default_factory=list)  # and for a step that may choose, ahead of its graph

    @property
    def dtype(self) -> torch.dtype:
        return self.host.scratch.kind[0]

    @property
    def program_us(self) -> float:
        return self.host.program_us

    @property
    def ranks(self) -> int:
        return self.program.rank.count

    def agreed(self, measured: float) -> float:
        if self.ranks == 1:
            return measured
        of_ranks = self.host.engine.gather(torch.tensor([measured], dtype=torch.float32, device=self.device))
        return math.nan if of_ranks.isnan().any() else float(of_ranks[0, 0])

    @_of_first_rank
    def prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        if not layer.patterns_at(length):  # of this rank
            return 1.0
        chunk, scale = Chunk.uniform(1, length - rows, length), self.size**-0.5
        q_THD, pages = self._queries(rows, layer.heads), self._pages(1, length, layer.kv_heads)
        out_THD = torch.empty_like(q_THD)

        def keys() -> KeyView:
            copied = self.host.scratch.copy(pages.pages, pages.table_BP[0], length, self.scales)
            return replace(copied, softmax=self.softmax)

        alike = self.alike(layer, q_THD.transpose(0, 1)[None], keys().k, chunk, scale)
        if alike is None:
            return math.nan

        def sparse() -> None:
            attended = graph()
            if attended is None:
                attended = self.host.prefill(alike, q_THD, keys(), chunk, scale, counted=False)
            out_THD.copy_(attended)

        graph = self._graph(alike, q_THD, pages, chunk)
        dense = self.dense(q_THD, pages, [length], out_THD)
        return self.layer_gain(dense, sparse, q_THD.flatten(1))

    def _graph(
        self, layer: LayerProgram, q_THD: torch.Tensor, pages: Pages, chunk: Chunk
    ) -> Callable[[], torch.Tensor | None]:
        """Attention as a graph, where chunks of so many rows run as one. The first chunk of a size does not."""
        if self.host.captured is None or self.host.captured.failed or layer.role.evicts is not None:
            return lambda: None
        graphs = self.host.captured.alone(layer)
        attend = partial(
            graphs.attend, layer=layer, q_THD=q_THD, pages=pages.pages, table_P=pages.table_BP[0], chunk=chunk,
            scale=self.size**-0.5, softmax=self.softmax, meter=Meter(), scales=self.scales,
        )  # fmt: skip
        attend(object())
        return partial(attend, object())

    @_of_first_rank
    def decode_gain(self, rows: int, length: int) -> float:
        """All layers of a step of so many requests, of which one of each kind is timed, filter layers first. Without a
        second set of graphs a captured step has our kernels at every length or at none: none where they cost more in a
        step in which nothing chooses than they save at the longest context. Beside them a dense step takes as much
        longer."""
        if rows not in self.costs and self.host.holds_dense:
            self.costs[rows] = 0.0
        elif rows not in self.costs:
            short, idle = self._step_us(rows, min(_SHORT, length), None)
            longest = max(at for at in self._decode_sizes[1] if rows * at <= self.place.tokens)
            dense, sparse = self._step_us(rows, longest, 0)
            least = max(0.0, idle - short)
            self.costs[rows] = least if dense - sparse > least else None
        if (cost := self.costs[rows]) is None:
            return 0.0
        dense, sparse = self._step_us(rows, length, 0)
        return (dense + cost) / sparse

    @_of_first_rank
    def mixed_gain(self, rows: int, length: int) -> float:
        """Beside prompts the engine's kernel takes the decode rows along, while the program launches ours for each
        layer."""
        dense_us, *sparse = self._replayed(rows, length, 0)
        if not self.issued:  # at any size and context alike
            self.issued.extend(self._timed(self.timers.issued, self._launches(rows, length, 0, captured=False)[1:]))
        dense_us, ours_us = self.step_us([dense_us, *map(max, sparse, self.issued)])
        return dense_us / ours_us

    def _on_all_ranks(self, made: Callable[[], Made]) -> Made:
        """What is allocated here, where every rank has memory for it."""
        try:
            tensors, memory = made(), 0.0
        except torch.OutOfMemoryError:
            tensors, memory = None, math.nan
        if math.isnan(self.agreed(memory)) or tensors is None:
            raise torch.OutOfMemoryError
        return tensors

    def _step_us(self, rows: int, length: int, least: int | None) -> tuple[float, float]:
        """Microseconds of a captured step, dense and by the plan; see `_launches`. Nothing is saved of a step for which
        the program takes longer than the device, and it takes longer still for one that chooses."""
        attention = self.step_us(self._replayed(rows, length, least))
        if rows not in self.products:
            self.products[rows] = self._products_us(rows)
        if not self.begun:
            self.begun.extend(self.timers.issued([self._begin(self._pages(1, 1, 1), 1, 1, 0, True)], self.device))
        program_us = _PROGRAM_US + rows * _REQUEST_US
        program = program_us, program_us + BUSY * self.begun[0]
        # What follows from them is the same on all ranks, which wait for each other in steps; nan stays.
        times = (max(us + self.products[rows], least_us) for us, least_us in zip(attention, program, strict=True))
        whole, ours = map(self.agreed, times)
        if math.isnan(whole + ours):
            raise torch.OutOfMemoryError
        return whole, ours

    def _products_us(self, rows: int) -> float:
        """Microseconds of all layers of a step but for attention. Experts and quantised weights are read in less."""
        width = self.program.attending[0].heads * self.size
        wanted = _WEIGHTS * width * self.ranks
        columns = min(wanted, max(1, _MOST_WEIGHTS // width))
        shapes = (rows * self.host.queries, width), (width, columns)
        try:
            x_RE, w_EF = (torch.randn(shape, dtype=self.dtype, device=self.device) for shape in shapes)
            (taken,) = self.timers.replayed([partial(torch.mm, x_RE, w_EF)], self.device)
        except torch.OutOfMemoryError:
            taken = 0.0
        return len(self.program.layers) * (_OTHERS_US + taken * wanted / columns)

    def _replayed(self, rows: int, length: int, least: int | None) -> list[float]:
        """Microseconds of each of `_launches` in a graph."""
        key = rows, length, least
        if key not in self.replays:
            self.replays[key] = self._timed(self.timers.replayed, self._launches(*key))
        return self.replays[key]

    def _timed(self, timer: Timer, launches: Sequence[Launch]) -> list[float]:
        """nan where this rank has no memory for it: others make no more launches, for which this one would wait."""
        try:
            return [*timer(launches, self.device)]
        except torch.OutOfMemoryError:
            return [math.nan] * len(launches)

    def _launches(self, rows: int, length: int, least: int | None, captured: bool = True) -> list[Launch]:
        """A dense layer of a decode step, and one of each kind by the plan, which the engine captures or launches;
        `least` as in `DecodeHost.begin`."""
        kinds, scale = [layer for layer, _ in self.kinds], self.size**-0.5
        layer, verified = kinds[0], rows * self.host.queries
        pages, q_RHD = self._on_all_ranks(
            lambda: (self._pages(rows, length, layer.kv_heads), self._queries(verified, layer.heads))
        )
        out_RHD, lengths = torch.empty_like(q_RHD), [length] * rows
        whole = captured and self.host.holds_dense
        step = self._begin(pages, rows, length, least, whole)()

        def sparse(layer: LayerProgram) -> Launch:
            rest = None if whole else self.dense(q_RHD, pages, lengths, out_RHD, step.left(layer))

            def launch() -> None:
                if rest is not None:
                    rest()
                step.attend(layer, q_RHD, pages.pages, out_RHD, scale, self.softmax, self.scales)

            return launch

        return [self.dense(q_RHD, pages, lengths, out_RHD), *map(sparse, kinds)]

    def _begin(self, pages: Pages, rows: int, length: int, least: int | None, whole: bool) -> Callable[[], DecodeRows]:
        assert self.host.decode is not None
        lengths_B = torch.full((rows,), length, dtype=torch.int32, device=self.device)
        queries, starts_X = self.host.queries, None
        if queries > 1:
            starts_X = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * queries
        table_BP = pages.table_BP
        return partial(self.host.decode.begin, lengths_B, (), table_BP, None, least, starts_X, rows * queries, whole)

    def dense(
        self, q_THD: torch.Tensor, pages: Pages, lengths: Sequence[int], out_THD: torch.Tensor, left_B: Any = None
    ) -> Launch:
        """With `left_B`, int32 lengths, of the requests that are left, by the schedule of all, as in `of_lengths`."""
        scales, scale = self.scales, self.size**-0.5
        if scales is not None and q_THD.is_cuda:
            scales = replace(scales, q_G=torch.ones_like(scales.k_G))
            q_THD = q_THD.to(FLOAT8)
        by = out_THD, scales, self.softmax, left_B
        launch: Launch = self.host.engine.platform.attention(
            q_THD, pages.cache, pages.table_BP, lengths, scale, *by, **self.host.kernel
        )
        return launch

    def _queries(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.size, dtype=self.dtype, device=self.device)

    def _pages(self, rows: int, tokens: int, kv_heads: int) -> Pages:
        engine = self.host.engine
        page, dtype = engine.platform.page, self.dtype if self.scales is None else torch.uint8
        each = -(-tokens // page)
        count = max(each, min(rows * each, _MOST_BYTES // (2 * page * kv_heads * self.size * dtype.itemsize)))
        cache = engine.empty_cache(count, kv_heads, self.size, dtype, self.device)
        cache.normal_() if self.scales is None else cache.random_(0, _FINITE)
        order_P = torch.randperm(count, dtype=torch.int32, device=self.device)
        table_BP = order_P.repeat(-(-rows * each // count))[: rows * each].view(rows, each)
        return Pages(cache, engine.platform.pages_of(cache), table_BP)


def measured_rule(host: PlanHost, device: torch.device, size: int, scales: Scales | None, softmax: Softmax) -> Pays:
    """The rule of this engine, from disk where it was measured before; the hint for want of memory."""
    started, place = time.monotonic(), host.place
    scales = scales and replace(scales, q_G=None)
    layers = EngineLayers(host.program, place, Timers(), host, device, size, scales, softmax)
    key = rule_key(
        device, device_name(device), layers.dtype, host.backend, scales is not None, host.model,
        page=host.engine.platform.page, ranks=layers.ranks, engine=host.engine.release, queries=host.queries,
        graphs=host.captured is not None, both=host.holds_dense, **place.key, **host.kernel,
    )  # fmt: skip
    file, measure = RuleFile(key, cache_folder()), partial(layers.rule, _SECONDS)
    rule, is_new = file.read_or(measure) if layers.ranks == 1 else _on_ranks(host, file, measure)
    torch.cuda.empty_cache()
    how = f"measured in {time.monotonic() - started:.1f} s" if is_new else "as measured before"
    host.engine.logger.info("sparsekv: %s (%s)", rule.told, how)
    return rule


def _on_ranks(host: PlanHost, file: RuleFile, measure: Callable[[], tuple[Pays, bool]]) -> tuple[Pays, bool]:
    """The first rank's file decides. All ranks measure together: a lock would keep them from each other."""
    known = file.read()
    own = ("" if known is None else str(known)).encode()
    own = (own if len(own) <= _MOST_TEXT else b"").ljust(_MOST_TEXT)
    text = host.engine.gather_bytes(own)[0].decode().strip()
    if text:
        return parse(text), False
    rule, is_whole = measure()
    if is_whole:
        file.write(rule)
    return rule, True
