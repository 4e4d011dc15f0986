"""Block-sparse: the top key tiles of each row tile by mean-pooled queries and keys (MInference 1.0, section 3.2).

Shapes as in call.py; R row tiles of one block, M key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.layout import (
    HeadIndex,
    IndexCall,
    RowTiles,
    ceil_div,
    empty_tiles,
    take_heads,
    without_columns,
)
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import ascending, blocks, top_mask
from sparsekv.plans.patterns import BlockSparse

_LOWEST = torch.finfo(torch.float32).min


def index_block_sparse(
    patterns: Sequence[BlockSparse], heads: Sequence[int], call: IndexCall, rows: RowTiles
) -> HeadIndex:
    """The ceil(keep / tile.key) best tiles of each row, mandatory tiles included.

    Never fewer than the mandatory tiles of a whole row tile, which a ragged last one may spend on other tiles.
    """
    keep = call.tile_bounds([pattern.keep for pattern in patterns])
    width = call.most_tiles(max(max(row) for row in keep))
    keep_Bh1 = on_device(keep, call.device).unsqueeze(-1)
    q_BhTD = pooled_queries(heads, call)
    k_BGMD = mean_pool(call.k_BGKD[:, :, : call.chunk.longest], call.tile.key, call.chunk.lengths)
    k_BhMD = take_heads(k_BGMD, [head // call.group_size for head in heads])
    tiles_BhTW, counts_BhT = empty_tiles(call, len(heads), width)
    for part in blocks(call.row_tiles, call.batch * len(heads) * call.key_tiles):
        # A NaN compares with nothing: a row of them would choose fewer tiles than it counts.
        scores_BhRM = (q_BhTD[:, :, part] @ k_BhMD.mT).mul_(call.scale).nan_to_num_(nan=_LOWEST)
        counts_BhR = _mark_limits(scores_BhRM, keep_Bh1, rows.part(part))
        chosen_BhRM = top_mask(scores_BhRM, counts_BhR, width)
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = ascending(chosen_BhRM, width, NO_TILE), counts_BhR
    return without_columns(call, tiles_BhTW, counts_BhT)


def pooled_queries(heads: Sequence[int], call: IndexCall) -> torch.Tensor:
    """Mean queries of each row tile, float32 [B, h, T, D].

    Pools the span that the heads lie in as a view: copying the queries of scattered heads would cost far more.
    """
    first, span = min(heads), max(heads) - min(heads) + 1
    pooled_BHTD = mean_pool(call.q_BHSD.narrow(1, first, span), call.tile.query, call.rows)
    return take_heads(pooled_BHTD, [head - first for head in heads])


def _mark_limits(scores_BhRM: torch.Tensor, keep_Bh1: torch.Tensor, rows: RowTiles) -> torch.Tensor:
    """Makes mandatory tiles the best and unseen ones the worst, in place; returns how many tiles each row takes."""
    tile_M = torch.arange(scores_BhRM.shape[-1], device=scores_BhRM.device)
    base_BR1, end_BR1, seen_BR1 = (x.unsqueeze(-1) for x in (rows.base_BT, rows.end_BT, rows.seen_BT))
    mandatory_BRM = (tile_M == 0) | (tile_M >= base_BR1 - 1)
    visible_BRM = (tile_M >= seen_BR1) & (tile_M <= end_BR1)
    scores_BhRM.masked_fill_(mandatory_BRM[:, None], torch.inf).masked_fill_(~visible_BRM[:, None], -torch.inf)
    return torch.minimum(keep_Bh1, visible_BRM.sum(-1)[:, None])


# Mean of the rows of each tile, in float32, padding left out.
#
# Shapes: B batch, H heads, S rows, T tiles, D head size.


def mean_pool(x_BHSD: torch.Tensor, size: int, valid: Sequence[int]) -> torch.Tensor:
    """Means over `size` rows at a time: float32 [B, H, ceil(S / size), D].

    Only the first valid[b] rows of batch row b count, whatever memory holds after them; a tile without any is 0.
    """
    batch, heads, rows, width = x_BHSD.shape
    pooled_BHTD = x_BHSD.new_zeros((batch, heads, ceil_div(rows, size), width), dtype=torch.float32)
    whole = min(min(valid), rows) // size
    if whole:
        tiles_BHTXD = torch.unflatten(x_BHSD[:, :, : whole * size], 2, (whole, size))
        pooled_BHTD[:, :, :whole] = tiles_BHTXD.mean(3, dtype=torch.float32)
    valid_B1 = on_device(list(valid), x_BHSD.device)[:, None]
    for part in blocks(ceil_div(max(valid), size) - whole, batch * heads * size * width):
        tiles = slice(whole + part.start, whole + part.stop)
        pooled_BHTD[:, :, tiles] = _pool_ragged(x_BHSD, size, tiles, valid_B1)
    return pooled_BHTD


def _pool_ragged(x_BHSD: torch.Tensor, size: int, tiles: slice, valid_B1: torch.Tensor) -> torch.Tensor:
    start, stop = tiles.start * size, tiles.stop * size
    held_BHXD = x_BHSD[:, :, start:stop]
    real_BX = torch.arange(start, stop, device=x_BHSD.device) < valid_B1
    clean_BHXD = held_BHXD.float().masked_fill_(~real_BX[:, None, : held_BHXD.shape[2], None], 0.0)
    sums_BHTD = torch.unflatten(_pad_rows(clean_BHXD, stop - start), 2, (-1, size)).sum(3)
    counts_BT = torch.unflatten(real_BX, 1, (-1, size)).sum(2)
    return sums_BHTD / counts_BT.clamp(min=1)[:, None, :, None]


def _pad_rows(x_BHXD: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(x_BHXD, (0, 0, 0, rows - x_BHXD.shape[2]))
