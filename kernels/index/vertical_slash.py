"""Vertical-slash: the heaviest columns and diagonals of a head (MInference 1.0, section 3.2, algorithm 2).

Slashes select tiles, and as every row has the same ones counted back from its own place, the lists are arithmetic. A
row tile counts as whole for this, also the ragged last one: what it crosses is rounded outward.
Columns outside a row's tiles are computed singly: their live bits.

Shapes as in call.py; R row tiles of one block, M chosen tile diagonals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.index.bits import WORD, pack_bits
from sparsekv.kernels.index.call import (
    HeadIndex,
    IndexCall,
    RowTiles,
    ceil_div,
    empty_tiles,
    floor_div,
    take_heads,
)
from sparsekv.kernels.index.diagonals import TileDiagonals, choose_diagonals
from sparsekv.kernels.index.line_scores import LineScores
from sparsekv.kernels.index.lines import UNSEEN, score_lines
from sparsekv.kernels.kept import on_device
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE
from sparsekv.kernels.topk import blocks, top_ascending
from sparsekv.plans.patterns import VerticalSlash


def index_vertical_slash(
    patterns: Sequence[VerticalSlash], heads: Sequence[int], call: IndexCall, rows: RowTiles
) -> HeadIndex:
    """Tiles of the best slashes within `max_tiles`, and the best columns outside them."""
    lines = _lines(patterns, heads, call)
    diagonals, bound = _choose_slashes(patterns, lines, call)
    columns_BhC = _choose_columns(patterns, lines, call)
    tiles_BhTW, counts_BhT = empty_tiles(call, len(heads), call.most_tiles(bound))
    words = ceil_div(columns_BhC.shape[-1], WORD)
    live_BhTN = torch.zeros((*counts_BhT.shape, words), dtype=torch.int32, device=call.device)
    for part in blocks(call.row_tiles, call.batch * len(heads) * max(tiles_BhTW.shape[-1], words * WORD)):
        listed, counts = _list_rows(diagonals, rows.part(part), tiles_BhTW.shape[-1])
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = listed, counts
        live_BhTN[:, :, part] = pack_bits(_live_columns(columns_BhC, diagonals, rows.part(part), call))
    return HeadIndex(tiles_BhTW, counts_BhT, columns_BhC, live_BhTN)


def _lines(patterns: Sequence[VerticalSlash], heads: Sequence[int], call: IndexCall) -> LineScores:
    last_q = [pattern.last_q for pattern in patterns]
    known = call.lines.get(last_q[0]) if call.lines and len(set(last_q)) == 1 else None
    if known is None:
        return score_lines(heads, last_q, call)
    return LineScores(take_heads(known.vertical_BhS, heads), take_heads(known.slash_BhS, heads))


def _choose_columns(patterns: Sequence[VerticalSlash], lines: LineScores, call: IndexCall) -> torch.Tensor:
    counts = call.resolve([pattern.vertical for pattern in patterns])
    return top_ascending(lines.vertical_BhS, on_device(counts, call.device), _largest(counts), NO_COLUMN)


def _choose_slashes(patterns: Sequence[VerticalSlash], lines: LineScores, call: IndexCall) -> tuple[TileDiagonals, int]:
    """The tile diagonals, and the most tiles a row can have."""
    counts = call.resolve([pattern.slash for pattern in patterns])
    bounds = call.tile_bounds([pattern.max_tiles for pattern in patterns])
    offsets_BhO = top_ascending(lines.slash_BhS, on_device(counts, call.device), _largest(counts), -1).long()
    scores_BhO = lines.slash_BhS.gather(-1, offsets_BhO.clamp(min=0)).masked_fill_(offsets_BhO < 0, UNSEEN)
    crossed = call.tile.query // call.tile.key + 1
    bound = min(_largest(bounds), crossed * _largest(counts) + max(map(call.mandatory_tiles, call.phases)))
    return choose_diagonals(offsets_BhO, scores_BhO, bounds, bound, call), bound


def _largest(numbers: list[list[int]]) -> int:
    return max(max(row) for row in numbers)


def _list_rows(diagonals: TileDiagonals, rows: RowTiles, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen diagonals between the first seen tile and the last, after key tile 0."""
    heads = diagonals.chosen_BhE.shape[1]
    base_BhR, end_BhR, seen_BhR = (x[:, None].expand(-1, heads, -1) for x in (rows.base_BT, rows.end_BT, rows.seen_BT))
    within_BhR = diagonals.count_within(base_BhR - seen_BhR)
    right_of_BhR = diagonals.count_within(base_BhR - end_BhR - 1)
    sink_BhR = (seen_BhR == 0) & (end_BhR >= 0) & ~diagonals.has(base_BhR)
    counts_BhR = (within_BhR - right_of_BhR).clamp_(min=0) + sink_BhR
    slot_W = torch.arange(width, device=base_BhR.device)
    skipped_BhR = diagonals.chosen_BhE.sum(-1, keepdim=True) - within_BhR - sink_BhR.long()
    entry_BhRW = (skipped_BhR.unsqueeze(-1) + slot_W).clamp_(0, diagonals.far_first_BhM.shape[-1] - 1)
    distance_BhRW = diagonals.far_first_BhM.gather(-1, entry_BhRW.flatten(2)).view_as(entry_BhRW)
    tiles_BhRW = base_BhR.unsqueeze(-1) - distance_BhRW
    tiles_BhRW.masked_fill_(sink_BhR.unsqueeze(-1) & (slot_W == 0), 0)
    return tiles_BhRW.masked_fill_(slot_W >= counts_BhR.unsqueeze(-1), NO_TILE), counts_BhR


def _live_columns(columns_BhC: torch.Tensor, diagonals: TileDiagonals, rows: RowTiles, call: IndexCall) -> torch.Tensor:
    """Columns that a row tile sees and has in none of its tiles: bool [B, h, R, C]."""
    column_Bh1C = columns_BhC.long()[:, :, None]
    tile_Bh1C = floor_div(column_Bh1C, call.tile.key)
    first_B1R1, last_B1R1, base_B1R1 = (x[:, None, :, None] for x in (rows.first_BT, rows.last_BT, rows.base_BT))
    distance_BhRC = base_B1R1 - tile_Bh1C
    in_tiles_BhRC = diagonals.has(distance_BhRC.flatten(2)).view_as(distance_BhRC) | (tile_Bh1C == 0)
    live_BhRC = (column_Bh1C >= 0) & (column_Bh1C <= last_B1R1) & ~in_tiles_BhRC
    return live_BhRC if call.window is None else live_BhRC & (first_B1R1 - column_Bh1C < call.window)
