"""Block-sparse: the top key tiles of each row tile by mean-pooled queries and keys (MInference 1.0, section 3.2).

Shapes as in layout.py; R row tiles of one block, M key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    HeadIndex,
    IndexCall,
    RowTiles,
    ceil_div,
    empty_tiles,
    largest,
    take_heads,
)
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import ascending, blocks, top_mask

_LOWEST = torch.finfo(torch.float32).min


def index_block_sparse(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """The ceil(keep / tile.key) best tiles of each row, mandatory tiles included. Never fewer than the mandatory tiles
    of a whole row tile, which a ragged last one may spend on other tiles."""
    layout, h = call.layout, len(group.heads)
    keep = layout.tile_bounds([pattern.keep for pattern in group.patterns])
    width = layout.most_tiles(largest(keep))
    keep_Bh1 = on_device(keep, layout.device).unsqueeze(-1)
    q_BhTD, k_BhMD = pool_heads(group.heads, call)
    tiles_BhTW, counts_BhT = empty_tiles(layout, h, width)
    for part in blocks(layout.row_tiles, layout.batch * h * layout.key_tiles):
        # A NaN compares with nothing: a row of them would choose fewer tiles than it counts.
        scores_BhRM = (q_BhTD[:, :, part] @ k_BhMD.mT).mul_(call.scale).nan_to_num_(nan=_LOWEST)
        mandatory_BRM, visible_BRM = tile_limits(scores_BhRM.shape[-1], layout.locate().part(part))
        scores_BhRM.masked_fill_(mandatory_BRM[:, None], torch.inf).masked_fill_(~visible_BRM[:, None], -torch.inf)
        counts_BhR = torch.minimum(keep_Bh1, visible_BRM.sum(-1)[:, None])
        chosen_BhRM = top_mask(scores_BhRM, counts_BhR, width)
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = ascending(chosen_BhRM, width, NO_TILE), counts_BhR
    return HeadIndex.of_tiles(group.heads, tiles_BhTW, counts_BhT)


def tile_limits(tiles: int, rows: RowTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles that a row must take, and those that it may: bool [B, R, M]."""
    tile_M = torch.arange(tiles, device=rows.base_BT.device)
    base_BR1, end_BR1, seen_BR1 = (x.unsqueeze(-1) for x in (rows.base_BT, rows.end_BT, rows.seen_BT))
    visible_BRM = (tile_M >= seen_BR1) & (tile_M <= end_BR1)
    return ((tile_M == 0) | (tile_M >= base_BR1 - 1)) & visible_BRM, visible_BRM


def pool_heads(heads: Sequence[int], call: IndexCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean queries of each row tile and mean keys of each key tile of these heads: float32 [B, h, T, D], [B, h, M, D].
    Pools the span that the heads lie in as a view: copying the queries of scattered heads would cost far more."""
    layout = call.layout
    first, span = min(heads), max(heads) - min(heads) + 1
    q_BHTD = mean_pool(call.q_BHSD.narrow(1, first, span), layout.tile.query, layout.chunk.rows)
    k_BGMD = mean_pool(call.k_BGKD[:, :, : layout.chunk.longest], layout.tile.key, layout.chunk.lengths)
    k_BhMD = take_heads(k_BGMD, [head // layout.group_size for head in heads])
    return take_heads(q_BHTD, [head - first for head in heads]), k_BhMD


def mean_pool(x_BHSD: torch.Tensor, size: int, valid: Sequence[int]) -> torch.Tensor:
    """Means over `size` rows at a time: float32 [B, H, ceil(S / size), D]. Only the first valid[b] rows of batch row b
    count, whatever memory holds after them; a tile without any is 0."""
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
    rows_BHXD = x_BHSD[:, :, start:stop]
    real_BX = torch.arange(start, stop, device=x_BHSD.device) < valid_B1
    clean_BHXD = rows_BHXD.float().masked_fill(~real_BX[:, None, : rows_BHXD.shape[2], None], 0.0)  # not in the keys
    padded_BHXD = torch.nn.functional.pad(clean_BHXD, (0, 0, 0, stop - start - rows_BHXD.shape[2]))
    sums_BHTD = torch.unflatten(padded_BHXD, 2, (-1, size)).sum(3)
    counts_BT = torch.unflatten(real_BX, 1, (-1, size)).sum(2)
    return sums_BHTD / counts_BT.clamp(min=1)[:, None, :, None]
