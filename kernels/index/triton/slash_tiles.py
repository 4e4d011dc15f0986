"""Device code of the tiles of vertical-slash heads, in three launches: crossings, diagonals, rows.

Row tiles are whole multiples of key tiles, so a slash crosses the same tiles, counted back from the row's own, in every
row (see vertical_slash.py of the torch builder). Distance d of a tile: key tile of the first row, less the tile; the
entry of distance d is d + RIGHT. A tile at distance d holds the offsets from d * key + phase - key + 1 on, query + key
- 1 of them, `phase` being how far into a key tile the row tiles begin.

Slashes are taken in order of score (equal ones the lower offset first) until the next would make some row exceed its
bound. No sorting is needed: a diagonal enters with the best slash that crosses it, its key, and all diagonals of one
slash enter together; so those are taken whose key is above the key of the first diagonal that has no room any more.

A row tile has the chosen distances counted back from its own tile, between the first tile that it sees and its last,
and key tile 0. Columns outside these tiles are computed singly: their live bits, 32 to a word.

Shapes: E entries, X offsets of a tile, T row tiles of a program, W listed tiles, N words.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.triton.best_scores import chosen, count_equal, index_of_equal, kth_largest


@triton.jit(do_not_specialize=["heads", "keys", "entries"])
@no_type_check
def crossings_kernel(
    slash_ptr, choice_ptr, best_ptr, offset_ptr, past_ptr, length_ptr, heads, keys, entries,
    QUERY: tl.constexpr, KEY: tl.constexpr, RIGHT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of entries, heads, batch). Writes score bits (-1: no slash) and the lowest offset that has them.

    Mandatory tiles, those of the diagonal and the one before it, get a score above all others.
    """
    own = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch * heads + own
    length = tl.load(length_ptr + batch)
    phase = tl.load(past_ptr + batch) % KEY
    threshold = tl.load(choice_ptr + row * 2)
    last_equal = tl.load(choice_ptr + row * 2 + 1)

    entry_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    distance_E = entry_E - RIGHT
    lane_X = tl.arange(0, BLOCK_X)
    offset_EX = (distance_E * KEY + phase - KEY + 1)[:, None] + lane_X[None, :]
    real_EX = (lane_X < QUERY + KEY - 1)[None, :] & (offset_EX >= 0) & (offset_EX < length)
    scores_ptr = slash_ptr + row.to(tl.int64) * keys
    number_EX = tl.load(scores_ptr + offset_EX, mask=real_EX, other=-1)
    number_EX = tl.where(real_EX & chosen(number_EX, offset_EX, threshold, last_equal), number_EX, -1)
    best_E = tl.max(number_EX, 1)
    lowest_E = tl.min(tl.where(number_EX == best_E[:, None], offset_EX, 2147483647), 1)

    mandatory_E = (distance_E > -((phase + QUERY - 1) // KEY + 1)) & (distance_E <= 1)
    best_E = tl.where(mandatory_E, 2147483647, best_E)
    at_E = row.to(tl.int64) * entries + entry_E
    tl.store(best_ptr + at_E, best_E, mask=entry_E < entries)
    tl.store(offset_ptr + at_E, lowest_E, mask=entry_E < entries)


@triton.jit
@no_type_check
def _affordable(best_row, offset_row, start, stop, bound, BLOCK: tl.constexpr):
    """What keeps a row that counts the diagonals from `start` to `stop` within its bound: those above a threshold, and
    of those equal to it the ones of a lower offset than a limit."""
    best_row += start
    count = stop - start
    threshold, found = kth_largest(best_row, count, bound, BLOCK)
    limit = -1
    if threshold >= 0:
        # Those equal to the first diagonal without room: of a better slash, of the same, or of a worse one. The lowest
        # offset of equal scores never falls from one diagonal to the next, so ranks among them follow the entries.
        above = found - count_equal(best_row, count, threshold, BLOCK)
        index = index_of_equal(best_row, count, threshold, bound - above, BLOCK)
        limit = tl.load(offset_row + start + index, mask=index < count, other=-1)
    return threshold, limit


@triton.jit(do_not_specialize=["heads", "entries", "most"])
@no_type_check
def diagonals_kernel(
    best_ptr, offset_ptr, code_ptr, near_ptr, past_ptr, length_ptr, bounds_ptr, heads, entries, most,
    QUERY: tl.constexpr, KEY: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, batch). Writes the chosen distances, ascending, and 2 * (how many up to each) + (is it chosen)."""
    row = tl.program_id(1) * heads + tl.program_id(0)
    past = tl.load(past_ptr + tl.program_id(1))
    length = tl.load(length_ptr + tl.program_id(1))
    bound = tl.load(bounds_ptr + row)
    best_row = best_ptr + row.to(tl.int64) * entries
    offset_row = offset_ptr + row.to(tl.int64) * entries
    code_row = code_ptr + row.to(tl.int64) * entries
    near_row = near_ptr + row.to(tl.int64) * most

    # A row holds key tile 0, and a tile for each chosen distance nearer, as far as it has rows in that tile. The
    # fullest is the last, which sees the farthest but may be ragged, or the whole one before it.
    phase = past % KEY
    first = past + tl.maximum(length - past - 1, 0) // QUERY * QUERY
    base = first // KEY
    ragged = RIGHT - (tl.maximum(first, length - 1) // KEY - base)
    whole = RIGHT - (phase + QUERY - 1) // KEY
    before = tl.where((first > past) & (ragged > whole), base - QUERY // KEY + RIGHT, whole)
    threshold, limit_offset = _affordable(best_row, offset_row, ragged, base + RIGHT, bound, BLOCK)
    threshold_before, limit_before = _affordable(best_row, offset_row, whole, before, bound, BLOCK)

    lane = tl.arange(0, BLOCK)
    written = 0
    for start in tl.range(0, entries, BLOCK):
        entry = start + lane
        real = entry < entries
        best = tl.load(best_row + entry, mask=real, other=-1)
        offset = tl.load(offset_row + entry, mask=real, other=2147483647)
        keep = (best > threshold) | ((best == threshold) & (offset < limit_offset))
        keep &= (best > threshold_before) | ((best == threshold_before) & (offset < limit_before))
        keep = (keep & (best >= 0) & real & (entry <= base + RIGHT)).to(tl.int32)
        within = written + tl.cumsum(keep, 0)
        tl.store(code_row + entry, within * 2 + keep, mask=real)
        tl.store(near_row + within - 1, entry - RIGHT, mask=(keep != 0) & (within <= most))
        written += tl.sum(keep)


@triton.jit
@no_type_check
def _code_at(code_row, distance, entries, RIGHT: tl.constexpr, keep):
    """2 * (chosen distances up to this one) + (is it chosen); distances out of range read the nearest entry."""
    entry = tl.minimum(tl.maximum(distance + RIGHT, 0), entries - 1)
    return tl.load(code_row + entry, mask=keep, other=0)


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
    head_row = (batch * all_heads + tl.load(head_ptr + own)).to(tl.int64)
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
    line_T = head_row * row_tiles + tile_T
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
    column_row = columns_ptr + head_row * columns
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
