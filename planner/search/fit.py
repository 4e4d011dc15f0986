"""Bringing a family of patterns to a target cost, by the tiles it really computes on given queries and keys.

Shapes: B batch (always 1 here), H query heads, G KV heads, S queries, D head size, T query tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.index.build import build_index, layer_lines
from sparsekv.kernels.index.layout import LineScores
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles
from sparsekv.planner.search.space import Ray
from sparsekv.plans.patterns import Pattern, TileShape

# Rows near the end of a prompt cross more of a head's diagonals than the average row does.
ROW_ROOM = 1.25
# What a pattern may spend in a row of another prompt, over the most it spent in one of the calibration prompt.
PROMPT_ROOM = 1.15

Patterns = tuple[Pattern, ...]
Cost = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Queries and keys of one layer over one prompt, and where they lie."""

    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    scale: float
    window: int | None = None  # the layer's own sliding window
    lines: Mapping[int, LineScores] = field(default_factory=dict)  # by last_q; others are scored when needed

    def with_lines(self, last_q: Iterable[int]) -> Prefix:
        """The same, with the lines of these samples scored once for all the indices to come."""
        lines = {
            count: layer_lines(self.q_BHSD, self.k_BGSD, self.chunk, last_q=count, scale=self.scale, window=self.window)
            for count in set(last_q)
        }
        return replace(self, lines=lines)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q_BHSD.shape[1]

    @property
    def causal_tiles(self) -> int:
        """What one dense head computes."""
        return self.chunk.causal_tiles(self.tile)

    def index(self, patterns: Patterns) -> TileIndex:
        """The tiles of one pattern a head."""
        return build_index(
            patterns,
            self.q_BHSD,
            self.k_BGSD,
            self.chunk,
            self.tile,
            scale=self.scale,
            window=self.window,
            lines=self.lines,
        )

    def cost(self, patterns: Patterns) -> Cost:
        """Tiles a head computes, single columns included: [H]."""
        return np.asarray(computed_tiles(self.index(patterns))[0].double().cpu().numpy())


def fit_to_target(prefix: Prefix, ray: Ray, target: float) -> Patterns:
    """The largest pattern of a ray that costs at most `target` tiles, for each head.

    Bisection over the ray's own grid, all heads in one index build a step. A head whose smallest pattern already
    costs more (the mandatory tiles alone may) gets that one.

    Args:
        prefix: the layer's queries and keys.
        ray: the family.
        target: tiles a head.

    Returns:
        One pattern a head. `max_tiles` is set from the rows it really computes here, so that other prompts can cost
        little more.
    """
    length = prefix.chunk.longest
    loose = _in_tiles(ROW_ROOM * target / prefix.causal_tiles * length, prefix.tile, length)
    fitting = np.zeros(prefix.heads, np.int64)
    beyond = np.full(prefix.heads, ray.sizes(length), np.int64)
    while np.any(beyond - fitting > 1):
        middle = (fitting + beyond) // 2
        fits = prefix.cost(tuple(ray.pattern(int(size), loose) for size in middle)) <= target
        fitting = np.where(fits, middle, fitting)
        beyond = np.where(fits | (beyond - fitting <= 1), beyond, middle)
    fitted = tuple(ray.pattern(int(size), loose) for size in fitting)
    most_H = prefix.index(fitted).counts_BHT[0].amax(-1).tolist()
    caps = (min(loose, _in_tiles(PROMPT_ROOM * most * prefix.tile.key, prefix.tile, length)) for most in most_H)
    return tuple(ray.pattern(int(size), cap) for size, cap in zip(fitting, caps, strict=True))


def _in_tiles(count: float, tile: TileShape, length: int) -> int:
    # Three tiles are always computed: the first, the diagonal one and the one before it.
    whole = max(3, math.ceil(count / tile.key))
    return min(whole * tile.key, -(-length // tile.key) * tile.key)
