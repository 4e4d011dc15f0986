"""What is planted for the heads that share a KV head: drawn on the host, small, the same whatever the device.

Shapes: C columns, M key tiles, T row tiles, Z clusters a row tile looks at, F frequencies, X dimensions of a tile code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.planner.bench.codes import Layout, slash_waves, tile_codes
from sparsekv.planner.bench.sizes import SINK, BenchFamily, HeadSizes, planted_diagonals
from sparsekv.planner.profile.search_space import last_q_for
from sparsekv.plans.patterns import TileShape

_MARGIN = 3.0  # log of the planted diagonals' mass over that of all other keys
_RUN_JITTER = 0.04  # of the prompt, by which heads differ
_LIFETIMES = 4  # of an a_shape's window: what lies beyond it holds exp(-4) of the mass


@dataclass(frozen=True, slots=True)
class HeadTruth:
    """What was planted for one query head, on the host. What its family does not have is empty."""

    family: BenchFamily
    window: int  # tokens of the local band
    runs: tuple[tuple[int, int], ...]  # diagonals [first, stop)
    columns_C: torch.Tensor  # int64, ascending
    cluster_M: torch.Tensor  # int64: of each key tile
    looks_at_TZ: torch.Tensor  # int64: clusters whose key tiles are hot for a row tile


@dataclass(frozen=True, slots=True)
class Group:
    """The structure of the heads that share a KV head, and the codes that say it."""

    heads: tuple[HeadTruth, ...]
    sizes: tuple[HeadSizes, ...]
    peak: float  # logit of a diagonal in the middle of its run
    column_peak: float  # logit of a column
    frequencies_F: torch.Tensor  # empty without vertical-slash heads
    weights_F: torch.Tensor
    codes_MX: torch.Tensor  # by cluster; empty without tile heads
    cluster_M: torch.Tensor

    @property
    def lifetime(self) -> float:
        """Tokens over which an a_shape's attention fades by a factor e."""
        return max([size.window for size in self.sizes] + [1]) / _LIFETIMES


def draw_group(
    sizes: Sequence[HeadSizes], length: int, tile: TileShape, layout: Layout, random: torch.Generator
) -> Group:
    """The structure of a group's heads.

    Args:
        sizes: of each head; those of one family are alike.
        length: tokens of the prompt.
        random: on the host.
    """
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    clusters = max(size.clusters for size in sizes)
    cluster_M = _deal(clusters, -(-length // tile.key), random) if clusters else none
    columns = {
        n: _draw_columns(next(size.columns for size in sizes if size.columns), length, random)
        for n in range(layout.column_codes)
        if any(size.columns for size in sizes)
    }
    width = max(size.run for size in sizes)
    peak = _slash_peak(max(sizes, key=lambda size: size.run), length)
    waves = slash_waves(layout.frequencies, length, width, peak) if width else (empty, empty)
    return Group(
        tuple(_draw_head(n, size, columns, cluster_M, clusters, length, tile, random) for n, size in enumerate(sizes)),
        tuple(sizes),
        peak,
        peak + _column_lead(width, length),
        *waves,
        tile_codes(clusters, layout.tile_code, random) if clusters else empty,
        cluster_M,
    )


def _slash_peak(size: HeadSizes, length: int) -> float:
    """The logit with which the runs outweigh all other keys."""
    return math.log(length / max(1, planted_diagonals(size))) + _MARGIN


def _column_lead(width: int, length: int) -> float:
    """How much a column's logit is above a diagonal's: or columns drown among the keys that wide runs cross."""
    return min(1.0, max(0.0, 1 + math.log(max(1, width) / last_q_for(length))))


def _draw_head(
    number: int,
    size: HeadSizes,
    columns: dict[int, torch.Tensor],
    cluster_M: torch.Tensor,
    clusters: int,
    length: int,
    tile: TileShape,
    random: torch.Generator,
) -> HeadTruth:
    none = torch.empty(0, dtype=torch.int64)
    looks_at_TZ = none.reshape(0, 0)
    if size.clusters:
        rows, chosen = -(-length // tile.query), max(1, round(clusters / size.clusters))
        looks_at_TZ = torch.rand(rows, clusters, generator=random).topk(chosen, dim=1).indices
    return HeadTruth(
        size.family,
        size.window,
        _draw_runs(size, length, random),
        columns[number % len(columns)] if size.columns else none,
        cluster_M if size.clusters else none,
        looks_at_TZ,
    )


def _draw_runs(size: HeadSizes, length: int, random: torch.Generator) -> tuple[tuple[int, int], ...]:
    if not size.run:
        return ()
    half = size.run // 2
    middles = []
    for place in size.runs:
        moved = place + _RUN_JITTER * (2 * float(torch.rand(1, generator=random)) - 1)
        middles.append(max(size.run, round(moved * length)))
    return tuple((middle - half, middle - half + size.run) for middle in middles)


def _draw_columns(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Beyond the sinks, and early enough that some rows see them."""
    drawn = torch.randperm(length - length // 16 - SINK, generator=random)[:count]
    return drawn.add_(SINK).sort().values


def _deal(clusters: int, tiles: int, random: torch.Generator) -> torch.Tensor:
    """A cluster for each key tile, each once among as many neighbours as there are clusters: [M]."""
    rounds = -(-tiles // clusters)
    return torch.rand(rounds, clusters, generator=random).argsort(dim=1).flatten()[:tiles]
