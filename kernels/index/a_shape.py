"""A-shape: the first tokens and a local window (StreamingLLM's mask; MInference 1.0, section 3.1), rounded to tiles.

Static: the tiles of a row follow from its place alone, so they are listed once for each pattern, and kept for the
layers to come. Shapes as in call.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.device_cache import kept_on_device, on_device
from sparsekv.kernels.index.layout import (
    HeadIndex,
    IndexCall,
    Layout,
    RowTiles,
    ceil_div,
    empty_tiles,
    spread,
    without_columns,
)
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import blocks
from sparsekv.plans.patterns import AShape

# Numbers in what is kept of one layer: 512 KB, of some 16K tokens. Up to there building waits for the host.
_MOST_KEPT = 1 << 17


def index_a_shape(patterns: Sequence[AShape], heads: Sequence[int], call: IndexCall, rows: RowTiles) -> HeadIndex:
    """Tiles touched by a key j <= i with j < sink or i - j < window, for any row i of the tile."""
    distinct = {id(pattern): pattern for pattern in patterns}
    own = tuple(distinct.values())
    keeps = call.batch * call.row_tiles * call.key_tiles * len(own) <= _MOST_KEPT
    index = (_kept if keeps else _build)(call.device, own, call.layout)
    if not keeps and len(own) == len(patterns):
        return index
    places = {name: place for place, name in enumerate(distinct)}
    return spread(index, [places[id(pattern)] for pattern in patterns])


def _build(device: torch.device, patterns: tuple[AShape, ...], layout: Layout) -> HeadIndex:
    sinks, reaches = _sink_tiles(patterns, layout), _reach(patterns, layout)
    width = layout.most_tiles(_most_tiles(sinks, reaches, layout))
    tiles_BhTW, counts_BhT = empty_tiles(layout, len(patterns), width)
    limits, rows = on_device([sinks, reaches], device), layout.locate()
    for part in blocks(layout.row_tiles, layout.batch * len(patterns) * width):
        listed, counts = _list_rows(limits, rows.part(part), width)
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = listed, counts
    return without_columns(layout, tiles_BhTW, counts_BhT)


_kept = kept_on_device(most=64)(_build)  # every layer of a plan may have windows of its own


def _sink_tiles(patterns: Sequence[AShape], call: Layout) -> list[list[int]]:
    """The first key tile is mandatory."""
    resolved = call.resolve([pattern.sink for pattern in patterns])
    return [[max(1, ceil_div(sink, call.tile.key)) for sink in row] for row in resolved]


def _reach(patterns: Sequence[AShape], call: Layout) -> list[list[int]]:
    """Key tiles before the one of the first row that the window touches; the one before it is mandatory."""
    resolved = call.resolve([pattern.window for pattern in patterns])
    return [
        [max(1, -((phase - window + 1) // call.tile.key)) for window in row]
        for row, phase in zip(resolved, call.phases, strict=True)
    ]


def _most_tiles(sinks: list[list[int]], reaches: list[list[int]], call: Layout) -> int:
    return max(
        sink + reach + call.diagonal_tiles(phase)
        for sink_row, reach_row, phase in zip(sinks, reaches, call.phases, strict=True)
        for sink, reach in zip(sink_row, reach_row, strict=True)
    )


def _list_rows(limits_2Bh: torch.Tensor, rows: RowTiles, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two runs of tiles: [seen, sink) and [base - reach, end], the second cut where it meets the first."""
    sink_Bh1, reach_Bh1 = limits_2Bh.unsqueeze(-1)
    base_B1T, seen_B1T, stop_B1T = rows.base_BT[:, None], rows.seen_BT[:, None], rows.end_BT[:, None] + 1
    sink_BhT = torch.minimum(sink_Bh1, stop_B1T)
    start_BhT = torch.minimum(seen_B1T, sink_BhT)
    local_BhT = torch.maximum(torch.maximum(base_B1T - reach_Bh1, seen_B1T), sink_BhT)
    first_BhT = sink_BhT - start_BhT
    counts_BhT = first_BhT + (stop_B1T - local_BhT).clamp(min=0)
    slot_W = torch.arange(width, device=base_B1T.device)
    shift_BhT1 = (local_BhT - first_BhT).unsqueeze(-1)
    listed_BhTW = slot_W + torch.where(slot_W < first_BhT.unsqueeze(-1), start_BhT.unsqueeze(-1), shift_BhT1)
    return listed_BhTW.masked_fill_(slot_W >= counts_BhT.unsqueeze(-1), NO_TILE), counts_BhT
