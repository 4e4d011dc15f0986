"""Mean of the rows of each tile, in float32, padding left out.

Shapes: B batch, H heads, S rows, T tiles, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.index.call import ceil_div
from sparsekv.kernels.kept import on_device
from sparsekv.kernels.topk import blocks


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
