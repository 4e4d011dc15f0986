"""Device code that chooses the best columns and the best slashes of each head.

The chosen entries of a row are those above a threshold, and of those equal to it the ones up to an index: the lower
index wins, as in topk.py. Columns are listed; slashes need no list, their threshold is enough.

Rows of scores are padded to a multiple of PADDING with -1, which is never chosen, so that they can be read in large
steps.

Shapes: S keys, C listed columns.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.device.ranking import count_equal, kth_largest, place_of_equal

NOTHING = tl.constexpr(2147483647)  # a threshold that no score exceeds


@triton.jit
@no_type_check
def chosen(number, place, threshold, last_equal):
    """Whether an entry is among the best ones."""
    return (number > threshold) | ((number == threshold) & (place <= last_equal))


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
            last_equal = place_of_equal(row_ptr, count, threshold, k - above, BLOCK)
    return threshold, last_equal


@triton.jit
@no_type_check
def _list_chosen(row_ptr, count, threshold, last_equal, list_ptr, width, BLOCK: tl.constexpr):
    """The chosen entries, ascending; the rest of the list is -1 (NO_COLUMN)."""
    lane = tl.arange(0, BLOCK)
    written = 0
    for start in tl.range(0, count, BLOCK):
        place = start + lane
        number = tl.load(row_ptr + place, mask=place < count, other=-1)
        keep = chosen(number, place, threshold, last_equal) & (number >= 0)
        slot = written + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(list_ptr + slot, place, mask=keep & (slot < width))
        written += tl.sum(keep.to(tl.int32))
    for start in tl.range(tl.minimum(written, width), width, BLOCK):
        tl.store(list_ptr + start + lane, tl.full([BLOCK], -1, tl.int32), mask=start + lane < width)


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again. But `keys`, the
# padded length, always is a multiple of PADDING, which the compiler should know.
@triton.jit(do_not_specialize=["heads", "all_heads", "width"])
@no_type_check
def select_kernel(
    vertical_ptr, slash_ptr, columns_ptr, choice_ptr, length_ptr, head_ptr, column_counts_ptr, slash_counts_ptr,
    heads, all_heads, keys, width,
    PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, 2, batch). Columns of a head go to its place among all heads; slashes leave their threshold."""
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
