"""How much of the attention matrix an index computes, counted on the device.

Density is computed tiles over causal tiles; a column computed singly counts 1 / tile.key of a tile. Dense heads count
every causal tile. A sliding window of the layer shrinks the lists of an index but not what density divides by, so a
sparse head of a windowed layer is never reported denser than it is; tiles partly outside the window count whole.

Shapes: B batch, H query heads, T query tiles, N words of 32 columns.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.index.bits import count_bits
from sparsekv.kernels.tiles import Chunk, TileIndex


def computed_tiles(index: TileIndex) -> torch.Tensor:
    """Tiles that a kernel computes, single columns included: float64 [B, H]."""
    columns_BH = count_bits(index.live_BHTN).sum((2, 3))
    return index.counts_BHT.sum(2).double() + columns_BH.double() / index.tile.key


def density(index: TileIndex, chunk: Chunk) -> torch.Tensor:
    """Computed tiles over causal tiles of all heads and batch rows: a float64 scalar; 0 for a chunk without rows."""
    causal = index.counts_BHT.shape[1] * chunk.causal_tiles(index.tile)
    return computed_tiles(index).sum() / max(1, causal)
