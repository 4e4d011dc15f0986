"""Device code of the columns and the tiles of vertical-slash heads: select, crossings, diagonals, rows.

The k-th largest number is found by one program in a few passes over the row. Numbers are the bit patterns of float32
scores that are 0 or more, which order like the scores; -1 means "none". The chosen entries of a row are those above a
threshold, and of those equal to it the ones up to an index: the lower index wins, as in topk.py. Columns are listed;
slashes need no list, their threshold is enough.

Rows of scores are padded to a multiple of PADDING with -1, which is never chosen, so that they can be read in large
steps: where the compiler can see that `count` and the row's start are multiples of 4, four numbers are loaded at once.
Rows are shorter than 2 ** 21 (LONGEST in sizes.py).

Row tiles are whole multiples of key tiles, so a slash crosses the same tiles, counted back from the row's own, in every
row (see vertical_slash.py of the torch builder). Distance d of a tile: key tile of the first row, less the tile; the
entry of distance d is d + RIGHT. A tile at distance d holds the offsets from d * key + phase - key + 1 on, query + key
- 1 of them, `phase` being how far into a key tile the row tiles begin.

Slashes are taken in order of score (equal ones the lower offset first) until the next would make some row exceed its
bound. No sorting is needed: a diagonal enters with the best slash that crosses it, its key, and all diagonals of one
slash enter together; so those are taken whose key is above the key of the first diagonal that has no room any more.

A row tile has the chosen distances counted back from its own tile, between the first tile that it sees and its last,
and key tile 0. Columns outside these tiles are computed singly: their live bits, 32 to a word.

Shapes: S keys, C listed columns; E entries, X offsets of a tile, T row tiles of a program, W listed tiles, N words.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.triton_support import quick

NOTHING = tl.constexpr(2147483647)  # a threshold that no score exceeds


@triton.jit
@no_type_check
def _count_from(row_ptr, count, first, second, third, BLOCK: tl.constexpr):
    """Counts the numbers that are at least each of three bounds, which are 0 or more."""
    lane = tl.arange(0, BLOCK)
    # The sign of a difference, -1 or 0, is added in a single instruction.
    below_first = tl.zeros([BLOCK], tl.int32)
    below_second = tl.zeros([BLOCK], tl.int32)
    below_third = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, count, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < count, other=-1)
        below_first += (number - first) >> 31
        below_second += (number - second) >> 31
        below_third += (number - third) >> 31
    # Three numbers of 21 bits are added up as one: reductions are what a short row waits for.
    turns = tl.cdiv(count, BLOCK)
    packed = (turns + below_third).to(tl.int64) << 42
    packed += (turns + below_second).to(tl.int64) << 21
    total = tl.sum(packed + (turns + below_first).to(tl.int64))
    return (total & 2097151).to(tl.int32), ((total >> 21) & 2097151).to(tl.int32), (total >> 42).to(tl.int32)


@triton.jit
@no_type_check
def _least_from(row_ptr, count, bound, BLOCK: tl.constexpr):
    """The smallest number that is at least `bound`; the largest of all numbers if there is none."""
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 2147483647, tl.int32)
    for start in tl.range(0, count, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < count, other=-1)
        least = tl.minimum(least, tl.where(number >= bound, number, 2147483647))
    return tl.min(least)


@triton.jit
@no_type_check
def kth_largest(row_ptr, count, k, BLOCK: tl.constexpr):
    """The k-th largest (from 1) of `count` numbers, and how many are at least as large; -1 where fewer are 0 or more.

    Two bits a pass from the highest down, until exactly k numbers are left: about ten passes.
    """
    found, one, _ = _count_from(row_ptr, count, 0, 1 << 30, 1 << 30, BLOCK)
    enough = found >= k
    bound = tl.where(one >= k, 1 << 30, 0)
    found = tl.where(one >= k, one, found)
    shift = tl.where(enough, 28, -2)
    while (shift >= 0) & (found != k):
        step = 1 << shift
        one, two, three = _count_from(row_ptr, count, bound + step, bound + 2 * step, bound + 3 * step, BLOCK)
        digit = (one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32)
        bound += digit * step
        found = tl.where(digit == 3, three, tl.where(digit == 2, two, tl.where(digit == 1, one, found)))
        shift -= 2
    return tl.where(enough, _least_from(row_ptr, count, bound, BLOCK), -1), found


@triton.jit
@no_type_check
def count_equal(row_ptr, count, number, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, count, BLOCK):
        entry = tl.load(row_ptr + start + lane, mask=start + lane < count, other=-1)
        equal += ((entry == number) & (start + lane < count)).to(tl.int32)
    return tl.sum(equal)


@triton.jit
@no_type_check
def index_of_equal(row_ptr, count, number, nth, BLOCK: tl.constexpr):
    """Index of the nth entry (from 1) that equals `number`; `count` where there are fewer."""
    lane = tl.arange(0, BLOCK)
    seen = 0
    index = count
    start = 0
    while (seen < nth) & (start < count):
        entry = tl.load(row_ptr + start + lane, mask=start + lane < count, other=-1)
        equal = ((entry == number) & (start + lane < count)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        index = tl.minimum(index, tl.min(tl.where((equal != 0) & (rank == nth), start + lane, count)))
        seen += tl.sum(equal)
        start += BLOCK
    return index


@triton.jit
@no_type_check
def chosen(number, index, threshold, last_equal):
    """Returns whether an entry is among the best ones."""
    return (number > threshold) | ((number == threshold) & (index <= last_equal))


@triton.jit
@no_type_check
def _best(row_ptr, count, k, BLOCK: tl.constexpr):
    """Threshold, and last index among those equal to it, of the best k of a row."""
    threshold = NOTHING
    last_equal = -1
    if k > 0:
        threshold, found = kth_largest(row_ptr, count, k, BLOCK)
        last_equal = count
        if found > k:
            # Two passes, only where equal scores straddle the edge of the choice.
            above = found - count_equal(row_ptr, count, threshold, BLOCK)
            last_equal = index_of_equal(row_ptr, count, threshold, k - above, BLOCK)
    return threshold, last_equal


@triton.jit
@no_type_check
def _list_chosen(row_ptr, count, threshold, last_equal, list_ptr, width, BLOCK: tl.constexpr):
    """The chosen entries, ascending; the rest of the list is -1 (NO_COLUMN)."""
    lane = tl.arange(0, BLOCK)
    written = 0
    for start in tl.range(0, count, BLOCK):
        index = start + lane
        number = tl.load(row_ptr + index, mask=index < count, other=-1)
        keep = chosen(number, index, threshold, last_equal) & (number >= 0)
        slot = written + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(list_ptr + slot, index, mask=keep & (slot < width))
        written += tl.sum(keep.to(tl.int32))
    for start in tl.range(tl.minimum(written, width), width, BLOCK):
        tl.store(list_ptr + start + lane, tl.full([BLOCK], -1, tl.int32), mask=start + lane < width)


# `keys` is specialised on: the padded length always is a multiple of PADDING, which the compiler should know.
@quick
@triton.jit(do_not_specialize=["heads", "all_heads", "width"])
@no_type_check
def select_kernel(
    vertical_ptr, slash_ptr, columns_ptr, choice_ptr, length_ptr, head_ptr, column_counts_ptr, slash_counts_ptr,
    heads, all_heads, keys, width,
    PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, 2, batch). Columns of a head go to its row among all heads; slashes leave their threshold."""
    own = tl.program_id(0)
    batch = tl.program_id(2)
    row = batch * heads + own
    count = tl.cdiv(tl.load(length_ptr + batch), PADDING) * PADDING
    if tl.program_id(1) == 0:
        scores_ptr = vertical_ptr + row.to(tl.int64) * keys
        k = tl.load(column_counts_ptr + row)
        threshold, last_equal = _best(scores_ptr, count, k, BLOCK)
        count = tl.where(k > 0, count, 0)
        list_ptr = columns_ptr + (batch * all_heads + tl.load(head_ptr + own)).to(tl.int64) * width
        _list_chosen(scores_ptr, count, threshold, last_equal, list_ptr, width, BLOCK)
    else:
        scores_ptr = slash_ptr + row.to(tl.int64) * keys
        threshold, last_equal = _best(scores_ptr, count, tl.load(slash_counts_ptr + row), BLOCK)
        tl.store(choice_ptr + row * 2, threshold)
        tl.store(choice_ptr + row * 2 + 1, last_equal)


@quick
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
    """Returns what keeps a row that counts the diagonals from `start` to `stop` within its bound: those above a
    threshold, and of those equal to it the ones of a lower offset than a limit."""
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


@quick
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


@quick
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
