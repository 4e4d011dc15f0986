"""Index of strided heads (Sparse Transformers, section 4.2): key tiles at a stride, and the mandatory ones."""

from __future__ import annotations

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import tile_limits
from sparsekv.kernels.index.layout import FamilyHeads, HeadIndex, IndexCall, ceil_div, empty_tiles
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import ascending, blocks


def index_strided(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """Key tiles whose number is a multiple of the stride, and the mandatory ones."""
    layout, h = call.layout, len(group.heads)
    strides = [pattern.stride for pattern in group.patterns]
    needed = max(map(layout.mandatory_tiles, layout.phases))
    width = layout.most_tiles(ceil_div(layout.key_tiles, min(strides)) + needed)
    tile_M = torch.arange(layout.key_tiles, device=layout.device)
    strided_h1M = tile_M % on_device(strides, layout.device)[:, None, None] == 0
    tiles_BhTW, counts_BhT = empty_tiles(layout, h, width)
    for part in blocks(layout.row_tiles, layout.batch * h * layout.key_tiles):
        mandatory_BRM, visible_BRM = tile_limits(layout.key_tiles, layout.locate().part(part))
        chosen_BhRM = (strided_h1M | mandatory_BRM[:, None]) & visible_BRM[:, None]
        tiles_BhTW[:, :, part], counts_BhT[:, :, part] = ascending(chosen_BhRM, width, NO_TILE), chosen_BhRM.sum(-1)
    return HeadIndex.of_tiles(group.heads, tiles_BhTW, counts_BhT)
