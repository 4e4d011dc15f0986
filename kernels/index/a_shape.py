"""A-shape: the first tokens and a local window (StreamingLLM's mask; MInference 1.0, section 3.1), rounded to tiles.

Static: the tiles of a row follow from its position alone, so they are listed once for each pattern and cached for the
layers to come. Shapes as in layout.py; u different patterns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.device_cache import cached_on_device, on_device
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    HeadIndex,
    IndexCall,
    IndexLayout,
    RowTiles,
    ceil_div,
    empty_tiles,
    spread,
)
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import blocks
from sparsekv.plans.patterns import AShape

# Numbers cached of one layer: 512 KB, of some 16K tokens. Up to there building waits for the host.
_MOST_CACHED = 1 << 17


def index_a_shape(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """Tiles touched by a key j <= i with j < sink or i - j < window, for any row i of the tile."""
    layout, unique = call.layout, group.unique
    caches = layout.batch * layout.row_tiles * layout.key_tiles * len(unique) <= _MOST_CACHED
    lists = (_cached_lists if caches else _list_tiles)(layout.device, unique, layout)
    if not caches and len(unique) == len(group.heads):
        return HeadIndex.of_tiles(group.heads, *lists)
    tiles_BhTW, counts_BhT = (spread(x_BuX, group.own) for x_BuX in lists)  # nobody may write to cached ones
    return HeadIndex.of_tiles(group.heads, tiles_BhTW, counts_BhT)


def _list_tiles(
    device: torch.device, patterns: tuple[AShape, ...], layout: IndexLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [B, u, T, W] and counts [B, u, T]."""
    resolved, reaches = layout.resolve([pattern.sink for pattern in patterns]), _reach(patterns, layout)
    sinks = [[max(1, ceil_div(sink, layout.tile.key)) for sink in row] for row in resolved]
    most = max(
        sink + reach + layout.diagonal_tiles(phase)
        for sink_row, reach_row, phase in zip(sinks, reaches, layout.phases, strict=True)
        for sink, reach in zip(sink_row, reach_row, strict=True)
    )
    width = layout.most_tiles(most)
    tiles_BuTW, counts_BuT = empty_tiles(layout, len(patterns), width)
    limits, rows = on_device([sinks, reaches], device), layout.locate()
    for part in blocks(layout.row_tiles, layout.batch * len(patterns) * width):
        tiles_BuTW[:, :, part], counts_BuT[:, :, part] = _list_rows(limits, rows.part(part), width)
    return tiles_BuTW, counts_BuT


_cached_lists = cached_on_device(most=64)(_list_tiles)  # every layer of a plan may have windows of its own


def _reach(patterns: Sequence[AShape], layout: IndexLayout) -> list[list[int]]:
    """Key tiles before the one of the first row that the window touches; the one before it is mandatory."""
    resolved = layout.resolve([pattern.window for pattern in patterns])
    return [
        [max(1, -((phase - window + 1) // layout.tile.key)) for window in row]
        for row, phase in zip(resolved, layout.phases, strict=True)
    ]


def _list_rows(limits_2Bu: torch.Tensor, rows: RowTiles, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two intervals of tiles: [seen, sink) and [base - reach, end], the second cut where it meets the first."""
    sink_Bu1, reach_Bu1 = limits_2Bu.unsqueeze(-1)
    base_B1T, seen_B1T, stop_B1T = rows.base_BT[:, None], rows.seen_BT[:, None], rows.end_BT[:, None] + 1
    sink_BuT = torch.minimum(sink_Bu1, stop_B1T)
    start_BuT = torch.minimum(seen_B1T, sink_BuT)
    local_BuT = torch.maximum(torch.maximum(base_B1T - reach_Bu1, seen_B1T), sink_BuT)
    first_BuT = sink_BuT - start_BuT
    counts_BuT = first_BuT + (stop_B1T - local_BuT).clamp(min=0)
    slot_W = torch.arange(width, device=base_B1T.device)
    shift_BuT1 = (local_BuT - first_BuT).unsqueeze(-1)
    listed_BuTW = slot_W + torch.where(slot_W < first_BuT.unsqueeze(-1), start_BuT.unsqueeze(-1), shift_BuT1)
    return listed_BuTW.masked_fill_(slot_W >= counts_BuT.unsqueeze(-1), NO_TILE), counts_BuT
