"""The choice of a step, placed in a hot set by one Triton kernel: `SlotTable.place` with room in a captured step.

Sinks and chosen tokens get slots; recent tokens have rows of a ring already. What a slot may be worth at most to be
replaced is found bit by bit, so that nothing is sorted. A program reads what other threads of its own wrote, behind
barriers; no two programs share memory but the counters.

Shapes: B batch, g lists of a row, N chosen tokens, M listed tokens that need slots (sinks and chosen), A attended rows
(M and recent), H slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import AGEING, USE, SlotTable

_WORTH_BITS = (USE << AGEING).bit_length()  # a slot that is chosen in every step comes to no more


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """Where the tokens of a step lie, and which have to be fetched: int32, at addresses that do not change."""

    rows_BgA: torch.Tensor  # the row of every attended token: slots, then places in the ring; -1 where there is none
    totals_B: torch.Tensor  # how many
    missed_BgM: torch.Tensor  # tokens to fetch, in the order of the list; the rest is undefined
    into_BgM: torch.Tensor  # their slots
    misses_Bg: torch.Tensor  # how many

    @classmethod
    def empty(cls, table: SlotTable, most: int, recent: int) -> PlacedStep:
        """Room for a step.

        Args:
            table: where the tokens get their slots, at most MOST_SLOTS of them.
            most: tokens that a row attends to.
            recent: of which so many are recent.
        """
        (batch, lists, _), device = table.token_BgH.shape, table.token_BgH.device

        def room(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        slotted = (batch, lists, most - recent)
        return cls(room(batch, lists, most), room(batch), room(*slotted), room(*slotted), room(batch, lists))


def place_step(
    table: SlotTable,
    selection: Selection,
    lengths_B: torch.Tensor,
    ring: int,
    into: PlacedStep,
    counts_3: torch.Tensor,
    layers: int,
) -> None:
    """Gives the sinks and the chosen tokens of a step slots, and writes where all attended tokens lie.

    Args:
        selection: no row attends to everything, or its list is left empty.
        ring: rows behind the slots; token t lies in row `slots + t % ring` while it is recent.
        counts_3: int64, added to: steps, tokens that need slots, and misses, each times `layers`.
        layers: that share the choice.
    """
    batch, lists, most = into.missed_BgM.shape
    chosen = selection.chosen_BgN
    across = chosen.stride(1) if chosen.shape[1] > 1 else 0
    with torch.cuda.device_of(chosen):
        place_kernel[(lists, batch)](
            chosen, selection.counts_B, lengths_B, into.rows_BgA, into.totals_B, into.missed_BgM, into.into_BgM,
            into.misses_Bg, table.slot_of_BgC, table.token_BgH, table.worth_BgH, counts_3,
            chosen.stride(0), across, selection.sink, selection.recent, most, table.slots, ring, table.capacity + 1,
            layers, BLOCK_M=triton.next_power_of_2(most), BLOCK_R=triton.next_power_of_2(selection.recent),
            BLOCK_H=triton.next_power_of_2(table.slots), USE=USE, AGEING=AGEING, WORTH_BITS=_WORTH_BITS, num_warps=16,
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["stride_B", "stride_g", "sink", "recent", "most", "slots", "ring", "columns", "layers"])
def place_kernel(
    chosen_ptr, counts_ptr, lengths_ptr, rows_ptr, totals_ptr, missed_ptr, into_ptr, misses_ptr,
    slot_of_ptr, token_ptr, worth_ptr, reads_ptr,
    stride_B, stride_g, sink, recent, most, slots, ring, columns, layers,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, USE: tl.constexpr, AGEING: tl.constexpr,
    WORTH_BITS: tl.constexpr,
):  # fmt: skip
    """Grid: (lists, batch)."""
    batch = tl.program_id(1)
    row = (batch * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    lanes_M = tl.arange(0, BLOCK_M)
    lanes_R = tl.arange(0, BLOCK_R)
    lanes_H = tl.arange(0, BLOCK_H)
    real_M = lanes_M < most
    real_H = lanes_H < slots
    slot_of_row = slot_of_ptr + row * columns
    token_row = token_ptr + row * (slots + 1)
    worth_row = worth_ptr + row * (slots + 1)
    missed_row = missed_ptr + row * most
    into_row = into_ptr + row * most
    rows_row = rows_ptr + row * (most + recent)
    chosen_row = chosen_ptr + batch.to(tl.int64) * stride_B + tl.program_id(0).to(tl.int64) * stride_g
    count = tl.load(counts_ptr + batch)
    length = tl.load(lengths_ptr + batch)
    listed = tl.where(count < 0, 0, sink + count)
    newest = tl.where(count < 0, 0, recent)
    worth_H = tl.load(worth_row + lanes_H, mask=real_H, other=0)
    tl.store(worth_row + lanes_H, worth_H - (worth_H >> AGEING), mask=real_H)
    tl.debug_barrier()

    given_M = (lanes_M < listed) & real_M
    token_M = tl.load(chosen_row + lanes_M - sink, mask=given_M & (lanes_M >= sink), other=-1)
    token_M = tl.where(given_M & (lanes_M < sink), lanes_M, token_M)
    slot_M = tl.load(slot_of_row + token_M, mask=token_M >= 0, other=-1)
    missed_M = (token_M >= 0) & (slot_M < 0)
    rank_M = tl.cumsum(missed_M.to(tl.int32), 0) - 1
    misses = tl.sum(missed_M.to(tl.int32), 0)
    tl.store(missed_row + rank_M, token_M, mask=missed_M)
    # what is held in registers from here on is little: a miss shows its rank until it has a slot
    tl.store(rows_row + lanes_M, tl.where(missed_M, -2 - rank_M, slot_M), mask=given_M)
    worth_M = tl.load(worth_row + slot_M, mask=slot_M >= 0, other=0)
    # and a hit a negative number until it is known which slots are replaced
    tl.store(worth_row + slot_M, -USE - worth_M, mask=slot_M >= 0)
    tl.store(misses_ptr + row, misses)
    tl.store(totals_ptr + batch, listed + newest)  # the same from every list
    tl.atomic_add(reads_ptr + 1, tl.sum((token_M >= 0).to(tl.int64), 0) * layers, sem="relaxed")
    tl.atomic_add(reads_ptr + 2, (misses * layers).to(tl.int64), sem="relaxed")
    if row == 0:
        tl.atomic_add(reads_ptr, layers.to(tl.int64), sem="relaxed")
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

    rank_M = -2 - tl.load(rows_row + lanes_M, mask=given_M, other=-1)
    missed_M = rank_M >= 0
    token_M = tl.load(missed_row + rank_M, mask=missed_M, other=-1)
    slot_M = tl.load(into_row + rank_M, mask=missed_M, other=-1)
    tl.store(rows_row + lanes_M, slot_M, mask=missed_M)
    tl.store(slot_of_row + token_M, slot_M, mask=missed_M)
    tl.store(token_row + slot_M, token_M, mask=missed_M)
    tl.store(worth_row + slot_M, tl.full([BLOCK_M], USE, tl.int32), mask=missed_M)
    # `given_M` lanes are written above; recent tokens follow them
    recent_R = slots + (length - recent + lanes_R) % ring
    tl.store(rows_row + listed + lanes_R, recent_R, mask=lanes_R < newest)
