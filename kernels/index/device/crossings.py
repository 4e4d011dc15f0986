"""Device code that gives every tile diagonal the best of the chosen slashes that cross it.

Row tiles are whole multiples of key tiles, so a slash crosses the same tiles, counted back from the row's own, in every
row (see diagonals.py of the torch builder). Distance d of a tile: key tile of the first row, less the tile; the entry
of distance d is d + RIGHT. A tile at distance d holds the offsets from d * key + phase - key + 1 on, query + key - 1 of
them, `phase` being how far into a key tile the row tiles begin.

Shapes: E entries, X offsets of a tile.
"""

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.device.select import chosen


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
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
