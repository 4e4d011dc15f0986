"""The rule of where sparse attention is faster, from times of one layer over random keys.

The number of tiles and columns of a chunk follows from budgets, which random keys use up; they are scaled to the share
that was seen on calibration prompts.

Shapes: B batch, H query heads, G KV heads, T rows of a chunk, K tokens, D head size, E numbers of a row in the heads
of a rank, F in the heads of all ranks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import Pattern, VerticalSlash, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import Clock, Pays, Thresholds, contexts, measure
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.timing import Launch, launched_us, replayed_us

_SMALLEST_CHUNK = 128
_DECODE_ROWS = (1, 4, 16, 64)
_SCALINGS = 6
_NEAR = 0.1  # of the share on calibration prompts
_MARGIN = 1.02  # the noise of a measurement
_PRODUCTS = 12  # of a layer, each of E by F weights: 4 of attention, 8 of a gated feed-forward layer of 8/3 E

Timer = Callable[[Sequence[Launch], torch.device], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Timers:
    """Times launches in microseconds: as a program issues them, and as part of a captured step."""

    launched: Timer = launched_us
    replayed: Timer = replayed_us


@dataclass(frozen=True, slots=True)
class Place:
    """The plan and the sizes that a rule is measured for.

    Attributes:
        plan: digest of its executed phases.
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

    @property
    def key(self) -> dict[str, str | int]:
        """Its part of the key that a measured rule is stored by."""
        shares = ",".join(f"{length}:{share:.4g}" for length, share in sorted(self.shares.items()))
        return {"plan": self.plan, "longest": self.longest, "step": self.step, "rows": self.rows, "shares": shares}

    @classmethod
    def of(cls, plan: Plan, longest: int, step: int, rows: int) -> Place:
        predicted = plan.cost.lengths if plan.cost else ()
        shares = {entry.length: entry.prefill.density for entry in predicted if entry.prefill}
        return cls(executed_digest(plan), longest, min(step, longest), rows, shares)


@dataclass(frozen=True, slots=True)
class TimedLayers(ABC):
    """The layers of a program in one place; a host launches them beside its dense attention."""

    program: Program
    place: Place
    timers: Timers

    @abstractmethod
    def prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        """Dense time over sparse time of a chunk of so many rows that ends a prompt, in one layer."""

    @abstractmethod
    def decode_gain(self, rows: int, length: int) -> float:
        """Dense time over sparse time of the layers of a decode step."""

    def agreed(self, measured: float) -> float:
        """The first rank's, on all ranks: they bisect alike."""
        return measured

    def rule(self, seconds: float) -> Pays:
        """Measures; sizes whose turn comes after so many seconds are dense.

        Raises:
            torch.OutOfMemoryError: there is no room for the keys of one layer.
        """
        deadline = time.monotonic() + seconds

        def left() -> float:
            return self.agreed(deadline - time.monotonic())

        return Pays(self._prefill_thresholds(left), self._decode_thresholds(left))

    def _prefill_thresholds(self, left: Clock) -> Thresholds:
        layer, longest, step = _typical(self.program.layers, self.place.longest), self.place.longest, self.place.step
        if layer is None:
            return Thresholds()
        if not self.place.shares:  # random keys would be computed at another share than prompts
            return self.program.hint.prefill
        buckets = zip(layer.bounds, pairwise(layer.patterns), strict=True)
        begins = (bound + 1 for bound, (before, behind) in buckets if behind and not before and bound < longest)
        lengths = [n for n in (*contexts(_SMALLEST_CHUNK, longest), *begins) if layer.patterns_at(n)]
        rows = [_SMALLEST_CHUNK << (2 * power) for power in range(8)]
        rows = [*(size for size in rows if size < step), step]
        return measure(rows, sorted({*lengths, longest}), partial(self.prefill_gain, layer), margin=_MARGIN, until=left)

    def _decode_thresholds(self, left: Clock) -> Thresholds:
        if not self.program.sparse:
            return Thresholds()
        shortest = min(layer.role.dense_up_to for layer in self.program.sparse) + 1
        lengths = sorted({*contexts(shortest, self.place.longest), self.place.longest})
        rows = [rows for rows in (*_DECODE_ROWS, self.place.rows) if rows <= self.place.rows]
        return measure(rows, lengths, self.decode_gain, margin=_MARGIN, until=left)

    def alike(
        self, layer: LayerProgram, q_BHTD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, scale: float
    ) -> LayerProgram | None:
        """The layer with budgets that random keys use up at the share of calibration prompts; None where none do."""
        length, shares = chunk.longest, self.place.shares
        patterns = layer.patterns_at(length)
        share = shares[min((planned for planned in shares if planned >= length), default=max(shares))]
        for _ in range(_SCALINGS):
            index = build_index(patterns, q_BHTD, k_BGKD, chunk, layer.tile, scale=scale)
            computed = float(density(index, chunk))
            if abs(computed - share) <= _NEAR * share:
                return replace(layer, bounds=(), patterns=(patterns,))
            patterns = tuple(_scaled(pattern, share / computed, length) for pattern in patterns)
        return None

    def hinted_gain(self, rows: int, length: int) -> float:
        """Stands in for a gain where random keys never reach the share of calibration prompts."""
        return math.inf if self.program.hint.prefill.pays(rows, length) else 0.0

    def layer_gain(self, dense: Launch, sparse: Launch, x_TE: torch.Tensor) -> float:
        """Dense time over sparse time of a layer: attention, and products as of its projections, whose time on the
        device hides that of the program, which an index takes more of.

        Args:
            x_TE: as many numbers a row as the heads have.
        """
        rows, width = x_TE.shape
        new = partial(torch.empty, dtype=x_TE.dtype, device=x_TE.device)
        w_EF, out_TF = (new(size, width * self.program.rank.count) for size in (width, rows))
        w_EF.normal_()

        def layer(attention: Launch) -> object:
            attended = attention()
            for _ in range(_PRODUCTS):
                torch.mm(x_TE, w_EF, out=out_TF)
            return attended

        dense_us, sparse_us = self.timers.launched([partial(layer, dense), partial(layer, sparse)], x_TE.device)
        return dense_us / sparse_us

    @property
    def kinds(self) -> list[tuple[LayerProgram, int]]:
        """One of the sparse layers that read as much in every step, and how many of them there are; filter layers come
        before the layers of their segments."""
        return [(layer, count) for layer, count in self.program.alike_in_decode if layer.role.is_sparse]

    def step_gain(self, times: Sequence[float]) -> float:
        """The gain of all layers, from the times of a dense one and of `kinds`."""
        dense, counts = times[0], [count for _, count in self.kinds]
        ours = sum(us * count for us, count in zip(times[1:], counts, strict=True))
        layers = len(self.program.attending)
        return layers * dense / (ours + (layers - sum(counts)) * dense)


def _typical(layers: Sequence[LayerProgram], longest: int) -> LayerProgram | None:
    """The layer whose budgets are the median of those that are sparse; None where none is."""

    def budget(layer: LayerProgram) -> int:
        return sum(pattern.tile_tokens(longest) for pattern in layer.patterns_at(longest))

    sparse = sorted((layer for layer in layers if layer.patterns_at(longest)), key=budget)
    return sparse[len(sparse) // 2] if sparse else None


def _scaled(pattern: Pattern, by: float, length: int) -> Pattern:
    """A pattern whose tiles and columns are so many times those it has at this length."""
    if not isinstance(pattern, VerticalSlash):
        return pattern
    tiles, columns = (max(1, round(by * budget.resolve(length))) for budget in (pattern.max_tiles, pattern.vertical))
    return pattern.model_copy(update={"max_tiles": tokens(tiles), "vertical": tokens(columns)})
