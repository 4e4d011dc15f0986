"""Device code that takes the mean of the rows of every tile, in float32, padding left out.

Shapes: X rows of a tile, D head size padded to a power of two.
"""

from typing import no_type_check

import triton
import triton.language as tl


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def pool_kernel(
    x_ptr, mean_ptr, first_ptr, length_ptr, head_ptr, stride_B, stride_H, stride_S, tiles,
    TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, heads, batch). Row r of x is token first + r; rows of tokens from `length` on are not read."""
    tile = tl.program_id(0)
    own = tl.program_id(1)
    batch = tl.program_id(2)
    rows = tl.load(length_ptr + batch) - tl.load(first_ptr + batch)
    lane_D = tl.arange(0, BLOCK_D)
    row_X = tile * TILE + tl.arange(0, TILE)
    x_base = x_ptr + batch.to(tl.int64) * stride_B + tl.load(head_ptr + own).to(tl.int64) * stride_H
    at_XD = x_base + row_X.to(tl.int64)[:, None] * stride_S + lane_D[None, :]
    x_XD = tl.load(at_XD, mask=(row_X < rows)[:, None] & (lane_D < D)[None, :], other=0.0).to(tl.float32)
    count = tl.minimum(tl.maximum(rows - tile * TILE, 1), TILE)
    mean_D = tl.sum(x_XD, 0) / count.to(tl.float32)
    at = ((batch * tl.num_programs(1) + own).to(tl.int64) * tiles + tile) * D
    tl.store(mean_ptr + at + lane_D, mean_D, mask=lane_D < D)
