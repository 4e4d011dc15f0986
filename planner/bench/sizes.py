"""How much of each structure comes to a stated density, and the pattern whose budgets fit what is planted.

A head of N key tiles computes (N + 1) / 2 tiles a row on average when it is dense. Every pattern computes the first
tile, the diagonal one and the one before it, so that short prompts cannot be sparse: the bench prints what they come
to.

Symbols: N key tiles of the prompt, K tiles of a full row, B average tiles of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sparsekv.planner.search.space import last_q_for
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Budget, Pattern, TileShape, VerticalSlash, tokens

BenchFamily = Literal["vertical_slash", "a_shape", "block_sparse", "adaptive"]
FAMILIES: tuple[BenchFamily, ...] = get_args(BenchFamily)

SINK = 4  # tokens that every head looks at
_MANDATORY = 3  # tiles of a row
_COLUMN_SHARE = 0.2  # of the computed tiles of a vertical-slash head
# Diagonals of the middles of runs, as shares of the prompt; heads move them a little.
_TWO_RUNS = (0.15, 0.45)
_ONE_RUN = (0.1, 0.7)  # at least and at most: the farther back, the fewer rows see it
_ADAPTIVE_MASS = 0.97
_ROOM = 1.15  # of `max_tiles` over the fullest row that is planted


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """One head of a family at a density. What a family does not have is 0 or empty."""

    family: BenchFamily
    window: int = 0  # tokens of the local band of an a_shape
    run: int = 0  # diagonals in a run
    runs: tuple[float, ...] = ()  # the diagonal in the middle of each, as a share of the prompt
    columns: int = 0
    clusters: int = 0  # one key tile in so many is hot for a row tile


def sizes_for(family: BenchFamily, length: int, density: float, tile: TileShape, narrowest: int = 1) -> HeadSizes:
    """What to plant in a head so that the pattern of `pattern_for` computes about `density` of the tiles.

    Args:
        family: a pattern by name.
        length: tokens of the prompt.
        density: computed tiles over causal tiles.
        tile: the plan's tile shape.
        narrowest: diagonals of the narrowest run that can be planted.
    """
    if family == "vertical_slash":
        return _vertical_slash(length, density, tile, narrowest)
    if family == "a_shape":
        return HeadSizes("a_shape", window=(_row_tiles(length, density, tile) - 2) * tile.key)
    if family == "block_sparse":
        hot = _kept_tiles(length, density, tile) - _MANDATORY
        return HeadSizes("block_sparse", clusters=max(2, math.ceil(_tiles(length, tile) / hot)))
    share = density - 2 * _MANDATORY / _tiles(length, tile)
    return HeadSizes("adaptive", clusters=max(2, min(_tiles(length, tile), round(1 / max(share, 1e-9)))))


def pattern_for(sizes: HeadSizes, length: int, density: float, tile: TileShape) -> Pattern:
    """The pattern with budgets for what was planted."""
    if sizes.family == "a_shape":
        return AShape(sink=tokens(SINK), window=tokens(sizes.window + 1))
    if sizes.family == "block_sparse":
        return BlockSparse(keep=tokens(_kept_tiles(length, density, tile) * tile.key))
    if sizes.family == "adaptive":
        most = _tiles(length, tile) / sizes.clusters + _MANDATORY + 1
        return Adaptive(mass=_ADAPTIVE_MASS, max_tiles=_whole_tiles(_ROOM * most, tile))
    last_q = last_q_for(length)
    # The sinks are columns too, and each sampled query sees them on a far diagonal of its own.
    most = len(sizes.runs) * _run_tiles(sizes.run, tile) + _MANDATORY
    return VerticalSlash(
        vertical=tokens(sizes.columns + SINK),
        slash=tokens(planted_diagonals(sizes) + last_q + SINK),
        last_q=last_q,
        max_tiles=_whole_tiles(_ROOM * most, tile),
    )


def diffuse_pattern(family: BenchFamily, length: int, density: float, tile: TileShape) -> Pattern:
    """A pattern of that density where attention is diffuse: diagonals are then scattered, and `max_tiles` binds.

    Raises:
        UsageError: a family whose density the attention decides.
    """
    if family == "vertical_slash":
        # A row sees the lines that begin before it: beside the tiles that all rows have, late rows compute more.
        seen_last = max(2.0, density * _tiles(length, tile) - 2 * _MANDATORY)
        columns = min(length // 4, round(_COLUMN_SHARE * seen_last * tile.key / (1.01 - density)))  # some lie in tiles
        bound = _whole_tiles((1 - _COLUMN_SHARE) * seen_last + _MANDATORY, tile)
        return VerticalSlash(vertical=tokens(columns), slash=bound, last_q=last_q_for(length), max_tiles=bound)
    if family == "adaptive":
        raise UsageError("expected patterns whose budgets fix their density, found 'adaptive'; leave it out")
    return pattern_for(sizes_for(family, length, density, tile), length, density, tile)


def planted_diagonals(sizes: HeadSizes) -> int:
    """Diagonals of all runs."""
    return sizes.run * len(sizes.runs)


def _vertical_slash(length: int, density: float, tile: TileShape, narrowest: int) -> HeadSizes:
    """Solves B = 3 + columns + (tiles of a run) * (rows that see it): for the width of two runs, or one run's place."""
    average = density * (_tiles(length, tile) + 1) / 2
    left = (1 - _COLUMN_SHARE) * average - _MANDATORY
    columns = max(4, min(round(2 * _COLUMN_SHARE * average * tile.key), length // 16))
    width = round((left / sum(1 - place for place in _TWO_RUNS) - 2) * tile.key)
    if width >= narrowest:
        return HeadSizes("vertical_slash", run=width, runs=_TWO_RUNS, columns=columns)
    place = 1 - left / _run_tiles(narrowest, tile)
    least, most = _ONE_RUN
    if place < least:
        return HeadSizes(
            "vertical_slash", run=round((left / (1 - least) - 2) * tile.key), runs=(least,), columns=columns
        )
    return HeadSizes("vertical_slash", run=narrowest, runs=(min(place, most),), columns=columns)


def _run_tiles(width: int, tile: TileShape) -> float:
    """Tiles of a row that a run of diagonals crosses."""
    return width / tile.key + 2


def _tiles(length: int, tile: TileShape) -> int:
    return -(-length // tile.key)


def _row_tiles(length: int, density: float, tile: TileShape) -> int:
    """K such that rows of at most K tiles come to the density: early rows have fewer tiles to compute."""
    tiles = _tiles(length, tile)
    return min(tiles, max(_MANDATORY, round(tiles * (1 - math.sqrt(1 - density)))))


def _kept_tiles(length: int, density: float, tile: TileShape) -> int:
    """Tiles a row of a block_sparse head: room for one hot tile at least."""
    return max(_MANDATORY + 1, _row_tiles(length, density, tile))


def _whole_tiles(count: float, tile: TileShape) -> Budget:
    return tokens(math.ceil(count) * tile.key)
