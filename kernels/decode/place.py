"""Kernels that move tokens in a captured step: the choice of a step gets its place in a hot set (`SlotTable.place` with
room in a captured step), missed tokens are fetched from host memory, and the newest tokens are written.

Sinks and chosen tokens get slots; recent tokens have rows of a ring already. What a slot may be worth at most to be
replaced is found bit by bit, so that nothing is sorted. A program reads what other threads of its own wrote, behind
barriers; no two programs share memory but the counters.

Copies that the host queues would need the host to know what to fetch: the kernel that fetches reads the pinned rows
itself. It has 64 programs, or one for each list where there are more lists: it is bounded by the link to host memory,
and runs beside the layers that compute meanwhile. It also writes the token that leaves the recent window at the next
step to host memory, so that a captured step needs no copy of the host's.

Shapes: B batch, g lists of a row, G KV heads, N chosen tokens, M listed tokens that need slots (sinks and chosen), A
attended rows (M and recent), H slots, Q new tokens, C tokens on the host, R rows on the device, D head size, P = 2 for
key and value. In the kernel that fetches: N tokens at a time, X words of 4 bytes of a token's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import AGEING, USE, SlotTable
from sparsekv.kernels.keys import HOST, HOST_TOKENS, LARGEST_FLOAT8, ROWS, KeyView
from sparsekv.kernels.triton_support import interpreting, overlap, overlaps_launches

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
        """Room for a step whose rows attend to `most` tokens, `recent` of them without a slot."""
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


_WORD = 4  # bytes
_PROGRAMS = 64
_AT_ONCE = 2  # tokens that a program reads before it writes them


def gather_missed(
    where_X: torch.Tensor,
    placed: PlacedStep,
    lengths_B: torch.Tensor,
    *,
    kv_heads: int,
    token_bytes: int,
    slots: int,
    ring: int,
    recent: int,
    programs: int | None = None,
) -> None:
    """Copies the missed tokens of one layer to their slots, and one token that is still in the ring to the host.

    Args:
        where_X: int64 [COLUMNS] on the device, as kernels/keys.py says; the addresses at ROWS and HOST are divisible
            by 16.
        lengths_B: int32, tokens of each row; token `length - recent` goes to the host.
        token_bytes: of the keys of one head of one token.
        slots: first row of the ring.
        recent: at least 2, as the newest token is not in the ring yet.
        programs: in all, where there are no more lists than that; None is what suits the device.
    """
    batch, lists = placed.misses_Bg.shape
    words, heads = token_bytes // _WORD, kv_heads // lists
    programs = programs or (1 if interpreting() else _PROGRAMS)
    with torch.cuda.device_of(lengths_B):
        gather_kernel[(max(1, programs // (batch * lists)), batch * lists)](
            where_X, placed.missed_BgM, placed.into_BgM, placed.misses_Bg, lengths_B, placed.missed_BgM.shape[2],
            slots, ring, recent, LISTS=lists, HEADS=heads, BATCH=batch, WORDS=words,
            BLOCK_X=triton.next_power_of_2(2 * heads * words), BLOCK_N=_AT_ONCE, ROWS=ROWS, HOST=HOST,
            HOST_TOKENS=HOST_TOKENS, num_warps=4,
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["most", "slots", "ring", "recent"])
def gather_kernel(
    where_ptr, missed_ptr, into_ptr, misses_ptr, lengths_ptr, most, slots, ring, recent,
    LISTS: tl.constexpr, HEADS: tl.constexpr, BATCH: tl.constexpr, WORDS: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, HOST: tl.constexpr, HOST_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, batch times lists)."""
    row = tl.program_id(1)
    batch = row // LISTS
    first_head = (row % LISTS) * HEADS
    capacity = tl.load(where_ptr + 2)
    rows = tl.multiple_of(tl.load(where_ptr + ROWS).to(tl.pointer_type(tl.int32)), 16)
    host = tl.multiple_of(tl.load(where_ptr + HOST).to(tl.pointer_type(tl.int32)), 16)
    GROUPS: tl.constexpr = LISTS * HEADS
    TOKEN: tl.constexpr = BATCH * 2 * GROUPS * WORDS  # words from token to token on the host
    lanes_X = tl.arange(0, BLOCK_X)
    real_X = lanes_X < 2 * HEADS * WORDS
    pair_X = lanes_X // (HEADS * WORDS)
    head_X = first_head + lanes_X // WORDS % HEADS
    of_host_X = lanes_X
    if LISTS > 1:
        of_host_X = (pair_X * GROUPS + head_X) * WORDS + lanes_X % WORDS
    of_rows_X = ((pair_X * BATCH + batch) * GROUPS + head_X).to(tl.int64) * capacity * WORDS + lanes_X % WORDS
    host += batch * (2 * GROUPS * WORDS)

    count = tl.load(misses_ptr + row)
    missed_row = missed_ptr + row.to(tl.int64) * most
    into_row = into_ptr + row.to(tl.int64) * most
    for start in range(tl.program_id(0) * BLOCK_N, count, tl.num_programs(0) * BLOCK_N):
        number_N = start + tl.arange(0, BLOCK_N)
        token_N = tl.load(missed_row + number_N, mask=number_N < count, other=0).to(tl.int64)
        slot_N = tl.load(into_row + number_N, mask=number_N < count, other=0).to(tl.int64)
        keep_NX = (number_N < count)[:, None] & real_X[None, :]
        words_NX = tl.load(host + token_N[:, None] * TOKEN + of_host_X[None, :], mask=keep_NX)
        tl.store(rows + slot_N[:, None] * WORDS + of_rows_X[None, :], words_NX, mask=keep_NX)

    leaving = tl.load(lengths_ptr + batch) - recent
    last = tl.program_id(0) == tl.num_programs(0) - 1
    if last & (leaving >= 0) & (leaving < tl.load(where_ptr + HOST_TOKENS)):
        at = (slots + leaving % ring).to(tl.int64) * WORDS
        words_X = tl.load(rows + at + of_rows_X, mask=real_X)
        tl.store(host + leaving.to(tl.int64) * TOKEN + of_host_X, words_X, mask=real_X)


def append_newest(
    keys: KeyView, k_BGQD: torch.Tensor, v_BGQD: torch.Tensor, ring: tuple[int, int] | None = None
) -> None:
    """Writes the tokens that end every row, at position `lengths_B - Q` and behind it, of keys found by `where`.

    Args:
        keys: lengths that count the new tokens already.
        k_BGQD: their keys, of the dtype of what is cached, unless that has scales; stride 1 in the last dimension.
        v_BGQD: their values, likewise.
        ring: where the positions are those of a ring, its first row and how many there are.
    """
    assert keys.where is not None, "the host writes to tensors that it knows by itself"
    batch, heads, new, size = k_BGQD.shape
    first, size_of_ring = ring or (0, 0)
    scales = (keys.lengths_B, keys.lengths_B) if keys.scales is None else (keys.scales.k_G, keys.scales.v_G)
    with torch.cuda.device_of(k_BGQD):
        append_kernel[(heads, batch, new)](
            k_BGQD, v_BGQD, keys.k, keys.v, keys.where, keys.lengths_B,
            *k_BGQD.stride()[:3], *v_BGQD.stride()[:3], first, size_of_ring, *scales,
            D=size, BLOCK_D=triton.next_power_of_2(size), MOST=0.0 if keys.scales is None else LARGEST_FLOAT8,
            num_warps=1,
            **overlap(overlaps_launches(k_BGQD.device)),
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["first", "ring"])
def append_kernel(
    new_k_ptr, new_v_ptr, k_ptr, v_ptr, where_ptr, lengths_ptr, k_stride_B, k_stride_G, k_stride_Q, v_stride_B,
    v_stride_G, v_stride_Q, first, ring, k_scale_ptr, v_scale_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, batch, new tokens)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    lanes_D = tl.arange(0, BLOCK_D)
    number = tl.program_id(2)
    at = tl.load(lengths_ptr + batch) - tl.num_programs(2) + number
    at = tl.where(ring > 0, first + at % tl.maximum(ring, 1), at)
    row = batch * tl.load(where_ptr + 7) + head * tl.load(where_ptr + 2) + at * tl.load(where_ptr + 6)
    k_D = tl.load(new_k_ptr + batch * k_stride_B + head * k_stride_G + number * k_stride_Q + lanes_D, mask=lanes_D < D)
    v_D = tl.load(new_v_ptr + batch * v_stride_B + head * v_stride_G + number * v_stride_Q + lanes_D, mask=lanes_D < D)
    if MOST > 0.0:  # as kernels.keys.in_8_bits
        k_D = tl.clamp(k_D.to(tl.float32) / tl.load(k_scale_ptr + head), -MOST, MOST).to(k_ptr.dtype.element_ty)
        v_D = tl.clamp(v_D.to(tl.float32) / tl.load(v_scale_ptr + head), -MOST, MOST).to(v_ptr.dtype.element_ty)
    tl.store(k_ptr + tl.load(where_ptr) + row * D + lanes_D, k_D, mask=lanes_D < D)
    tl.store(v_ptr + tl.load(where_ptr + 1) + row * D + lanes_D, v_D, mask=lanes_D < D)
