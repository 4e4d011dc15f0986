"""`SlotTable.place` as one Triton kernel, a program for each list of a row: what a captured step has room for.

What a slot may be worth at most to go is found bit by bit, so that nothing is sorted. A program reads what other
threads of its own wrote, behind barriers; no two programs share memory.

Shapes: B batch, g lists of a row, M listed tokens, H slots, C tokens a row may have.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.slots import AGEING, USE, Placed, SlotTable

_WORTH_BITS = (USE << AGEING).bit_length()  # a slot that is chosen in every step comes to no more


def place(table: SlotTable, tokens_BgM: torch.Tensor) -> Placed:
    """As `table.place`, in one launch.

    Args:
        table: whose tensors are written.
        tokens_BgM: int32, contiguous: each token once, in any order; negative entries are skipped.
    """
    batch, lists, most = tokens_BgM.shape
    found = Placed(*(torch.empty_like(tokens_BgM) for _ in range(3)))
    with torch.cuda.device_of(tokens_BgM):
        place_kernel[(lists, batch)](
            tokens_BgM, found.slots_BgM, found.missed_BgM, found.into_BgM,
            table.slot_of_BgC, table.token_BgH, table.worth_BgH, most, table.slots, table.capacity + 1,
            BLOCK_M=triton.next_power_of_2(most), BLOCK_H=triton.next_power_of_2(table.slots), USE=USE, AGEING=AGEING,
            WORTH_BITS=_WORTH_BITS, num_warps=16,
        )  # fmt: skip
    return found


@no_type_check
@triton.jit(do_not_specialize=["most", "slots", "columns"])
def place_kernel(
    tokens_ptr, slots_ptr, missed_ptr, into_ptr, slot_of_ptr, token_ptr, worth_ptr, most, slots, columns,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, USE: tl.constexpr, AGEING: tl.constexpr, WORTH_BITS: tl.constexpr,
):  # fmt: skip
    """Grid: (lists, batch)."""
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    lanes_M = tl.arange(0, BLOCK_M)
    lanes_H = tl.arange(0, BLOCK_H)
    slot_of_row = slot_of_ptr + row * columns
    token_row = token_ptr + row * (slots + 1)
    worth_row = worth_ptr + row * (slots + 1)
    tokens_row = tokens_ptr + row * most
    slots_row = slots_ptr + row * most
    missed_row = missed_ptr + row * most
    into_row = into_ptr + row * most
    real_H = lanes_H < slots
    worth_H = tl.load(worth_row + lanes_H, mask=real_H, other=0)
    tl.store(worth_row + lanes_H, worth_H - (worth_H >> AGEING), mask=real_H)
    tl.debug_barrier()

    token_M = tl.load(tokens_row + lanes_M, mask=lanes_M < most, other=-1)
    slot_M = tl.load(slot_of_row + token_M, mask=token_M >= 0, other=-1)
    missed_M = (token_M >= 0) & (slot_M < 0)
    rank_M = tl.cumsum(missed_M.to(tl.int32), 0) - 1
    misses = tl.sum(missed_M.to(tl.int32), 0)
    tl.store(missed_row + rank_M, token_M, mask=missed_M)
    # what is held in registers from here on is little: a miss shows its rank until it has a slot
    tl.store(slots_row + lanes_M, tl.where(missed_M, -2 - rank_M, slot_M), mask=lanes_M < most)
    worth_M = tl.load(worth_row + slot_M, mask=slot_M >= 0, other=0)
    # and a hit a negative number until it is known which slots go
    tl.store(worth_row + slot_M, -USE - worth_M, mask=slot_M >= 0)
    unused_M = (lanes_M >= misses) & (lanes_M < most)
    tl.store(into_row + lanes_M, tl.full([BLOCK_M], -1, tl.int32), mask=unused_M)
    tl.store(missed_row + lanes_M, tl.full([BLOCK_M], -1, tl.int32), mask=unused_M)
    tl.debug_barrier()

    worth_H = tl.load(worth_row + lanes_H, mask=real_H, other=-1)
    tl.store(worth_row + lanes_H, -worth_H, mask=real_H & (worth_H < 0))
    worth_H = tl.where(worth_H < 0, 1 << WORTH_BITS, worth_H)
    bound = 0  # the largest number that fewer slots than are needed stay below
    for bit in tl.static_range(WORTH_BITS):
        higher = bound + (1 << (WORTH_BITS - 1 - bit))
        below = tl.sum((worth_H < higher).to(tl.int32), 0)
        bound = tl.where(below < misses, higher, bound)
    level_H = (worth_H == bound).to(tl.int32)
    room = misses - tl.sum((worth_H < bound).to(tl.int32), 0)
    goes_H = (worth_H < bound) | ((level_H > 0) & (tl.cumsum(level_H, 0) <= room))
    former_H = tl.load(token_row + lanes_H, mask=goes_H, other=-1)
    tl.store(slot_of_row + former_H, tl.full([BLOCK_H], -1, tl.int32), mask=former_H >= 0)
    tl.store(into_row + tl.cumsum(goes_H.to(tl.int32), 0) - 1, lanes_H, mask=goes_H)
    tl.debug_barrier()

    rank_M = -2 - tl.load(slots_row + lanes_M, mask=lanes_M < most, other=-1)
    missed_M = rank_M >= 0
    token_M = tl.load(tokens_row + lanes_M, mask=missed_M, other=-1)
    slot_M = tl.load(into_row + rank_M, mask=missed_M, other=-1)
    tl.store(slots_row + lanes_M, slot_M, mask=missed_M)
    tl.store(slot_of_row + token_M, slot_M, mask=missed_M)
    tl.store(token_row + slot_M, token_M, mask=missed_M)
    tl.store(worth_row + slot_M, tl.full([BLOCK_M], USE, tl.int32), mask=missed_M)
