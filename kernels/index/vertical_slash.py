"""Vertical-slash: the heaviest columns and diagonals of a head (MInference 1.0, section 3.2, algorithm 2).

How much attention each column and each diagonal gets is estimated from the last queries of each batch row: softmax in
float32 over all keys they may see.

Slashes select tiles, within the tiles that a row may have. Row tiles are whole multiples of key tiles, so a slash
crosses the same tiles, counted back from the row's own, in every row: the choice is made once a head, and the lists are
arithmetic. Distance d of a tile is the key tile of the row's first token, less the tile. A row tile counts as whole for
this, also the ragged last one: what it crosses is rounded outward. Columns outside a row's tiles are computed singly:
their live bits.

Shapes as in layout.py; R row tiles of one block, M chosen tile diagonals, O chosen slashes, X tiles a slash crosses,
E distances, shifted so that entry 0 is the tile farthest to the right. Of the scores: N heads of one KV head, L sampled
queries, S keys, P = S + L - 1 (keys behind L - 1 empty ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from sparsekv.kernels.cpu_threads import for_each
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    HeadIndex,
    IndexCall,
    IndexLayout,
    LineScores,
    RowTiles,
    ceil_div,
    empty_tiles,
    floor_div,
    largest,
    take_heads,
)
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, WORD, pack_bits
from sparsekv.kernels.topk import BLOCK_ELEMENTS, ascending, blocks, top_ascending

# Sampled rows, and elements of their scores, that are worked on at once; where it is not a GPU's whole memory that
# limits them, but the reach of a core's cache.
_AT_ONCE = {"cpu": (64, 1 << 20)}
UNSEEN = -1.0  # score of a line that no query of the batch row can reach; a real one has 0 or more


@dataclass(frozen=True, slots=True)
class _Sample:
    """The sampled queries: row l of batch row b is token last[b] - (L - 1 - l)."""

    q_BHLD: torch.Tensor
    positions_BL: torch.Tensor
    used_BhL: torch.Tensor | None  # False for rows beyond a head's own sample or before the chunk; None if all count

    @property
    def rows(self) -> int:
        """L."""
        return self.positions_BL.shape[1]


def score_lines(heads: Sequence[int], last_q: Sequence[int], call: IndexCall) -> LineScores:
    """Scores of the columns and diagonals of these heads.

    Args:
        heads: query heads, ascending.
        last_q: how many of the last queries each of them samples, as `Chunk.sampled` has it.
    """
    layout, keys, sample = call.layout, call.layout.chunk.longest, _take_sample(last_q, call)
    vertical_BhS = torch.empty((layout.batch, len(heads), keys), dtype=torch.float32, device=layout.device)
    shifted_BhS = torch.empty_like(vertical_BhS)
    rows, elements = _AT_ONCE.get(layout.device.type, (sample.rows, BLOCK_ELEMENTS))
    rows = min(rows, sample.rows)
    by_kv_head = [list(own) for _, own in groupby(range(len(heads)), lambda number: heads[number] // layout.group_size)]
    elements_each = layout.batch * rows * (keys + sample.rows - 1)
    parts = [own[part] for own in by_kv_head for part in blocks(len(own), elements_each, elements)]

    def fill(part: list[int]) -> None:
        into = on_device(part, layout.device)
        vertical_BhS[:, into], shifted_BhS[:, into] = _sum_lines(part, heads, sample, call, rows)

    if layout.device.type == "cpu":
        for_each(fill, parts)
    else:
        for part in parts:
            fill(part)
    return _by_offset(vertical_BhS, shifted_BhS, layout)


def _take_sample(last_q: Sequence[int], call: IndexCall) -> _Sample:
    chunk, device = call.layout.chunk, call.layout.device
    limits = list(zip(*(chunk.sampled(own) for own in last_q), strict=True))
    most = max(1, max(map(max, limits)))
    back_L = torch.arange(most - 1, -1, -1, device=device)
    past_B1, length_B1 = on_device([chunk.past, chunk.lengths], device).unsqueeze(-1)
    positions_BL = length_B1 - 1 - back_L
    rows_BL = (positions_BL - past_B1).clamp(min=0)
    q_BHLD = call.q_BHSD.gather(2, rows_BL[:, None, :, None].expand(-1, call.q_BHSD.shape[1], -1, call.q_BHSD.shape[3]))
    every = all(limit == most for row in limits for limit in row)
    used_BhL = None if every else back_L < on_device(limits, device).unsqueeze(-1)
    return _Sample(q_BHLD, positions_BL, used_BhL)


def _sum_lines(
    part: list[int], heads: Sequence[int], sample: _Sample, call: IndexCall, most_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and shifted diagonals of heads of one KV head, summed over the sample: [B, h, S] each."""
    q_BhLD = take_heads(sample.q_BHLD, [heads[number] for number in part])
    k_BSD = call.k_BGKD[:, heads[part[0]] // call.layout.group_size, : call.layout.chunk.longest]
    k_B1PD = torch.nn.functional.pad(k_BSD[:, None], (0, 0, sample.rows - 1, 0))
    used_BhL = None if sample.used_BhL is None else take_heads(sample.used_BhL, part)
    vertical, shifted = [], []
    for rows in blocks(sample.rows, 1, most_rows):
        weights_BhRP = _weights(q_BhLD[:, :, rows], k_B1PD, rows, sample, call)
        if used_BhL is not None:
            weights_BhRP.masked_fill_(~used_BhL[:, :, rows].unsqueeze(-1), 0.0)
        vertical.append(weights_BhRP[..., sample.rows - 1 :].sum(-2))
        shifted.append(_sum_diagonals(weights_BhRP, rows.start, call.layout.chunk.longest))
    return _total(vertical), _total(shifted)


def _weights(q_BhRD: torch.Tensor, k_B1PD: torch.Tensor, rows: slice, sample: _Sample, call: IndexCall) -> torch.Tensor:
    """Softmax of some sampled queries, with L - 1 empty keys in front: [B, heads of the part, R, P]."""
    chunk, window = call.layout.chunk, call.layout.window
    scores_B1XP = scaled_scores(q_BhRD.flatten(1, 2)[:, None], k_B1PD, call.scale, call.softmax.cap)
    scores_BhRP = torch.unflatten(scores_B1XP[:, 0], 1, q_BhRD.shape[1:3])
    empty = sample.rows - 1
    scores_BhRP[..., :empty] = -torch.inf
    # Keys that every sampled row sees need no mask.
    first = 0 if window is not None else max(0, min(chunk.lengths) - sample.rows)
    key_X = torch.arange(first, chunk.longest, device=call.layout.device)
    position_BR1 = sample.positions_BL[:, rows].unsqueeze(-1)
    hidden_BRX = key_X > position_BR1
    if window is not None:
        hidden_BRX |= position_BR1 - key_X >= window
    scores_BhRP[..., empty + first :].masked_fill_(hidden_BRX[:, None], -torch.inf)
    return scores_BhRP.softmax(-1)


def _sum_diagonals(weights_BhRP: torch.Tensor, first_row: int, keys: int) -> torch.Tensor:
    """Entry c of [B, h, S] sums row l at key c - (L - 1 - l): reading each row one further aligns the diagonals."""
    batch, heads, rows, padded = weights_BhRP.shape
    strides = (heads * rows * padded, rows * padded, padded + 1, 1)
    return weights_BhRP.contiguous().as_strided((batch, heads, rows, keys), strides, first_row).sum(-2)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _by_offset(vertical_BhS: torch.Tensor, shifted_BhS: torch.Tensor, layout: IndexLayout) -> LineScores:
    """Entry c of the shifted sums is offset last - c; keys and offsets beyond a batch row become UNSEEN."""
    key_S = torch.arange(layout.chunk.longest, device=layout.device)
    length_B1 = on_device(layout.chunk.lengths, layout.device)[:, None]
    source_BhS = (length_B1 - 1 - key_S).clamp(min=0)[:, None].expand(shifted_BhS.shape)
    beyond_B1S = (key_S >= length_B1)[:, None]
    return LineScores(
        vertical_BhS.masked_fill_(beyond_B1S, UNSEEN),
        shifted_BhS.gather(-1, source_BhS).masked_fill_(beyond_B1S, UNSEEN),
    )


def index_vertical_slash(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """Tiles of the best slashes within `max_tiles`, and the best columns outside them."""
    layout, h = call.layout, len(group.heads)
    lines = call.known_lines(group)
    if lines is None:
        lines = score_lines(group.heads, [pattern.last_q for pattern in group.patterns], call)
    diagonals, bound = _choose_slashes(group, lines, layout)
    counts = layout.resolve([pattern.vertical for pattern in group.patterns])
    columns_BhC = top_ascending(lines.vertical_BhS, on_device(counts, layout.device), largest(counts), NO_COLUMN)
    tiles_BhTW, counts_BhT = empty_tiles(layout, h, layout.most_tiles(bound))
    words = ceil_div(columns_BhC.shape[-1], WORD)
    live_BhTN = torch.zeros((*counts_BhT.shape, words), dtype=torch.int32, device=layout.device)
    for part in blocks(layout.row_tiles, layout.batch * h * max(tiles_BhTW.shape[-1], words * WORD)):
        rows = layout.locate().part(part)
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = _list_rows(diagonals, rows, tiles_BhTW.shape[-1])
        live_BhTN[:, :, part] = pack_bits(_live_columns(columns_BhC, diagonals, rows, layout))
    return HeadIndex(group.heads, tiles_BhTW, counts_BhT, columns_BhC, live_BhTN)


def _choose_slashes(group: FamilyHeads, lines: LineScores, layout: IndexLayout) -> tuple[TileDiagonals, int]:
    """The tile diagonals, and the most tiles a row can have."""
    counts = layout.resolve([pattern.slash for pattern in group.patterns])
    bounds = layout.tile_bounds([pattern.max_tiles for pattern in group.patterns])
    offsets_BhO = top_ascending(lines.slash_BhS, on_device(counts, layout.device), largest(counts), -1).long()
    scores_BhO = lines.slash_BhS.gather(-1, offsets_BhO.clamp(min=0)).masked_fill_(offsets_BhO < 0, UNSEEN)
    bound = layout.slash_tiles(largest(counts), largest(bounds))
    return choose_diagonals(offsets_BhO, scores_BhO, bounds, layout.most_diagonals(bound), layout), bound


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


def _live_columns(
    columns_BhC: torch.Tensor, diagonals: TileDiagonals, rows: RowTiles, layout: IndexLayout
) -> torch.Tensor:
    """Columns that a row tile sees and has in none of its tiles: bool [B, h, R, C]."""
    column_Bh1C = columns_BhC.long()[:, :, None]
    tile_Bh1C = floor_div(column_Bh1C, layout.tile.key)
    first_B1R1, last_B1R1, base_B1R1 = (x[:, None, :, None] for x in (rows.first_BT, rows.last_BT, rows.base_BT))
    distance_BhRC = base_B1R1 - tile_Bh1C
    in_tiles_BhRC = diagonals.has(distance_BhRC.flatten(2)).view_as(distance_BhRC) | (tile_Bh1C == 0)
    live_BhRC = (column_Bh1C >= 0) & (column_Bh1C <= last_B1R1) & ~in_tiles_BhRC
    return live_BhRC if layout.window is None else live_BhRC & (first_B1R1 - column_Bh1C < layout.window)


@dataclass(frozen=True, slots=True)
class TileDiagonals:
    """The tile diagonals of each head. Entry e of the last dimension is distance e - right."""

    right: int
    chosen_BhE: torch.Tensor  # bool
    within_BhE: torch.Tensor  # int64: how many chosen diagonals have this distance or less
    far_first_BhM: torch.Tensor  # int64: chosen distances, descending; M bounds their number

    def has(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        """Returns whether these distances are chosen; those out of range read the nearest entry."""
        return self.chosen_BhE.gather(-1, self._entry(distance_BhX))

    def count_within(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        """The number of chosen distances that are at most these; from -right up."""
        return self.within_BhE.gather(-1, self._entry(distance_BhX))

    def _entry(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        return (distance_BhX + self.right).clamp_(0, self.chosen_BhE.shape[-1] - 1)


def choose_diagonals(
    slashes_BhO: torch.Tensor, scores_BhO: torch.Tensor, bounds: list[list[int]], most: int, layout: IndexLayout
) -> TileDiagonals:
    """Takes slashes in order of score until the next would make some row exceed its bound.

    A row holds key tile 0, and a tile for each chosen distance nearer, as far as it has rows in that tile.

    Args:
        slashes_BhO: offsets, ascending, padded with negative numbers.
        scores_BhO: their scores, padding the lowest; equal scores keep the lower offset first.
        bounds: [B][h] tiles a row may have, mandatory ones included; at least those.
        most: the host's bound on the chosen distances.
    """
    right = layout.tile.query // layout.tile.key + 1  # one more than any row needs: the first entry is never chosen
    entries = layout.key_tiles + right + 2
    order_BhO = scores_BhO.sort(dim=-1, descending=True, stable=True).indices
    rank_BhE = _first_rank(slashes_BhO.gather(-1, order_BhO), entries, right, layout)
    limit_Bh1 = on_device(bounds, layout.device).unsqueeze(-1) - 1
    distance_E = torch.arange(-right, entries - right, device=layout.device)
    last_2B, before_2B = on_device(_fullest_rows(layout), layout.device)[..., None, None]
    chosen_BhE = distance_E <= last_2B[1]
    for nearest_B11, base_B11 in (last_2B, before_2B):
        outside_B1E = (distance_E < nearest_B11) | (distance_E >= base_B11)
        counted_BhE = rank_BhE.masked_fill(outside_B1E, slashes_BhO.shape[-1])
        chosen_BhE = chosen_BhE & (rank_BhE < _affordable(counted_BhE, slashes_BhO.shape[-1], limit_Bh1))
    far_first_BhM = entries - 1 - right - ascending(chosen_BhE.flip(-1), min(most, entries), 0).long()
    return TileDiagonals(right, chosen_BhE, chosen_BhE.cumsum(-1), far_first_BhM)


def _fullest_rows(layout: IndexLayout) -> list[list[tuple[int, ...]]]:
    """Nearest distance and base (the distance of key tile 0) of the two row tiles of each batch row that can hold most:
    the last, which sees the farthest but may be ragged, and the whole one before it; equal where there is none."""
    query, key, rows = layout.tile.query, layout.tile.key, []
    for past, length, phase in zip(layout.chunk.past, layout.chunk.lengths, layout.phases, strict=True):
        first = past + max(0, length - past - 1) // query * query
        last = (first // key - max(first, length - 1) // key, first // key)
        whole = (1 - layout.diagonal_tiles(phase), (first - query) // key)
        rows.append((last, whole if first > past else last))
    return [list(zip(*row_B, strict=True)) for row_B in zip(*rows, strict=True)]


def _first_rank(ranked_BhO: torch.Tensor, entries: int, right: int, layout: IndexLayout) -> torch.Tensor:
    """The best rank among the slashes that cross each tile diagonal: -1 where mandatory, O where none does."""
    batch, heads, ranks = ranked_BhO.shape
    entry_BhOX = _crossed(ranked_BhO, layout).add_(right)
    entry_BhOX.masked_fill_((entry_BhOX >= entries) | (ranked_BhO < 0).unsqueeze(-1), entries)
    rank_BhOX = torch.arange(ranks, device=layout.device)[:, None].expand(entry_BhOX.shape)
    first_BhE = torch.full((batch, heads, entries + 1), ranks, device=layout.device)
    first_BhE.scatter_reduce_(-1, entry_BhOX.flatten(2), rank_BhOX.flatten(2), "amin")
    distance_E = torch.arange(-right, entries - right, device=layout.device)
    nearest_B1 = on_device([1 - layout.diagonal_tiles(phase) for phase in layout.phases], layout.device)[:, None]
    mandatory_BE = (distance_E >= nearest_B1) & (distance_E <= 1)
    return first_BhE[..., :entries].masked_fill(mandatory_BE[:, None], -1)


def _crossed(offset_BhO: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    """Distances of the tiles that a slash crosses in a whole row tile, [B, h, O, X]; the last may repeat."""
    key = layout.tile.key
    phase_B11 = on_device(layout.phases, layout.device)[:, None, None]
    far_BhO = (offset_BhO - phase_B11 + key - 1).div(key, rounding_mode="floor")
    near_BhO = (offset_BhO - phase_B11 - layout.tile.query + key).div(key, rounding_mode="floor")
    step_X = torch.arange(layout.tile.query // key + 1, device=layout.device)
    return torch.minimum(near_BhO.unsqueeze(-1) + step_X, far_BhO.unsqueeze(-1))


def _affordable(rank_BhE: torch.Tensor, ranks: int, limit_Bh1: torch.Tensor) -> torch.Tensor:
    """The number of slashes, best first, that keep tile diagonals within the limit: [B, h, 1]."""
    slot_BhE = rank_BhE + 1
    new_BhR = torch.zeros((*rank_BhE.shape[:2], ranks + 2), dtype=torch.int64, device=rank_BhE.device)
    new_BhR.scatter_add_(-1, slot_BhE, torch.ones_like(slot_BhE))
    total_BhO = new_BhR.cumsum(-1)[..., 1 : ranks + 1]
    return (total_BhO <= limit_Bh1).sum(-1, keepdim=True)
