"""Queries, keys and values whose attention goes where it was planted, and how much of it an index holds.

Random queries and keys attend everywhere, so an index over them is as wrong as any other and slashes are scattered.
Here every head has the structure of its family (see structure.py), sized for a stated density, and what was planted is
returned beside the tensors. The attention mass of an index is exact, on a sample of rows.

Deterministic by seed: the structure is the same on every device. Memory is linear in the length. Tensors lie token by
token, as models make them.

Shapes: H query heads, G KV heads, N query heads of a KV head, S tokens, D head size, M clusters or key tiles, T row
tiles, Z clusters a row tile looks at, F frequencies, J tokens of a block, W listed tiles, C columns, X dimensions of a
tile code or sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.bench.structure import (
    SMALLEST_HEAD,
    HeadTruth,
    draw_group,
    layout_for,
    narrowest_band,
    pattern_for,
    sizes_for,
)
from sparsekv.kernels.tiles import Chunk, TileIndex, unpack_bits
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Pattern, TileShape

_FEWEST_TILES = 8
_LARGEST_TILE = 128  # rows
_COPRIME = 37  # to the rows of any tile


@dataclass(frozen=True, slots=True)
class Planted:
    """One layer's attention, where its structure is, and patterns with budgets for it."""

    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    heads: tuple[HeadTruth, ...]
    patterns: tuple[Pattern, ...]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q_BHSD.shape[-1])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_BHSD, self.k_BGSD, self.v_BGSD


def plant(
    families: Sequence[str],
    *,
    kv_heads: int,
    head_dim: int,
    length: int,
    density: float,
    tile: TileShape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    block_rows: int = 1 << 14,
) -> Planted:
    """Attention of one layer of `length` tokens, its heads sparse at about `density`.

    Args:
        families: of each query head.
        kv_heads: heads of K and V; each serves as many query heads as the next.
        density: computed tiles over causal tiles that patterns with these budgets come to; short prompts, where the
            tiles that every pattern computes are more, come to more.
        tile: hot tiles are whole tiles of this shape.
    """
    check_plantable(len(families), kv_heads, head_dim, length, density, tile)
    group = len(families) // kv_heads
    layout = layout_for(families, head_dim, group)
    narrowest = narrowest_band(layout.frequencies, length)
    sizes = [sizes_for(family, length, density, tile, narrowest) for family in families]
    random = torch.Generator().manual_seed(seed)
    groups = [draw_group(sizes[g * group : (g + 1) * group], length, tile, layout, random) for g in range(kv_heads)]
    q_BHSD, k_BGSD, v_BGSD = (
        torch.empty((1, length, n, head_dim), device=device, dtype=dtype).transpose(1, 2)
        for n in (len(families), kv_heads, kv_heads)
    )
    noise = torch.Generator(device).manual_seed(seed)
    for g, drawn in enumerate(groups):
        for start in range(0, length, block_rows):
            position_J = torch.arange(start, min(start + block_rows, length), device=device)
            k_BGSD[0, g, start : start + block_rows] = drawn.keys(position_J, noise)
            for n in range(group):
                q_BHSD[0, g * group + n, start : start + block_rows] = drawn.queries(n, position_J, noise)
        v_BGSD[0, g].normal_(generator=noise)
    return Planted(
        q_BHSD,
        k_BGSD,
        v_BGSD,
        Chunk.uniform(1, 0, length),
        tile,
        tuple(truth for drawn in groups for truth in drawn.heads),
        tuple(pattern_for(own, length, density, tile) for own in sizes),
    )


def check_plantable(heads: int, kv_heads: int, head_dim: int, length: int, density: float, tile: TileShape) -> None:
    """True where structure of that density can be planted in such a layer."""
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise UsageError(f"expected heads to be a multiple of KV heads, found {heads} and {kv_heads}")
    if head_dim < SMALLEST_HEAD:
        raise UsageError(f"expected a head size of at least {SMALLEST_HEAD} to plant structure in, found {head_dim}")
    if length < _FEWEST_TILES * tile.key:
        raise UsageError(
            f"expected lengths of at least {_FEWEST_TILES} tiles, {_FEWEST_TILES * tile.key} tokens, found {length}"
        )
    if not 0.0 < density <= 1.0:
        raise UsageError(f"expected a density above 0 and up to 1, found {density}")


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Holds what sampled rows say about an index and an output.

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
    """Rows spread evenly, the last one among them, at ever other positions within their tiles.

    The last row of a tile sees all of its diagonal tile: rows that were always the last would not tell a causal mask
    from none.
    """
    count = min(count, length)
    step = min(_LARGEST_TILE, length // count)
    return tuple((n + 1) * length // count - 1 - (count - 1 - n) * _COPRIME % step for n in range(count))


def check_rows(
    planted: Planted,
    index: TileIndex,
    rows: Sequence[int],
    out_BHSD: torch.Tensor | None = None,
    block_elements: int = 1 << 26,
) -> RowCheck:
    """Attention mass of an index on these rows, and how far an output is from what the index stands for.

    Args:
        out_BHSD: what a backend made of the index.
    """
    kept_H, worst = [], 0.0
    group = planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1]
    per_block = max(1, block_elements // planted.k_BGSD.shape[2])
    for head in range(planted.q_BHSD.shape[1]):
        v_SD = planted.v_BGSD[0, head // group]
        shares = []
        for start in range(0, len(rows), per_block):
            some = list(rows[start : start + per_block])
            scores_XS = causal_scores(planted, head, some)
            kept_XS = scores_XS.masked_fill(~_kept_keys(planted, index, head, some), -torch.inf)
            shares.append((kept_XS.logsumexp(1) - scores_XS.logsumexp(1)).exp())
            if out_BHSD is not None:
                expected_XD = kept_XS.softmax(1) @ v_SD.float()
                off = float((out_BHSD[0, head, some].float() - expected_XD).abs().max())
                worst = max(worst, math.inf if math.isnan(off) else off)  # max() would pass over what is no number
        kept_H.append(float(torch.cat(shares).mean()))
    return RowCheck(sum(kept_H) / len(kept_H), min(kept_H), None if out_BHSD is None else worst)


def causal_scores(planted: Planted, head: int, rows: Sequence[int]) -> torch.Tensor:
    """Scores of these rows of a query head in float32, -inf beyond the diagonal: [X, S]."""
    k_SD = planted.k_BGSD[0, head // (planted.q_BHSD.shape[1] // planted.k_BGSD.shape[1])]
    scores_XS = planted.q_BHSD[0, head, list(rows)].float() @ k_SD.float().T * planted.scale
    i_X1 = torch.tensor(list(rows), device=k_SD.device)[:, None]
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
