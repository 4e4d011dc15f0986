"""`SlotTable.place` as one Triton kernel, a program for each list of a row: what a captured step has room for.

The age that tokens must have reached to go is found bit by bit, so that nothing is sorted. A program reads what other
threads of its own wrote, behind barriers; no two programs share memory.

Shapes: B batch, g lists of a row, M listed tokens, H slots, C tokens a row may have.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.slots import OLDEST, Placed, SlotTable

_AGE_BITS = OLDEST.bit_length()


def place(table: SlotTable, tokens_BgM: torch.Tensor) -> Placed:
    """As `table.place`, in one launch besides that of the count of steps.

    Args:
        table: whose tensors are written.
        tokens_BgM: int32, contiguous: each token once, in any order; negative entries are skipped.
    """
    batch, lists, most = tokens_BgM.shape
    found = Placed(*(torch.empty_like(tokens_BgM) for _ in range(3)))
    table.step_1 += 1
    with torch.cuda.device_of(tokens_BgM):
        place_kernel[(lists, batch)](
            tokens_BgM, found.slots_BgM, found.missed_BgM, found.into_BgM,
            table.slot_of_BgC, table.token_BgH, table.chosen_at_BgH, table.step_1,
            most, table.slots, table.capacity + 1,
            BLOCK_M=triton.next_power_of_2(most), BLOCK_H=triton.next_power_of_2(table.slots), OLDEST=OLDEST,
            AGE_BITS=_AGE_BITS, num_warps=16,
        )  # fmt: skip
    return found


@no_type_check
@triton.jit(do_not_specialize=["most", "slots", "columns"])
def place_kernel(
    tokens_ptr, slots_ptr, missed_ptr, into_ptr, slot_of_ptr, token_ptr, chosen_at_ptr, step_ptr, most, slots, columns,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, OLDEST: tl.constexpr, AGE_BITS: tl.constexpr,
):  # fmt: skip
    """Grid: (lists, batch)."""
    row = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    lanes_M = tl.arange(0, BLOCK_M)
    lanes_H = tl.arange(0, BLOCK_H)
    slot_of_row = slot_of_ptr + row * columns
    token_row = token_ptr + row * (slots + 1)
    chosen_at_row = chosen_at_ptr + row * (slots + 1)
    missed_row = missed_ptr + row * most
    into_row = into_ptr + row * most
    step = tl.load(step_ptr)

    token_M = tl.load(tokens_ptr + row * most + lanes_M, mask=lanes_M < most, other=-1)
    slot_M = tl.load(slot_of_row + token_M, mask=token_M >= 0, other=-1)
    hit_M = slot_M >= 0
    missed_M = (token_M >= 0) & (slot_M < 0)
    rank_M = tl.cumsum(missed_M.to(tl.int32), 0) - 1
    misses = tl.sum(missed_M.to(tl.int32), 0)
    tl.store(chosen_at_row + slot_M, step, mask=hit_M)
    tl.debug_barrier()

    real_H = lanes_H < slots
    chosen_at_H = tl.load(chosen_at_row + lanes_H, mask=real_H, other=0)
    age_H = tl.where(real_H, tl.minimum(step - chosen_at_H, OLDEST), -1)
    youngest = 0  # of those to go: the greatest age that so many slots have reached
    for bit in tl.static_range(AGE_BITS):
        age = youngest + (1 << (AGE_BITS - 1 - bit))
        reached = tl.sum((age_H >= age).to(tl.int32), 0)
        youngest = tl.where(reached >= misses, age, youngest)
    older_H = age_H > youngest
    level_H = (age_H == youngest).to(tl.int32)
    room = misses - tl.sum(older_H.to(tl.int32), 0)
    goes_H = older_H | ((level_H > 0) & (tl.cumsum(level_H, 0) <= room))
    place_H = tl.cumsum(goes_H.to(tl.int32), 0) - 1
    former_H = tl.load(token_row + lanes_H, mask=goes_H, other=-1)
    tl.store(slot_of_row + former_H, tl.full([BLOCK_H], -1, tl.int32), mask=former_H >= 0)
    tl.store(into_row + place_H, lanes_H, mask=goes_H)
    tl.store(missed_row + rank_M, token_M, mask=missed_M)
    unused_M = (lanes_M >= misses) & (lanes_M < most)
    tl.store(into_row + lanes_M, tl.full([BLOCK_M], -1, tl.int32), mask=unused_M)
    tl.store(missed_row + lanes_M, tl.full([BLOCK_M], -1, tl.int32), mask=unused_M)
    tl.debug_barrier()

    new_M = tl.load(into_row + rank_M, mask=missed_M, other=-1)
    tl.store(slot_of_row + token_M, new_M, mask=missed_M)
    tl.store(token_row + new_M, token_M, mask=missed_M)
    tl.store(chosen_at_row + new_M, step, mask=missed_M)
    tl.store(slots_ptr + row * most + lanes_M, tl.where(hit_M, slot_M, new_M), mask=lanes_M < most)
