"""Device code that writes the index of every row tile: its tiles, their count, and its live columns.

A row tile has the chosen distances counted back from its own place, between the first tile that it sees and its last,
and key tile 0. Columns outside these tiles are computed singly: their live bits, 32 to a word.

Shapes: T row tiles of a program, W listed tiles, N words, E entries, see crossings.py.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _code_at(code_row, distance, entries, RIGHT: tl.constexpr, keep):
    """2 * (chosen distances up to this one) + (is it chosen); distances out of range read the nearest entry."""
    entry = tl.minimum(tl.maximum(distance + RIGHT, 0), entries - 1)
    return tl.load(code_row + entry, mask=keep, other=0)


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(
    do_not_specialize=["window", "heads", "all_heads", "row_tiles", "entries", "most", "width", "columns", "words"]
)
@no_type_check
def rows_kernel(
    code_ptr, near_ptr, columns_ptr, tiles_ptr, counts_ptr, live_ptr, past_ptr, length_ptr, head_ptr,
    window, heads, all_heads, row_tiles, entries, most, width, columns, words,
    QUERY: tl.constexpr, KEY: tl.constexpr, RIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of row tiles, heads, batch)."""
    own = tl.program_id(1)
    batch = tl.program_id(2)
    row = (batch * heads + own).to(tl.int64)
    place = (batch * all_heads + tl.load(head_ptr + own)).to(tl.int64)
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    code_row = code_ptr + row * entries
    near_row = near_ptr + row * most

    tile_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = tile_T < row_tiles
    first_T = past + tile_T * QUERY
    holds_T = first_T < length  # padding row tiles hold nothing
    last_T = tl.where(holds_T, tl.minimum(first_T + QUERY, length) - 1, -1)
    base_T = first_T // KEY
    end_T = tl.where(holds_T, last_T // KEY, -1)
    seen_T = tl.zeros([BLOCK_T], tl.int32)
    if WINDOWED:
        seen_T = tl.maximum(first_T - window + 1, 0) // KEY

    within_T = _code_at(code_row, base_T - seen_T, entries, RIGHT, real_T) // 2
    right_of_T = _code_at(code_row, base_T - end_T - 1, entries, RIGHT, real_T) // 2
    has_first_T = _code_at(code_row, base_T, entries, RIGHT, real_T) % 2
    sink_T = ((seen_T == 0) & (end_T >= 0) & (has_first_T == 0)).to(tl.int32)
    count_T = tl.maximum(within_T - right_of_T, 0) + sink_T
    line_T = place * row_tiles + tile_T
    tl.store(counts_ptr + line_T, count_T, mask=real_T)

    lane_W = tl.arange(0, BLOCK_W)
    for start in tl.range(0, width, BLOCK_W):
        slot_TW = (start + lane_W)[None, :]
        listed_TW = (slot_TW < count_T[:, None]) & real_T[:, None]
        # Tiles ascend, so distances fall.
        entry_TW = (within_T + sink_T - 1)[:, None] - slot_TW
        far_TW = tl.load(near_row + entry_TW, mask=listed_TW & (slot_TW >= sink_T[:, None]), other=0)
        tile_TW = tl.where(slot_TW < sink_T[:, None], 0, base_T[:, None] - far_TW)
        at_TW = tiles_ptr + line_T[:, None] * width + slot_TW
        tl.store(at_TW, tl.where(listed_TW, tile_TW, -1), mask=real_T[:, None] & (slot_TW < width))

    lane_N = tl.arange(0, BLOCK_N)
    bit_B = tl.arange(0, 32)
    column_row = columns_ptr + place * columns
    for start in tl.range(0, words, BLOCK_N):
        slot_NB = (start + lane_N)[:, None] * 32 + bit_B[None, :]
        j_NB = tl.load(column_row + slot_NB, mask=slot_NB < columns, other=-1)[None, :, :]
        first_tile_NB = j_NB < KEY
        keep_TNB = (j_NB >= 0) & (j_NB <= last_T[:, None, None]) & (~first_tile_NB)
        if WINDOWED:
            keep_TNB = keep_TNB & (first_T[:, None, None] - j_NB < window)
        code_TNB = _code_at(code_row, base_T[:, None, None] - j_NB // KEY, entries, RIGHT, keep_TNB)
        live_TNB = (keep_TNB & (code_TNB % 2 == 0)).to(tl.int32)
        word_TN = tl.sum(live_TNB << bit_B[None, None, :], 2)
        at_TN = live_ptr + line_T[:, None] * words + (start + lane_N)[None, :]
        tl.store(at_TN, word_TN, mask=real_T[:, None] & (start + lane_N < words)[None, :])
