"""Which tile diagonals the best slashes need, within the tiles a row may have.

Row tiles are whole multiples of key tiles, so a slash crosses the same tiles, counted back from the row's own, in every
row: the choice is made once a head. Distance d of a tile: key tile of the first row, less the tile.

Shapes: B batch, h heads, O slashes kept, X tiles a slash crosses, E distances, shifted so that entry 0 is the tile
farthest to the right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.kernels.index.call import IndexCall
from sparsekv.kernels.kept import on_device
from sparsekv.kernels.topk import ascending


@dataclass(frozen=True, slots=True)
class TileDiagonals:
    """The tile diagonals of each head. Entry e of the last dimension is distance e - right."""

    right: int
    chosen_BhE: torch.Tensor  # bool
    within_BhE: torch.Tensor  # int64: how many chosen diagonals have this distance or less
    far_first_BhM: torch.Tensor  # int64: chosen distances, descending; M bounds their number

    def has(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        """Whether these distances are chosen; those out of range read the nearest entry."""
        return self.chosen_BhE.gather(-1, self._entry(distance_BhX))

    def count_within(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        """How many chosen distances are at most these; from -right up."""
        return self.within_BhE.gather(-1, self._entry(distance_BhX))

    def _entry(self, distance_BhX: torch.Tensor) -> torch.Tensor:
        return (distance_BhX + self.right).clamp_(0, self.chosen_BhE.shape[-1] - 1)


def choose_diagonals(
    slashes_BhO: torch.Tensor, scores_BhO: torch.Tensor, bounds: list[list[int]], most: int, call: IndexCall
) -> TileDiagonals:
    """Takes slashes in order of score until the next would make some row exceed its bound.

    The last row sees the farthest, so it is the fullest: key tile 0, and a tile for each chosen distance nearer.

    Args:
        slashes_BhO: offsets, ascending, padded with negative numbers.
        scores_BhO: their scores, padding the lowest; equal scores keep the lower offset first.
        bounds: [B][h] tiles a row may have, mandatory ones included; at least those.
        most: the host's bound on the tiles of a row.
        call: where the rows lie.
    """
    right = call.tile.query // call.tile.key + 1  # one more than any row needs: the first entry is never chosen
    entries = call.key_tiles + right + 2
    order_BhO = scores_BhO.sort(dim=-1, descending=True, stable=True).indices
    rank_BhE = _first_rank(slashes_BhO.gather(-1, order_BhO), entries, right, call)
    last_B1E = _distance_of_last_row(entries, right, call)
    limit_Bh1 = on_device(bounds, call.device).unsqueeze(-1) - 1
    counted_BhE = rank_BhE.masked_fill(last_B1E >= 0, slashes_BhO.shape[-1])
    chosen_BhE = (rank_BhE < _affordable(counted_BhE, slashes_BhO.shape[-1], limit_Bh1)) & (last_B1E <= 0)
    far_first_BhM = entries - 1 - right - ascending(chosen_BhE.flip(-1), min(most, entries), 0).long()
    return TileDiagonals(right, chosen_BhE, chosen_BhE.cumsum(-1), far_first_BhM)


def _distance_of_last_row(entries: int, right: int, call: IndexCall) -> torch.Tensor:
    """How much farther each distance is than key tile 0 from the last row tile: [B, 1, E]."""
    query, key = call.tile.query, call.tile.key
    starts = (past + max(0, rows - 1) // query * query for past, rows in zip(call.chunk.past, call.rows, strict=True))
    base_B1 = on_device([start // key for start in starts], call.device)[:, None]
    return (torch.arange(-right, entries - right, device=call.device) - base_B1)[:, None]


def _first_rank(ranked_BhO: torch.Tensor, entries: int, right: int, call: IndexCall) -> torch.Tensor:
    """The best rank among the slashes that cross each tile diagonal: -1 where mandatory, O where none does."""
    batch, heads, ranks = ranked_BhO.shape
    entry_BhOX = _crossed(ranked_BhO, call).add_(right)
    entry_BhOX.masked_fill_((entry_BhOX >= entries) | (ranked_BhO < 0).unsqueeze(-1), entries)
    rank_BhOX = torch.arange(ranks, device=call.device)[:, None].expand(entry_BhOX.shape)
    first_BhE = torch.full((batch, heads, entries + 1), ranks, device=call.device)
    first_BhE.scatter_reduce_(-1, entry_BhOX.flatten(2), rank_BhOX.flatten(2), "amin")
    distance_E = torch.arange(-right, entries - right, device=call.device)
    nearest_B1 = on_device([1 - call.diagonal_tiles(phase) for phase in call.phases], call.device)[:, None]
    mandatory_BE = (distance_E >= nearest_B1) & (distance_E <= 1)
    return first_BhE[..., :entries].masked_fill(mandatory_BE[:, None], -1)


def _crossed(offset_BhO: torch.Tensor, call: IndexCall) -> torch.Tensor:
    """Distances of the tiles that a slash crosses in a whole row tile, [B, h, O, X]; the last may repeat."""
    key = call.tile.key
    phase_B11 = on_device(list(call.phases), call.device)[:, None, None]
    far_BhO = (offset_BhO - phase_B11 + key - 1).div(key, rounding_mode="floor")
    near_BhO = (offset_BhO - phase_B11 - call.tile.query + key).div(key, rounding_mode="floor")
    step_X = torch.arange(call.tile.query // key + 1, device=call.device)
    return torch.minimum(near_BhO.unsqueeze(-1) + step_X, far_BhO.unsqueeze(-1))


def _affordable(rank_BhE: torch.Tensor, ranks: int, limit_Bh1: torch.Tensor) -> torch.Tensor:
    """How many slashes, best first, keep the number of tile diagonals within the limit: [B, h, 1]."""
    slot_BhE = rank_BhE + 1
    new_BhR = torch.zeros((*rank_BhE.shape[:2], ranks + 2), dtype=torch.int64, device=rank_BhE.device)
    new_BhR.scatter_add_(-1, slot_BhE, torch.ones_like(slot_BhE))
    total_BhO = new_BhR.cumsum(-1)[..., 1 : ranks + 1]
    return (total_BhO <= limit_Bh1).sum(-1, keepdim=True)
