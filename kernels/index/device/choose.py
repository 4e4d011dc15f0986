"""Device code that lists the best key tiles of every row tile, from the integers of products.py.

Shapes: T row tiles of a program, M key tiles of a step, W listed tiles.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.device.products import HIDDEN, row_ends


@triton.jit
@no_type_check
def _load(order_T, tile_M, end_T):
    return tl.load(order_T[:, None] + tile_M[None, :], mask=tile_M[None, :] <= end_T[:, None], other=HIDDEN)


@triton.jit
@no_type_check
def _count_from(order_T, end_T, first_T, second_T, third_T, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles of each row are at least each of three bounds."""
    from_first_T = tl.zeros([BLOCK_T], tl.int32)
    from_second_T = tl.zeros([BLOCK_T], tl.int32)
    from_third_T = tl.zeros([BLOCK_T], tl.int32)
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        order_TM = _load(order_T, start + tl.arange(0, BLOCK_M), end_T)
        from_first_T += tl.sum((order_TM >= first_T[:, None]).to(tl.int32), 1)
        from_second_T += tl.sum((order_TM >= second_T[:, None]).to(tl.int32), 1)
        from_third_T += tl.sum((order_TM >= third_T[:, None]).to(tl.int32), 1)
    return from_first_T, from_second_T, from_third_T


@triton.jit
@no_type_check
def _threshold(order_T, end_T, count_T, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr):
    """A bound that `count_T` tiles reach, or the count-th largest number where equal ones straddle it; how many do.

    Two bits a pass, from the highest down, until the right number of tiles is left in every row.
    """
    bound_T = tl.full([BLOCK_T], -2147483648, tl.int32)
    found_T = tl.maximum(end_T + 1, 0)
    shift = 30
    while (shift >= 0) & (tl.max((found_T != count_T).to(tl.int32)) > 0):
        step = 1 << shift
        first_T = bound_T + step
        second_T = first_T + step
        third_T = second_T + step
        one_T, two_T, three_T = _count_from(order_T, end_T, first_T, second_T, third_T, BLOCK_T, BLOCK_M)
        # A row that has the right number keeps its bound.
        open_T = found_T != count_T
        found_T = tl.where(open_T & (one_T >= count_T), one_T, found_T)
        bound_T = tl.where(open_T & (one_T >= count_T), first_T, bound_T)
        found_T = tl.where(open_T & (two_T >= count_T), two_T, found_T)
        bound_T = tl.where(open_T & (two_T >= count_T), second_T, bound_T)
        found_T = tl.where(open_T & (three_T >= count_T), three_T, found_T)
        bound_T = tl.where(open_T & (three_T >= count_T), third_T, bound_T)
        shift -= 2
    return bound_T, found_T


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(
    do_not_specialize=["window", "heads", "all_heads", "row_tiles", "key_tiles", "first_tile", "last_tile", "width"]
)
@no_type_check
def choose_kernel(
    order_ptr, tiles_ptr, counts_ptr, past_ptr, length_ptr, head_ptr, keep_ptr,
    window, heads, all_heads, row_tiles, key_tiles, first_tile, last_tile, width,
    QUERY: tl.constexpr, KEY: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of the row tiles first_tile .. last_tile - 1, heads, batch). Among equals the lower tile wins."""
    own = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch * heads + own
    tile_T = first_tile + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = tile_T < last_tile
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    _, end_T, seen_T = row_ends(tile_T, past, length, window, QUERY, KEY, WINDOWED)
    end_T = tl.where(real_T, end_T, -1)
    count_T = tl.minimum(tl.load(keep_ptr + row), tl.maximum(end_T + 1 - seen_T, 0))
    line_T = (batch * all_heads + tl.load(head_ptr + own)).to(tl.int64) * row_tiles + tile_T
    tl.store(counts_ptr + line_T, count_T, mask=real_T)

    order_T = order_ptr + (row.to(tl.int64) * (last_tile - first_tile) + tile_T - first_tile) * key_tiles
    bound_T, found_T = _threshold(order_T, end_T, count_T, BLOCK_T, BLOCK_M)
    # Where more reach the bound than may be taken, equal ones are left over: as many are taken as there is room for.
    above_T, _, _ = _count_from(order_T, end_T, bound_T + 1, bound_T + 1, bound_T + 1, BLOCK_T, BLOCK_M)
    room_T = tl.where(found_T == count_T, key_tiles, count_T - above_T)
    written_T = tl.zeros([BLOCK_T], tl.int32)
    equal_T = tl.zeros([BLOCK_T], tl.int32)
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        tile_M = start + tl.arange(0, BLOCK_M)
        order_TM = _load(order_T, tile_M, end_T)
        same_TM = ((order_TM == bound_T[:, None]) & (tile_M[None, :] <= end_T[:, None])).to(tl.int32)
        rank_TM = equal_T[:, None] + tl.cumsum(same_TM, 1)
        keep_TM = (order_TM > bound_T[:, None]) | ((same_TM != 0) & (rank_TM <= room_T[:, None]))
        slot_TM = written_T[:, None] + tl.cumsum(keep_TM.to(tl.int32), 1) - 1
        at_TM = tiles_ptr + line_T[:, None] * width + slot_TM
        tl.store(
            at_TM, tl.broadcast_to(tile_M[None, :], [BLOCK_T, BLOCK_M]), mask=keep_TM & (slot_TM < count_T[:, None])
        )
        written_T += tl.sum(keep_TM.to(tl.int32), 1)
        equal_T += tl.sum(same_TM, 1)
    for start in tl.range(tl.min(tl.where(real_T, count_T, width)), width, BLOCK_M):
        slot_TW = (start + tl.arange(0, BLOCK_M))[None, :]
        keep_TW = real_T[:, None] & (slot_TW >= count_T[:, None]) & (slot_TW < width)
        tl.store(tiles_ptr + line_T[:, None] * width + slot_TW, tl.full([BLOCK_T, BLOCK_M], -1, tl.int32), mask=keep_TW)
