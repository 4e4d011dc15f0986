"""Counts the tiles and single columns of an index in one launch, where torch operations are twenty.

Shapes: as in tiles.py; X numbers of a step.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.tiles import TileIndex
from sparsekv.kernels.triton_support import quick

_STEP = 2048


def computed_tiles(index: TileIndex) -> torch.Tensor:
    """float64 [B, H] of an index on a GPU whose tensors are contiguous."""
    batch, heads, tiles = index.counts_BHT.shape
    computed_BH = torch.empty((batch, heads), dtype=torch.float64, device=index.counts_BHT.device)
    with torch.cuda.device_of(computed_BH):
        computed_kernel[(heads, batch)](
            index.counts_BHT, index.live_BHTN, computed_BH, heads, tiles, tiles * index.live_BHTN.shape[3],
            KEY=index.tile.key, STEP=_STEP,
        )  # fmt: skip
    return computed_BH


@triton.jit
@no_type_check
def _bits(words_X):
    """Bits set in int32 words, by halving: pairs, nibbles, bytes, then their sum."""
    words_X = words_X.to(tl.uint32, bitcast=True)
    pairs_X = words_X - ((words_X >> 1) & 0x55555555)
    nibbles_X = (pairs_X & 0x33333333) + ((pairs_X >> 2) & 0x33333333)
    octets_X = (nibbles_X + (nibbles_X >> 4)) & 0x0F0F0F0F
    halves_X = octets_X + (octets_X >> 8)
    return (halves_X + (halves_X >> 16)) & 0x3F


@quick
@triton.jit(do_not_specialize=["heads", "tiles", "words"])
@no_type_check
def computed_kernel(counts_ptr, live_ptr, computed_ptr, heads, tiles, words, KEY: tl.constexpr, STEP: tl.constexpr):
    """Grid: (H, B)."""
    head = (tl.program_id(1) * heads + tl.program_id(0)).to(tl.int64)
    lane_X = tl.arange(0, STEP)
    tiles_X = tl.zeros([STEP], tl.int64)
    columns_X = tl.zeros([STEP], tl.int64)
    for first in range(0, tiles, STEP):
        tiles_X += tl.load(counts_ptr + head * tiles + first + lane_X, mask=first + lane_X < tiles, other=0)
    for first in range(0, words, STEP):
        columns_X += _bits(tl.load(live_ptr + head * words + first + lane_X, mask=first + lane_X < words, other=0))
    tl.store(computed_ptr + head, tl.sum(tiles_X).to(tl.float64) + tl.sum(columns_X).to(tl.float64) / KEY)
