"""Device code that scores key tiles for row tiles by their mean queries and keys (MInference 1.0, section 3.2).

Scores are written as integers that order like them: the bits of a float32, those below 0 turned round. Mandatory tiles
are above all others, tiles that a window hides below.

Shapes: T row tiles of a program, M key tiles of a step, D numbers of a head that are multiplied at once.
"""

from typing import no_type_check

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-2147483648)
MANDATORY = tl.constexpr(2147483647)


@triton.jit
@no_type_check
def row_ends(tile_T, past, length, window, QUERY: tl.constexpr, KEY: tl.constexpr, WINDOWED: tl.constexpr):
    """Of each row tile: key tile of its first row, its last key tile (-1: padding), and the first that it sees."""
    first_T = past + tile_T * QUERY
    end_T = tl.where(first_T < length, (tl.minimum(first_T + QUERY, length) - 1) // KEY, -1)
    seen_T = tile_T * 0
    if WINDOWED:
        seen_T = tl.maximum(first_T - window + 1, 0) // KEY
    return first_T // KEY, end_T, seen_T


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "heads", "kv_heads", "row_tiles", "key_tiles", "first_tile", "last_tile"])
@no_type_check
def products_kernel(
    q_ptr, k_ptr, order_ptr, past_ptr, length_ptr, head_ptr,
    scale, window, heads, kv_heads, row_tiles, key_tiles, first_tile, last_tile,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of the row tiles first_tile .. last_tile - 1, heads, batch). Tiles behind a row are not written."""
    own = tl.program_id(1)
    batch = tl.program_id(2)
    tile_T = first_tile + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = tile_T < last_tile
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    base_T, end_T, seen_T = row_ends(tile_T, past, length, window, QUERY, KEY, WINDOWED)
    end_T = tl.where(real_T, end_T, -1)

    lane_M = tl.arange(0, BLOCK_M)
    q_row = (batch * heads + own).to(tl.int64) * row_tiles
    k_row = (batch * kv_heads + tl.load(head_ptr + own) // GROUP).to(tl.int64) * key_tiles
    line_T = (batch * heads + own).to(tl.int64) * (last_tile - first_tile) + tile_T - first_tile
    order_T = order_ptr + line_T * key_tiles
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        tile_M = start + lane_M
        score_TM = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        # A few numbers of the heads at a time: three products of halves each make one of float32.
        for first_number in tl.range(0, D, BLOCK_D):
            number_D = first_number + tl.arange(0, BLOCK_D)
            q_at = q_ptr + (q_row + tile_T)[:, None] * D + number_D[None, :]
            k_at = k_ptr + (k_row + tile_M)[:, None] * D + number_D[None, :]
            q_TD = tl.load(q_at, mask=real_T[:, None] & (number_D < D)[None, :], other=0.0)
            k_MD = tl.load(k_at, mask=(tile_M < key_tiles)[:, None] & (number_D < D)[None, :], other=0.0)
            score_TM = tl.dot(q_TD, tl.trans(k_MD), score_TM, input_precision=PRECISION)
        score_TM *= scale
        # What is not a number compares with nothing: it becomes the lowest number, as in the torch builder.
        score_TM = tl.where(score_TM == score_TM, score_TM, -3.4028234663852886e38)
        bits_TM = score_TM.to(tl.int32, bitcast=True)
        order_TM = tl.where(bits_TM < 0, bits_TM ^ 2147483647, bits_TM)
        mandatory_TM = (tile_M == 0)[None, :] | (tile_M[None, :] >= base_T[:, None] - 1)
        order_TM = tl.where(mandatory_TM, MANDATORY, order_TM)
        order_TM = tl.where(tile_M[None, :] >= seen_T[:, None], order_TM, HIDDEN)
        keep_TM = tile_M[None, :] <= end_T[:, None]
        tl.store(order_T[:, None] + tile_M[None, :], order_TM, mask=keep_TM)
