"""Computes how many tokens every row of a step chooses, and where its scores lie: one launch on a GPU.

Shapes: S segments, B batch, N buckets.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl


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
