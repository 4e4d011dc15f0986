"""Putting the heads of several patterns together into one index.

Shapes as in call.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.index.bits import WORD
from sparsekv.kernels.index.call import HeadIndex, IndexCall, IndexWidths, ceil_div
from sparsekv.kernels.kept import kept_on_device, on_device
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, TileIndex


def widths_of(index: HeadIndex) -> IndexWidths:
    """How wide it is."""
    return IndexWidths(index.tiles_BhTW.shape[3], index.columns_BhC.shape[2])


def index_of(only: HeadIndex, call: IndexCall, dense: tuple[int, ...]) -> TileIndex:
    """Heads of a single kind: nothing to move."""
    return TileIndex(
        tile=call.tile,
        tiles_BHTW=only.tiles_BhTW.contiguous(),
        counts_BHT=only.counts_BhT.contiguous(),
        columns_BHC=only.columns_BhC.contiguous(),
        live_BHTN=only.live_BhTN.contiguous(),
        dense_H=_mark_dense(call.device, dense, call.heads),
        dense_heads=dense,
    )


def room_for(widths: Sequence[IndexWidths], call: IndexCall, dense: tuple[int, ...]) -> TileIndex:
    """An index of the whole layer, as wide as the widest part; blank where parts may be narrower than their rows."""
    blank = len(widths) > 1
    columns = max(one.columns for one in widths)
    rows = (call.batch, call.q_BHSD.shape[1], call.row_tiles)

    def room(padding: int, *shape: int) -> torch.Tensor:
        if blank:
            return torch.full(shape, padding, dtype=torch.int32, device=call.device)
        return torch.empty(shape, dtype=torch.int32, device=call.device)

    return TileIndex(
        tile=call.tile,
        tiles_BHTW=room(NO_TILE, *rows, max(one.tiles for one in widths)),
        counts_BHT=room(0, *rows),
        columns_BHC=room(NO_COLUMN, *rows[:2], columns),
        live_BHTN=room(0, *rows, ceil_div(columns, WORD)),
        dense_H=_mark_dense(call.device, dense, call.heads),
        dense_heads=dense,
    )


@kept_on_device(most=64)
def _mark_dense(device: torch.device, dense: tuple[int, ...], heads: int) -> torch.Tensor:
    return on_device([head in dense for head in range(heads)], device, torch.bool)


def place(part: HeadIndex, heads: tuple[int, ...], into: TileIndex) -> None:
    """Puts the heads of a part in their places; evenly spaced ones without a list of them, which copies faster."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = heads == tuple(range(heads[0], heads[-1] + 1, step))
    own = slice(heads[0], heads[-1] + 1, step) if even else on_device(heads, into.tiles_BHTW.device)
    into.counts_BHT[:, own] = part.counts_BhT
    for whole, piece in (
        (into.tiles_BHTW, part.tiles_BhTW),
        (into.columns_BHC, part.columns_BhC),
        (into.live_BHTN, part.live_BhTN),
    ):
        if piece.shape[-1]:
            whole[:, own, ..., : piece.shape[-1]] = piece
