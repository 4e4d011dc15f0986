"""Device code that chooses tile diagonals within the tiles that a row may have.

Slashes are taken in order of score (equal ones the lower offset first) until the next would make some row exceed its
bound. No sorting is needed: a diagonal enters with the best slash that crosses it, its key, and all diagonals of one
slash enter together; so those are kept whose key is above the key of the first diagonal that has no room any more.

Shapes: E entries, see crossings.py.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.device.ranking import count_equal, kth_largest, place_of_equal


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
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

    # The last row sees the farthest, so it is the fullest: key tile 0, and a tile for each chosen distance nearer.
    last_base = (past + tl.maximum(length - past - 1, 0) // QUERY * QUERY) // KEY
    counted = last_base + RIGHT
    threshold, found = kth_largest(best_row, counted, bound, BLOCK)
    limit_offset = -1
    if threshold >= 0:
        # Those equal to the first diagonal without room: of a better slash, of the same, or of a worse one. The lowest
        # offset of equal scores never falls from one diagonal to the next, so ranks among them follow the entries.
        above = found - count_equal(best_row, counted, threshold, BLOCK)
        place = place_of_equal(best_row, counted, threshold, bound - above, BLOCK)
        limit_offset = tl.load(offset_row + place, mask=place < counted, other=-1)

    lane = tl.arange(0, BLOCK)
    written = 0
    for start in tl.range(0, entries, BLOCK):
        entry = start + lane
        real = entry < entries
        best = tl.load(best_row + entry, mask=real, other=-1)
        offset = tl.load(offset_row + entry, mask=real, other=2147483647)
        keep = (best > threshold) | ((best == threshold) & (offset < limit_offset))
        keep = (keep & (best >= 0) & real & (entry <= counted)).to(tl.int32)
        within = written + tl.cumsum(keep, 0)
        tl.store(code_row + entry, within * 2 + keep, mask=real)
        tl.store(near_row + within - 1, entry - RIGHT, mask=(keep != 0) & (within <= most))
        written += tl.sum(keep)
