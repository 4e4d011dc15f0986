"""The choice of a step in Triton: how many tokens every row chooses and where its scores lie, and the best of them, by
a radix select and a compaction in ascending order.

The scores of a row are read five times by as many programs as have blocks of it: three passes count digits of 10 bits,
the fourth counts per block what is above and at the threshold, the last writes positions. Among equal scores the
lower position wins, so the choice does not depend on the order in which programs run. The first digit is counted in
shared memory, as most scores share few of its values; the others by few tokens, which count themselves.

Shapes: S segments, B batch, g lists, T scored tokens of all rows, N listed tokens or buckets, K blocks of a row.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.triton_support import UNALIGNED, overlap, overlaps_launches

_DIGITS = tl.constexpr(1024)
_STATE = tl.constexpr(8)  # of a row: programs that came in each pass, the key found so far, tokens wanted at it
_BLOCK = 2048
_BLOCKS = 512  # of a row, up to which nothing is compiled again


def choose(
    scores_gT: torch.Tensor,
    starts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    capacity: int,
    most: int,
    sink: int,
    recent: int,
) -> torch.Tensor:
    """As `choose` of selection.py, for tensors on a GPU."""
    lists, tokens = scores_gT.shape
    batch, device = starts_B.shape[0], scores_gT.device
    blocks = max(1, triton.cdiv(min(capacity, tokens), _BLOCK))
    chosen_BgN = torch.empty((batch, lists, most), dtype=torch.int32, device=device)
    zeros = torch.zeros(batch * lists * (3 * _DIGITS.value + _STATE.value), dtype=torch.int32, device=device)
    digits, state = zeros.split([batch * lists * 3 * _DIGITS.value, batch * lists * _STATE.value])
    found_BgK2 = torch.empty((batch, lists, 2, blocks), dtype=torch.int32, device=device)
    rows = (scores_gT, starts_B, lengths_B, counts_B, digits, state)
    grid, overlapping = (blocks, lists, batch), overlap(overlaps_launches(device))
    with torch.cuda.device_of(scores_gT):
        for number in range(3):
            digit_kernel[grid](*rows, tokens, sink, recent, PASS=number, BLOCK_N=_BLOCK, num_warps=4, **overlapping)
        count_kernel[grid](*rows, found_BgK2, tokens, sink, recent, BLOCK_N=_BLOCK, num_warps=4, **overlapping)
        list_kernel[grid](
            *rows, found_BgK2, chosen_BgN, tokens, sink, recent, most,
            BLOCK_N=_BLOCK, BLOCKS=max(_BLOCKS, triton.next_power_of_2(blocks)), num_warps=4, **overlapping,
        )  # fmt: skip
    return chosen_BgN


@no_type_check
@triton.jit
def _keys(scores_ptr, tokens, began, length, sink, recent, BLOCK_N: tl.constexpr):
    """Numbers that order as the scores of a block do, below 2**30; -1 for what may not be chosen."""
    token_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    free_N = (token_N >= sink) & (token_N < length - recent)
    at_N = tl.program_id(1).to(tl.int64) * tokens + began + token_N
    score_N = tl.load(scores_ptr + at_N, mask=free_N, other=0.0)
    key_N = tl.minimum(score_N.to(tl.int32, bitcast=True), (1 << 30) - 1)
    return token_N, tl.where(free_N, tl.maximum(key_N, 0), -1)


@no_type_check
@triton.jit(do_not_specialize=["tokens", "sink", "recent"], do_not_specialize_on_alignment=UNALIGNED)
def digit_kernel(
    scores_ptr, starts_ptr, lengths_ptr, counts_ptr, digits_ptr, state_ptr, tokens, sink, recent,
    PASS: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, lists, batch). Counts one digit of the keys that share the digits before it; the program that
    comes last finds the digit of the threshold."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch = tl.program_id(2)
    length = tl.load(lengths_ptr + batch)
    began = tl.load(starts_ptr + batch)
    wanted = tl.load(counts_ptr + batch)
    free = length - recent
    if (began >= 0) & (wanted > 0) & (tl.program_id(0) * BLOCK_N < free):
        row = (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        digits_row = digits_ptr + (row * 3 + PASS) * _DIGITS
        state_row = state_ptr + row * _STATE
        _, key_N = _keys(scores_ptr, tokens, began, length, sink, recent, BLOCK_N)
        counted_N = key_N >= 0
        digit_N = key_N >> (20 - 10 * PASS)
        before = 0
        if PASS > 0:
            before = tl.load(state_row + 3)
            wanted = tl.load(state_row + 4)
            counted_N = counted_N & ((digit_N >> 10) == before)
        lanes_X = tl.arange(0, _DIGITS)
        if PASS == 0:
            found_X = tl.histogram(digit_N & (_DIGITS - 1), _DIGITS, mask=counted_N)
            tl.atomic_add(digits_row + lanes_X, found_X, mask=found_X > 0, sem="relaxed")
        else:  # few share the digits before: they count themselves
            tl.atomic_add(digits_row + (digit_N & (_DIGITS - 1)), 1, mask=counted_N, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(state_row + PASS, 1, sem="acq_rel") == tl.cdiv(free, BLOCK_N) - 1:
            count_X = tl.load(digits_row + lanes_X, cache_modifier=".cg")
            at_least_X = tl.cumsum(count_X, 0, reverse=True)
            digit = tl.sum((at_least_X >= wanted).to(tl.int32), 0) - 1
            above = tl.sum(tl.where(lanes_X > digit, count_X, 0), 0)
            tl.store(state_row + 3, (before << 10) + digit)
            tl.store(state_row + 4, wanted - above)


@no_type_check
@triton.jit(do_not_specialize=["tokens", "sink", "recent"], do_not_specialize_on_alignment=UNALIGNED)
def count_kernel(
    scores_ptr, starts_ptr, lengths_ptr, counts_ptr, digits_ptr, state_ptr, found_ptr, tokens, sink, recent,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, lists, batch). How many tokens of a block lie above the threshold, and how many at it."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch = tl.program_id(2)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    length = tl.load(lengths_ptr + batch)
    began = tl.load(starts_ptr + batch)
    if (began >= 0) & (tl.load(counts_ptr + batch) > 0) & (block * BLOCK_N < length - recent):
        row = (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        threshold = tl.load(state_ptr + row * _STATE + 3)
        _, key_N = _keys(scores_ptr, tokens, began, length, sink, recent, BLOCK_N)
        tl.store(found_ptr + row * (2 * blocks) + block, tl.sum((key_N > threshold).to(tl.int32), 0))
        tl.store(found_ptr + row * (2 * blocks) + blocks + block, tl.sum((key_N == threshold).to(tl.int32), 0))


@no_type_check
@triton.jit(do_not_specialize=["tokens", "sink", "recent", "most"], do_not_specialize_on_alignment=UNALIGNED)
def list_kernel(
    scores_ptr, starts_ptr, lengths_ptr, counts_ptr, digits_ptr, state_ptr, found_ptr, chosen_ptr, tokens, sink, recent,
    most, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks, lists, batch). Writes the positions of a block behind those of the blocks before it."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch = tl.program_id(2)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    row = (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    chosen_row = chosen_ptr + row * most
    length = tl.load(lengths_ptr + batch)
    began = tl.load(starts_ptr + batch)
    asked = tl.load(counts_ptr + batch)
    chooses = (began >= 0) & (asked > 0)
    if block == 0:  # what is not chosen below
        for first in range(tl.where(chooses, asked, 0), most, BLOCK_N):
            lanes_N = first + tl.arange(0, BLOCK_N)
            tl.store(chosen_row + lanes_N, tl.full([BLOCK_N], -1, tl.int32), mask=lanes_N < most)
    if chooses & (block * BLOCK_N < length - recent):
        threshold = tl.load(state_ptr + row * _STATE + 3)
        room = tl.load(state_ptr + row * _STATE + 4)
        lanes_K = tl.arange(0, BLOCKS)
        before_K = lanes_K < block
        above = tl.sum(tl.load(found_ptr + row * (2 * blocks) + lanes_K, mask=before_K, other=0), 0)
        level = tl.sum(tl.load(found_ptr + row * (2 * blocks) + blocks + lanes_K, mask=before_K, other=0), 0)
        token_N, key_N = _keys(scores_ptr, tokens, began, length, sink, recent, BLOCK_N)
        level_N = (key_N == threshold).to(tl.int32)
        takes_N = (key_N > threshold) | ((level_N > 0) & (level + tl.cumsum(level_N, 0) <= room))
        slot_N = above + tl.minimum(level, room) + tl.cumsum(takes_N.to(tl.int32), 0) - 1
        tl.store(chosen_row + slot_N, token_N, mask=takes_N & (slot_N < most))


def budgets(
    lengths_B: torch.Tensor,
    bounds_N: torch.Tensor,
    most_SN: torch.Tensor,
    share_SN: torch.Tensor | None,
    edges_S: torch.Tensor,
    room_S: torch.Tensor,
) -> torch.Tensor:
    """As `Budgets.of` of runtime/core/segments.py, for tensors on a GPU.

    Args:
        bounds_N: int32, the longest length of every bucket but the last: one fewer than buckets.
        most_SN: int64, chosen tokens at most.
        share_SN: float64, chosen tokens as a fraction of the length; None where no budget is one.
        edges_S: int32, sinks and recent tokens together.
        room_S: int64, scores that the scratch has room for.

    Returns:
        int32 [2, S, B]: chosen tokens or ALL, and where scores begin or -1.
    """
    segments, buckets = most_SN.shape
    found_2SB = torch.empty((2, segments, len(lengths_B)), dtype=torch.int32, device=lengths_B.device)
    with torch.cuda.device_of(lengths_B):
        budgets_kernel[(segments,)](
            lengths_B, bounds_N, most_SN, most_SN if share_SN is None else share_SN, edges_S, room_S, found_2SB,
            len(lengths_B), buckets, BLOCK_B=triton.next_power_of_2(len(lengths_B)), SHARES=share_SN is not None,
            num_warps=1, enable_fp_fusion=False,  # a fused product would round otherwise than the host does
        )  # fmt: skip
    return found_2SB


@no_type_check
@triton.jit(do_not_specialize=["rows", "buckets"])
def budgets_kernel(
    lengths_ptr, bounds_ptr, most_ptr, share_ptr, edges_ptr, room_ptr, found_ptr, rows, buckets,
    BLOCK_B: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Grid: (segments,)."""
    segment = tl.program_id(0)
    lanes_B = tl.arange(0, BLOCK_B)
    length_B = tl.load(lengths_ptr + lanes_B, mask=lanes_B < rows, other=0)
    bucket_B = tl.zeros([BLOCK_B], tl.int32)
    for bound in range(buckets - 1):
        bucket_B += (length_B > tl.load(bounds_ptr + bound)).to(tl.int32)
    chosen_B = tl.load(most_ptr + segment * buckets + bucket_B)
    if SHARES:
        share_B = tl.load(share_ptr + segment * buckets + bucket_B)
        chosen_B = tl.minimum(chosen_B, tl.ceil(share_B * length_B.to(tl.float64) - 1e-9).to(tl.int64))
    chooses_B = chosen_B + tl.load(edges_ptr + segment) < length_B
    end_B = tl.cumsum(tl.where(chooses_B, length_B, 0).to(tl.int64), 0)
    chooses_B = chooses_B & (end_B <= tl.load(room_ptr + segment))
    count_at = found_ptr + segment * rows + lanes_B
    tl.store(count_at, tl.where(chooses_B, chosen_B, -1).to(tl.int32), mask=lanes_B < rows)
    start_at = count_at + tl.num_programs(0) * rows
    tl.store(start_at, tl.where(chooses_B, end_B - length_B, -1).to(tl.int32), mask=lanes_B < rows)
