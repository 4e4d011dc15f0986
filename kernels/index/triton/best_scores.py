"""Device code that chooses the best of a row of scores: the columns and the slashes of each vertical-slash head.

The k-th largest number is found by one program in a few passes over the row. Numbers are the bit patterns of float32
scores that are 0 or more, which order like the scores; -1 means "none". The chosen entries of a row are those above a
threshold, and of those equal to it the ones up to an index: the lower index wins, as in topk.py. Columns are listed;
slashes need no list, their threshold is enough.

Rows of scores are padded to a multiple of PADDING with -1, which is never chosen, so that they can be read in large
steps: where the compiler can see that `count` and the row's start are multiples of 4, four numbers are loaded at once.
Rows are shorter than 2 ** 21 (LONGEST in sizes.py).

Shapes: S keys, C listed columns.
"""

from typing import no_type_check

import triton
import triton.language as tl

NOTHING = tl.constexpr(2147483647)  # a threshold that no score exceeds


@triton.jit
@no_type_check
def _count_from(row_ptr, count, first, second, third, BLOCK: tl.constexpr):
    """How many of the numbers are at least each of three bounds, which are 0 or more."""
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
    """How many entries equal `number`."""
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
    """Whether an entry is among the best ones."""
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
