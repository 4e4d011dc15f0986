"""Whether an index holds what was planted, and how much attention it holds: exact, on a sample of rows.

Shapes: H query heads, G KV heads, N query heads of a KV head, S keys, D head size, T row tiles, W listed tiles,
C columns, M key tiles, X sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import TileIndex, unpack_bits
from sparsekv.planner.bench.planted import Planted
from sparsekv.planner.bench.structure import HeadTruth

_BLOCK_ELEMENTS = 1 << 26  # of a block of scores
_ROW_TILES = 64  # that hot tiles are looked for in
_LARGEST_TILE = 128  # rows
_COPRIME = 37  # to the rows of any tile


@dataclass(frozen=True, slots=True)
class Recall:
    """Shares of what was planted that an index computes; None where nothing of the kind was planted."""

    columns: float | None
    diagonals: float | None
    tiles: float | None


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What sampled rows say about an index and an output.

    Attributes:
        mass: mean share of the attention mass that the index holds.
        least: that of the head that keeps least.
        error: largest difference of the output from float32 attention over the same index, infinite where the output
            is no number; None without an output.
    """

    mass: float
    least: float
    error: float | None


def sample_rows(length: int, count: int = 32) -> tuple[int, ...]:
    """Rows spread evenly, the last one among them, at ever other places within their tiles.

    The last row of a tile sees all of its diagonal tile: rows that were always the last would not tell a causal mask
    from none.
    """
    count = min(count, length)
    step = min(_LARGEST_TILE, length // count)
    return tuple((place + 1) * length // count - 1 - (count - 1 - place) * _COPRIME % step for place in range(count))


def find_planted(planted: Planted, index: TileIndex) -> Recall:
    """Which planted columns, diagonals and hot tiles the index computes, over all heads together.

    Columns and diagonals are looked for where the most of them can be seen: in the last whole row tile. A column may
    be computed singly or in a tile; a diagonal needs every tile it crosses there.
    """
    found: dict[str, list[torch.Tensor]] = {"columns": [], "diagonals": [], "tiles": []}
    row = planted.chunk.longest // planted.tile.query - 1
    for head, truth in enumerate(planted.heads):
        last_M = _chosen_tiles(planted, index, head, [row])[0]
        if len(truth.columns_C):
            found["columns"].append(_columns_found(planted, index, head, truth, row, last_M))
        if truth.runs:
            found["diagonals"].append(_diagonals_found(planted, truth, row, last_M))
        if len(truth.cluster_M):
            found["tiles"].append(_tiles_found(planted, index, head, truth))
    return Recall(**{name: _share(flags) for name, flags in found.items()})


def check_rows(
    planted: Planted, index: TileIndex, rows: Sequence[int], out_BHSD: torch.Tensor | None = None
) -> RowCheck:
    """Attention mass of an index on these rows, and how far an output is from what the index stands for.

    Args:
        rows: tokens of the prompt.
        out_BHSD: what a backend made of the index.
    """
    kept_H, worst = [], 0.0
    group = planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1]
    per_block = max(1, _BLOCK_ELEMENTS // planted.k_BGSD.shape[2])
    for head in range(planted.q_BHSD.shape[1]):
        k_SD, v_SD = planted.k_BGSD[0, head // group], planted.v_BGSD[0, head // group]
        shares = []
        for start in range(0, len(rows), per_block):
            some = list(rows[start : start + per_block])
            scores_XS = _scores(planted, head, k_SD, some)
            kept_XS = scores_XS.masked_fill(~_kept_keys(planted, index, head, some), -torch.inf)
            shares.append((kept_XS.logsumexp(1) - scores_XS.logsumexp(1)).exp())
            if out_BHSD is not None:
                expected_XD = kept_XS.softmax(1) @ v_SD.float()
                off = float((out_BHSD[0, head, some].float() - expected_XD).abs().max())
                worst = max(worst, math.inf if math.isnan(off) else off)  # max() would pass over what is no number
        kept_H.append(float(torch.cat(shares).mean()))
    return RowCheck(sum(kept_H) / len(kept_H), min(kept_H), None if out_BHSD is None else worst)


def _scores(planted: Planted, head: int, k_SD: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Causal scores in float32: [X, S]."""
    scores_XS = planted.q_BHSD[0, head, rows].float() @ k_SD.float().T * planted.scale
    i_X1 = torch.tensor(rows, device=k_SD.device)[:, None]
    return scores_XS.masked_fill_(torch.arange(len(k_SD), device=k_SD.device) > i_X1, -torch.inf)


def _kept_keys(planted: Planted, index: TileIndex, head: int, rows: list[int]) -> torch.Tensor:
    """bool [X, S]: keys in the tiles or among the single columns of each row's tile; not cut to causal ones."""
    row_tiles = [row // planted.tile.query for row in rows]
    length = planted.k_BGSD.shape[2]
    kept_XS = _chosen_tiles(planted, index, head, row_tiles).repeat_interleave(planted.tile.key, 1)[:, :length]
    column_C = index.columns_BHC[0, head].long()
    live_XC = unpack_bits(index.live_BHTN[0, head, row_tiles], len(column_C))
    slots_XC = torch.where(live_XC, column_C, length)
    singly_XS = torch.zeros((len(rows), length + 1), dtype=torch.bool, device=kept_XS.device)
    return kept_XS | singly_XS.scatter_(1, slots_XC, True)[:, :length]


def _chosen_tiles(planted: Planted, index: TileIndex, head: int, row_tiles: list[int]) -> torch.Tensor:
    """bool [X, M]: tiles that these row tiles of a head compute."""
    tiles = planted.chunk.key_tiles(planted.tile)
    if index.dense_H[head]:
        return torch.ones((len(row_tiles), tiles), dtype=torch.bool, device=index.tiles_BHTW.device)
    listed_XW = index.tiles_BHTW[0, head, row_tiles].long()
    valid_XW = torch.arange(listed_XW.shape[1], device=listed_XW.device) < index.counts_BHT[0, head, row_tiles][:, None]
    chosen_XM = torch.zeros((len(row_tiles), tiles + 1), dtype=torch.bool, device=listed_XW.device)
    return chosen_XM.scatter_(1, torch.where(valid_XW, listed_XW, tiles), True)[:, :tiles]


def _share(flags: Sequence[torch.Tensor]) -> float | None:
    """The share of all that are true; None where there are none."""
    total = sum(len(found) for found in flags)
    return sum(int(found.sum()) for found in flags) / total if total else None


def _columns_found(
    planted: Planted, index: TileIndex, head: int, truth: HeadTruth, row: int, last_M: torch.Tensor
) -> torch.Tensor:
    """bool: of each planted column that the row sees."""
    column_C = truth.columns_C.to(last_M.device)
    listed_C = index.columns_BHC[0, head].long()
    live_C = unpack_bits(index.live_BHTN[0, head, [row]], len(listed_C))[0]
    singly_C = torch.isin(column_C, listed_C[live_C])
    seen_C = column_C < (row + 1) * planted.tile.query
    return (singly_C | last_M[column_C // planted.tile.key])[seen_C]


def _diagonals_found(planted: Planted, truth: HeadTruth, row: int, last_M: torch.Tensor) -> torch.Tensor:
    """bool: of each planted diagonal that the row sees."""
    offset_O = torch.cat([torch.arange(first, stop) for first, stop in truth.runs]).to(last_M.device)
    first, last = row * planted.tile.query, (row + 1) * planted.tile.query - 1
    offset_O = offset_O[offset_O <= first]
    return last_M[(first - offset_O) // planted.tile.key] & last_M[(last - offset_O) // planted.tile.key]


def _tiles_found(planted: Planted, index: TileIndex, head: int, truth: HeadTruth) -> torch.Tensor:
    """bool: of each hot tile that sampled row tiles see."""
    tile, rows = planted.tile, len(truth.looks_at_TZ)
    chosen = list(sample_rows(rows, _ROW_TILES))
    hot_XM = (truth.looks_at_TZ[chosen][:, :, None] == truth.cluster_M).any(1)
    last_X1 = (torch.tensor(chosen)[:, None] + 1) * tile.query - 1
    hot_XM &= torch.arange(hot_XM.shape[1]) * tile.key <= last_X1
    return _chosen_tiles(planted, index, head, chosen).cpu()[hot_XM]
