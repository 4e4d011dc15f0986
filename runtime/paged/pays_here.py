"""Measures in an engine from how many tokens on the plan is faster than the engine's own attention.

Timed is one layer over random keys in scattered pages: the engine's kernel beside what runs in its place, the copy of a
past and the index of a chunk included. The number of tiles and columns follows from budgets, which random keys use up;
they are scaled to the share that was seen on calibration prompts.

Shapes: T rows of a chunk, H query heads, G KV heads, D head size, P pages of a request, B rows of a decode step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import Pattern, VerticalSlash, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import Pays, Thresholds, contexts, measure
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.timing import Launch, launched_us, replayed_us
from sparsekv.runtime.paged.plan_host import PlanHost

SECONDS = 5.0
_SMALLEST_CHUNK = 128
_DECODE_ROWS = (1, 4, 16, 64)
_MOST_PAGES = 1 << 31  # bytes of pages, many times a device's cache; more rows share them in another order
_NEAR = 0.1  # of the share on calibration prompts
_MARGIN = 1.02  # of a layer's attention, the noise of a measurement


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer in pages, and the pages of each row.

    Attributes:
        cache: as the engine's kernel takes it.
        pages: the same as ours do, [N, G, S, D] each.
        table_BP: int32.
    """

    cache: torch.Tensor
    pages: tuple[torch.Tensor, torch.Tensor]
    table_BP: torch.Tensor


class EngineKernels(Protocol):
    """Allocates and attends as the engine does."""

    @property
    def device(self) -> torch.device:
        """The engine's."""

    def queries(self, rows: int, heads: int) -> torch.Tensor:
        """[rows, H, D], random."""

    def pages(self, rows: int, tokens: int, kv_heads: int, most_bytes: int) -> Pages:
        """Random keys and values of so many rows, in pages that lie scattered."""

    def dense(self, q_THD: torch.Tensor, pages: Pages, lengths: Sequence[int], out_THD: torch.Tensor) -> Launch:
        """A launch of the engine's kernel for the last rows of requests."""

    def agreed(self, gain: float) -> float:
        """The first rank's, on all ranks: they bisect alike."""


@dataclass(frozen=True, slots=True)
class Place:
    """The plan and the sizes of an engine.

    Attributes:
        plan: digest of what it executes.
        longest: tokens of the longest request.
        step: most rows of a chunk.
        rows: most rows of a decode step.
        shares: computed share of attention on calibration prompts by length, where the plan tells it.
    """

    plan: str
    longest: int
    step: int
    rows: int
    shares: Mapping[int, float]

    @classmethod
    def of(cls, plan: Plan, longest: int, step: int, rows: int) -> Place:
        """The place of a plan."""
        predicted = plan.cost.lengths if plan.cost else ()
        shares = {entry.length: entry.prefill.density for entry in predicted if entry.prefill}
        return cls(executed_digest(plan), longest, min(step, longest), rows, shares)


Timer = Callable[[Sequence[Launch], torch.device], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Timers:
    """Times launches in microseconds: as a program issues them, and as part of a captured step."""

    launched: Timer = launched_us
    replayed: Timer = replayed_us


def measure_here(host: PlanHost, kernels: EngineKernels, place: Place, timers: Timers | None = None) -> Pays:
    """The rule of this engine. Takes a few seconds and leaves no memory behind.

    Raises:
        torch.OutOfMemoryError: there is no room for the keys of one layer.
    """
    deadline = time.monotonic() + SECONDS
    work = Work(host, kernels, place, timers or Timers())

    def left() -> float:
        return deadline - time.monotonic()

    return Pays(work.prefill_thresholds(left), work.decode_thresholds(left))


@dataclass(frozen=True, slots=True)
class Work:
    """One layer's launches, by sizes of step."""

    host: PlanHost
    kernels: EngineKernels
    place: Place
    timers: Timers

    def prefill_thresholds(self, left: Callable[[], float]) -> Thresholds:
        layer = _typical(self.host.program.layers, self.place.longest)
        if layer is None:
            return Thresholds()
        lengths = [n for n in contexts(_SMALLEST_CHUNK, self.place.longest) if layer.patterns_at(n)]
        lengths = sorted({*lengths, self.place.longest})
        sizes = [_SMALLEST_CHUNK << (2 * power) for power in range(8)]
        sizes = [*(size for size in sizes if size < self.place.step), self.place.step]
        return measure(sizes, lengths, partial(self._prefill_gain, layer), margin=_MARGIN, until=left)

    def _prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        kernels, chunk = self.kernels, Chunk.uniform(1, length - rows, length)
        q_THD = kernels.queries(rows, layer.heads)
        pages, out_THD = kernels.pages(1, length, layer.kv_heads, _MOST_PAGES), torch.empty_like(q_THD)
        scale = q_THD.shape[2] ** -0.5

        def keys() -> KeyView:
            return self.host.scratch.copy(pages.pages, pages.table_BP[0], length)

        alike = self.alike(layer, q_THD, keys(), chunk, scale)

        def sparse() -> None:
            out_THD.copy_(self.host.timed_prefill(alike, q_THD, keys(), chunk, scale))

        dense = kernels.dense(q_THD, pages, [length], out_THD)
        dense_us, sparse_us = self.timers.launched([dense, sparse], kernels.device)
        return kernels.agreed(dense_us / sparse_us)

    def alike(
        self, layer: LayerProgram, q_THD: torch.Tensor, keys: KeyView, chunk: Chunk, scale: float
    ) -> LayerProgram:
        """The layer with budgets that random keys use up at the share of calibration prompts."""
        patterns, length = layer.patterns_at(chunk.longest), chunk.longest
        share = share_at(self.place.shares, length)
        if share is None:
            return layer
        q_BHTD = q_THD.transpose(0, 1)[None]

        def computed(patterns: tuple[Pattern, ...]) -> float:
            index = build_index(patterns, q_BHTD, keys.k, chunk, layer.tile, scale=scale)
            return float(density(index, chunk))

        for _ in range(2):
            seen = computed(patterns)
            if abs(seen - share) <= _NEAR * share:
                break
            patterns = tuple(scaled(pattern, share / seen, length) for pattern in patterns)
        return replace(layer, bounds=(), patterns=(patterns,))

    def decode_thresholds(self, left: Callable[[], float]) -> Thresholds:
        decode = self.host.decode
        if decode is None:
            return Thresholds()
        shortest = min(layer.role.dense_up_to for layer in self.host.program.sparse) + 1
        lengths = sorted({*contexts(shortest, self.place.longest), self.place.longest})
        sizes = [rows for rows in (*_DECODE_ROWS, self.place.rows) if rows <= self.place.rows]
        return measure(sizes, lengths, self._decode_gain, margin=_MARGIN, until=left)

    def _decode_gain(self, rows: int, length: int) -> float:
        """All layers of a step, of which one of each kind is timed, filter layers first."""
        assert self.host.decode is not None
        kernels, program = self.kernels, self.host.program
        kinds = [(layer, count) for layer, count in program.alike_in_decode if layer.role.is_sparse]
        layer = kinds[0][0]
        pages, q_BHD = kernels.pages(rows, length, layer.kv_heads, _MOST_PAGES), kernels.queries(rows, layer.heads)
        out_BHD, scale = torch.empty_like(q_BHD), q_BHD.shape[2] ** -0.5
        lengths_B = torch.full((rows,), length, dtype=torch.int32, device=kernels.device)
        step = self.host.decode.begin(lengths_B, (), pages.table_BP, None)
        dense = kernels.dense(q_BHD, pages, [length] * rows, out_BHD)
        idle = kernels.dense(q_BHD, pages, [0] * rows, out_BHD)

        def sparse(layer: LayerProgram) -> None:
            idle()
            step.attend(layer, q_BHD, pages.pages, out_BHD, scale)

        times = self.timers.replayed([dense, *(partial(sparse, layer) for layer, _ in kinds)], kernels.device)
        counts = [count for _, count in kinds]
        ours = sum(us * count for us, count in zip(times[1:], counts, strict=True))
        layers = len(program.attending)
        return kernels.agreed(layers * times[0] / (ours + (layers - sum(counts)) * times[0]))


def _typical(layers: Sequence[LayerProgram], longest: int) -> LayerProgram | None:
    """The layer whose budgets are the median of those that are sparse; None where none is."""

    def budget(layer: LayerProgram) -> int:
        return sum(pattern.tile_tokens(longest) for pattern in layer.patterns_at(longest))

    sparse = sorted((layer for layer in layers if layer.patterns_at(longest)), key=budget)
    return sparse[len(sparse) // 2] if sparse else None


def share_at(shares: Mapping[int, float], length: int) -> float | None:
    """The share at the next longer length that has one, or at the longest."""
    longer = [planned for planned in sorted(shares) if planned >= length]
    return shares[longer[0] if longer else max(shares)] if shares else None


def scaled(pattern: Pattern, by: float, length: int) -> Pattern:
    """A pattern whose tiles and columns are so many times those it has at this length."""
    if not isinstance(pattern, VerticalSlash):
        return pattern
    tiles, columns = (max(1, round(by * budget.resolve(length))) for budget in (pattern.max_tiles, pattern.vertical))
    return pattern.model_copy(update={"max_tiles": tokens(tiles), "vertical": tokens(columns)})
