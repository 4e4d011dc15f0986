"""The search space: ranges of patterns, in each of which one size is moved until the cost is right.

MInference 1.0, section 3.2, algorithm 1: every candidate is a family with a ratio of its parts; its size changes until
it computes the target number of tiles on the queries and keys at hand (`fit_to_target`). The paper's own numbers are
in the patterns' `published`.

A first prompt compares all ranges at a few densities (`screened`); each head then goes on with the ranges that did
least damage there, over the whole ladder of densities (`slots`).

Shapes: B batch (always 1 here), X steps of M rows, H query heads, G KV heads, S queries, D head size, T query tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from sparsekv.kernels.index.build import build_index, layer_lines
from sparsekv.kernels.index.layout import LineScores
from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.methods import PrefillRule, method_of
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles, density
from sparsekv.planner.options import Settled, density_for
from sparsekv.planner.profile.profile_data import Candidate
from sparsekv.plans.patterns import (
    PATTERNS,
    AShape,
    Grid,
    Pattern,
    PatternRange,
    SizeRange,
    TileShape,
    mandatory_density,
    tokens,
)

# Densities are rounded; one that is the target but for rounding is the target.
ROUNDING = 1e-4


def search_space(options: Settled, length: int) -> tuple[PatternRange, ...]:
    """The ranges to search at a length, of the families asked for: our own or those of MInference 1.0, and those of
    rules from outside."""
    tile, kinds = options.tile, [kind for name, kind in PATTERNS.items() if name in options.families]
    ruled = (range_of_rule(name, length) for name in options.families if name not in PATTERNS)
    if options.preset is not None:
        return (*(one for kind in kinds for one in kind.published(tile)), *ruled)
    return (*(one for kind in kinds for one in kind.ranges(tile, length)), *ruled)


def range_of_rule(name: str, length: int) -> PatternRange:
    """The budgets of a registered prefill rule, as tokens of a context of `length`."""
    rule, grid = method_of(PrefillRule, name), Grid(1, None)

    def pattern(size: int, _: int) -> Pattern:
        return rule.pattern(min(1.0, grid.value(size + 1) / length)).in_tokens(length)

    return SizeRange(name, name, lambda most: grid.count(most) - 1, pattern)


@dataclass(frozen=True, slots=True)
class Aim:
    """Patterns to bring to one density, and what the profile calls them."""

    patterns: PatternRange
    density: float

    @property
    def candidate(self) -> Candidate:
        """The profile's entry."""
        return Candidate(family=self.patterns.family, range=self.patterns.name, density=self.density)


def aims(options: Settled, length: int) -> tuple[Aim, ...]:
    """Every candidate of a length: each pattern range at each density of the ladder, ascending."""
    return tuple(Aim(one, share) for one in search_space(options, length) for share in _densities(options, length))


def _densities(options: Settled, length: int) -> tuple[float, ...]:
    """The ladder: multiples of the target between what mandatory tiles take and all tiles."""
    if options.preset is not None:
        return (_published_density(length, options.tile),)
    target = options.target_at(length) or density_for(length)
    least = min(mandatory_density(length, options.tile, family) for family in options.families)
    shares = {round(target * level, 4) for level in options.levels}
    return tuple(sorted({share for share in shares if least <= share < 1.0} | {round(max(least, min(shares)), 4)}))


# Densities of the ladder that all ranges are compared at, as shares of its height, and how many ranges a head keeps.
_SCREENED_AT = (0.35, 0.75)
_RANGES_A_HEAD = 2


def screened(aims: Sequence[Aim]) -> tuple[int, ...]:
    """Returns which candidates the first prompt compares: of each range a few densities, the extremes left out."""
    densities = sorted({aim.density for aim in aims})
    chosen = {densities[round(share * (len(densities) - 1))] for share in _SCREENED_AT}
    return tuple(number for number, aim in enumerate(aims) if aim.density in chosen)


Numbers = npt.NDArray[np.int64]


def slots(aims: Sequence[Aim], compared: Sequence[int], damage_CH: npt.NDArray[np.float64]) -> Numbers:
    """[slot, H]: the candidates that each head goes on with: every density of its best ranges.

    Args:
        compared: the candidates that were screened.
        damage_CH: what each of them did; a range counts by its geometric mean over them.
    """
    names = list(dict.fromkeys(aim.patterns.name for aim in aims))
    logs_CH = np.log(np.maximum(damage_CH, 1e-30))
    rows_of = [[n for n, number in enumerate(compared) if aims[number].patterns.name == name] for name in names]
    mean_RH = np.stack([logs_CH[rows].mean(0) for rows in rows_of])
    best_KH = np.argsort(mean_RH, axis=0, kind="stable")[:_RANGES_A_HEAD]
    of_range = [[number for number, aim in enumerate(aims) if aim.patterns.name == name] for name in names]
    return np.asarray(np.array(of_range)[best_KH].swapaxes(1, 2).reshape(-1, damage_CH.shape[1]))


def _published_density(length: int, tile: TileShape) -> float:
    """Returns what every candidate of MInference's search is brought to: the cost of 1024 sink and 4096 local
    tokens."""
    pattern, chunk = AShape(sink=tokens(1024), window=tokens(4096)), Chunk.uniform(1, 0, length)
    nothing_11LD = torch.empty(1, 1, length, 1, device="cpu")  # a static pattern reads neither queries nor keys
    index = build_index((pattern,), nothing_11LD, nothing_11LD, chunk, tile, scale=1.0)
    return float(density(index, chunk))


# Rows near the end of a prompt cross more of a head's diagonals than the average row does.
ROW_ROOM = 1.25
# What a pattern may spend in a row of another prompt, over the most it spent in one of the calibration prompt.
PROMPT_ROOM = 1.15

Patterns = tuple[Pattern, ...]
TileCosts = npt.NDArray[np.float64]


def in_steps(length: int, step: int | None, tile: TileShape) -> Chunk:
    """A prompt in steps of about so many tokens, in whole row tiles; each is a batch row. None: in one."""
    rows = length if step is None else max(tile.query, step - step % tile.query)
    firsts = range(0, length, rows)
    return Chunk(tuple(firsts), tuple(min(first + rows, length) for first in firsts))


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """Queries and keys of one layer over one prompt.

    Attributes:
        chunk: the prompt, or its steps, X of them, each with its own index; a pattern's budgets are shares of the
            context then.
    """

    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    scale: float
    lines: Mapping[int, LineScores] = field(default_factory=dict)  # by last_q; others are scored when needed
    softmax: Softmax = PLAIN
    layer: int = 0

    def with_lines(self, last_q: Iterable[int]) -> CommonPrefix:
        """The same, with the lines of these samples scored once for all the indices to come."""
        options: dict[str, Any] = {"scale": self.scale, "softmax": self.softmax}
        score = partial(layer_lines, *self._steps, self.chunk, **options)
        lines = {count: score(last_q=count) for count in set(last_q)}
        return replace(self, lines=lines)

    def repeated(self, times: int) -> CommonPrefix:
        """Each head so many times, side by side, as if the layer had that many more; once is this very prefix."""
        if times == 1:
            return self
        lines = {
            last_q: LineScores(one.vertical_BhS.repeat_interleave(times, 1), one.slash_BhS.repeat_interleave(times, 1))
            for last_q, one in self.lines.items()
        }
        sinks_H = self.softmax.sinks_H
        softmax = Softmax(self.softmax.cap, None if sinks_H is None else sinks_H.repeat_interleave(times))
        return replace(self, q_BHSD=self.q_BHSD.repeat_interleave(times, 1), lines=lines, softmax=softmax)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q_BHSD.shape[1]

    @property
    def causal_tiles(self) -> int:
        """Returns what one dense head computes."""
        return self.chunk.causal_tiles(self.tile)

    def index(self, patterns: Patterns) -> TileIndex:
        """The tiles of one pattern a head, in the row tiles of each step: [X, H, T, ...]."""
        if len(self.chunk.past) > 1:
            patterns = tuple(pattern.of_context(self.chunk.longest) for pattern in patterns)
        return build_index(
            patterns,
            *self._steps,
            self.chunk,
            self.tile,
            scale=self.scale,
            lines=self.lines,
            softmax=self.softmax,
            layer=self.layer,
        )

    @property
    def _steps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [X, H, M, D] and keys [X, G, S, D] of the steps."""
        steps, rows = len(self.chunk.past), max(self.chunk.rows)
        if steps == 1:
            return self.q_BHSD, self.k_BGSD
        q_HMD = pad(self.q_BHSD[0], (0, 0, 0, steps * rows - self.q_BHSD.shape[2]))
        return q_HMD.unflatten(1, (steps, rows)).transpose(0, 1), self.k_BGSD.expand(steps, -1, -1, -1)

    def cost(self, patterns: Patterns) -> TileCosts:
        """Tiles a head computes, single columns included: [H]."""
        return np.asarray(computed_tiles(self.index(patterns)).sum(0).cpu().numpy())


def fit_to_target(
    prefix: CommonPrefix, ranges: Sequence[PatternRange], targets: Sequence[float], slack: float = 0.0
) -> Patterns:
    """The largest pattern of each head's range that costs at most the head's target.

    Bisection over the range's own grid, all heads in one index build a step. A head whose smallest pattern already
    costs more (the mandatory tiles alone may) gets that one.

    Args:
        ranges: of each head.
        targets: tiles of each head.
        slack: a pattern that costs this share less than the target is as good as the largest.

    Returns:
        One pattern a head. `max_tiles` is set from the rows it really computes here, so that other prompts can cost
        little more.
    """
    length, target_H = prefix.chunk.longest, np.asarray(targets)
    loose = [_in_tiles(ROW_ROOM * target / prefix.causal_tiles * length, prefix.tile, length) for target in targets]

    def sized(size_H: npt.NDArray[np.int64], caps: Iterable[int]) -> Patterns:
        parts = zip(ranges, size_H.tolist(), caps, strict=True)
        return tuple(one.pattern(size, cap) for one, size, cap in parts)

    fitting = np.zeros(prefix.heads, np.int64)
    beyond = np.array([one.sizes(length) for one in ranges], np.int64)
    while np.any(searching := beyond - fitting > 1):
        middle = (fitting + beyond) // 2
        cost_H = prefix.cost(sized(middle, loose))
        fits = cost_H <= target_H
        fitting = np.where(searching & fits, middle, fitting)
        beyond = np.where(searching & ~fits, middle, beyond)
        is_close = searching & fits & (cost_H >= (1.0 - slack) * target_H)
        beyond = np.where(is_close, fitting + 1, beyond)
    most_H = prefix.index(sized(fitting, loose)).counts_BHT.amax((0, 2)).tolist()
    tight = (_in_tiles(PROMPT_ROOM * most * prefix.tile.key, prefix.tile, length) for most in most_H)
    return sized(fitting, map(min, loose, tight))


def _in_tiles(count: float, tile: TileShape, length: int) -> int:
    # Three tiles are always computed: the first, the diagonal one and the one before it.
    whole = max(3, math.ceil(count / tile.key))
    return min(whole * tile.key, -(-length // tile.key) * tile.key)
