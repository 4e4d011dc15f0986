"""Target densities: the default at a length, and the least that leaves room for the tiles every pattern computes.

Every pattern computes the diagonal tile, the one before it, and the first key tile (design, section 4). At 1K tokens
that is most of the triangle, at 128K next to nothing; it follows from lengths and tiles alone, so that a density
without room for them is refused before anything runs (`check_targets`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.options import Family
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS, TileShape

# Densities are rounded; one that is the target but for rounding is the target.
ROUNDING = 1e-4
# Density by length, between which density_for interpolates in log length. Attention grows sparser with length.
_DENSITIES = ((1024, 0.80), (4096, 0.44), (16384, 0.29), (32768, 0.21), (131072, 0.12), (1048576, 0.06))


def density_for(length: int) -> float:
    """The default target density at a length: interpolated in log length, flat outside the known range."""
    lengths, densities = np.log(_DENSITIES).T
    return round(math.exp(np.interp(math.log(length), lengths, densities)), 4)


def mandatory_density(length: int, tile: TileShape, family: Family) -> float:
    """The least share of the causal tiles of a prompt of `length` tokens that a head of a family computes."""
    least, starts = PATTERNS[family].least_tiles, range(0, length, tile.query)
    rows = (least(first, min(first + tile.query, length) - 1, tile) for first in starts)
    return sum(rows) / Chunk.uniform(1, 0, length).causal_tiles(tile)


def check_targets(
    prompts: Mapping[int, Sequence[int]], targets: Sequence[float], tile: TileShape, families: Collection[Family]
) -> None:
    """Refuses a target density that no pattern of these families can reach.

    Args:
        prompts: for each length to be planned, ascending, how many tokens its prompts have.
        targets: the target density of each length; empty where there is none.

    Raises:
        UsageError: naming the length, and the least density there.
    """
    if not targets:
        return
    for (length, tokens), target in zip(prompts.items(), targets, strict=True):
        means = [sum(mandatory_density(n, tile, family) for n in tokens) / len(tokens) for family in families]
        if min(means) > target * (1.0 + ROUNDING):
            raise too_low(target, length, min(means))


def too_low(target: float, length: int, least: float) -> UsageError:
    """The error for a target density below what mandatory tiles alone take, `least`."""
    share = math.ceil(least * 1e3) / 1e3
    return UsageError(
        f"expected a target density that leaves room for the tiles every pattern computes (the first, the diagonal, "
        f"the one before), found {target:g} at {length} tokens, where they take up to {share:g}; raise it, or plan "
        "longer contexts or smaller tiles"
    )
