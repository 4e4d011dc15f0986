"""The attention of observed queries summed over them, by two Triton kernels: scores are never stored.

The first pass gives the maximum and the sum of the softmax of every query, over ranges of keys, so that few heads fill
the GPU; the second computes the scores again and sums the weights of each key. No two programs add to one number:
results are the same run to run.

Shapes: as in observed.py; X = N W rows of a KV head (head by head), R key ranges; in kernels M rows and N keys at a
time, D padded to a power of two.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.softmax import Softmax
from sparsekv.kernels.triton_support import soft_cap

_LOG2_E = math.log2(math.e)
_RANGE = 4096  # keys of a program of the first pass, or more
_MOST_RANGES = 64
_ROWS, _KEYS, _WARPS = 64, 64, 4


def attention_sums(q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, scale: float, softmax: Softmax) -> torch.Tensor:
    """As `sums_by_torch`, for tensors on a GPU with stride 1 in their last dimension."""
    (batch, groups, keys, size), (heads, window) = k_BGSD.shape, q_BHWD.shape[1:3]
    rows, device = heads // groups * window, k_BGSD.device
    span = triton.cdiv(max(_RANGE, triton.cdiv(keys, _MOST_RANGES)), _KEYS) * _KEYS
    ranges = triton.cdiv(keys, span)
    stats_2GRX = torch.empty((2, batch * groups, ranges, rows), dtype=torch.float32, device=device)
    sums_BGS = torch.empty((batch, groups, keys), dtype=torch.float32, device=device)
    shared = (*q_BHWD.stride()[:3], *k_BGSD.stride()[:3], scale * _LOG2_E, groups, window, rows, keys)
    options: dict[str, Any] = {
        "CAP": softmax.cap * _LOG2_E, "D": size, "BLOCK_D": triton.next_power_of_2(size), "BLOCK_M": _ROWS,
        "BLOCK_N": _KEYS, "num_warps": _WARPS,
    }  # fmt: skip
    with torch.cuda.device_of(k_BGSD):
        stats_kernel[(triton.cdiv(rows, _ROWS), ranges, batch * groups)](
            q_BHWD, k_BGSD, *stats_2GRX, *shared, span, **options
        )
        lse_GX = _joined(stats_2GRX, softmax, groups)
        sums_kernel[(triton.cdiv(keys, _KEYS), batch * groups)](q_BHWD, k_BGSD, lse_GX, sums_BGS, *shared, **options)
    return sums_BGS


def _joined(stats_2GRX: torch.Tensor, softmax: Softmax, groups: int) -> torch.Tensor:
    """Log-sum-exp of each row, to the base of 2, learned sinks included."""
    most_GRX, sum_GRX = stats_2GRX
    most_G1X = most_GRX.amax(1, keepdim=True)
    lse_GX: torch.Tensor = most_G1X[:, 0] + (sum_GRX * torch.exp2(most_GRX - most_G1X)).sum(1).log2()
    if softmax.sinks_H is None:
        return lse_GX
    lse_BHW = lse_GX.view(-1, len(softmax.sinks_H), lse_GX.shape[1] * groups // len(softmax.sinks_H))
    with_sinks_BHW: torch.Tensor = torch.logaddexp2(lse_BHW, softmax.sinks_H.float()[:, None] * _LOG2_E)
    return with_sinks_BHW.view_as(lse_GX)


@no_type_check
@triton.jit
def _scores(q_MD, k_DN, row_M, key_N, scale, window, keys, CAP: tl.constexpr, HIDDEN: tl.constexpr):
    """Scaled scores to the base of 2; -inf where a row does not see a key, if there are such."""
    s_MN = tl.dot(q_MD, k_DN, input_precision="ieee") * scale
    if CAP > 0.0:
        s_MN = soft_cap(s_MN, CAP)
    if HIDDEN:
        position_M = keys - window + row_M % window
        s_MN = tl.where(key_N[None, :] <= position_M[:, None], s_MN, float("-inf"))
    return s_MN


@no_type_check
@triton.jit
def _queries(q_base, row_M, rows, window, q_stride_H, q_stride_W, D: tl.constexpr, BLOCK_D: tl.constexpr):
    lane_D = tl.arange(0, BLOCK_D)
    at_M = (row_M // window).to(tl.int64) * q_stride_H + (row_M % window).to(tl.int64) * q_stride_W
    real_MD = (row_M < rows)[:, None] & (lane_D < D)[None, :]
    return tl.load(q_base + at_M[:, None] + lane_D[None, :], mask=real_MD, other=0.0)


@no_type_check
@triton.jit
def _keys(k_base, key_N, keys, k_stride_S, D: tl.constexpr, BLOCK_D: tl.constexpr):
    lane_D = tl.arange(0, BLOCK_D)
    real_DN = (lane_D < D)[:, None] & (key_N < keys)[None, :]
    return tl.load(k_base + key_N[None, :].to(tl.int64) * k_stride_S + lane_D[:, None], mask=real_DN, other=0.0)


@no_type_check
@triton.jit(do_not_specialize=["window", "rows", "keys", "span"])
def stats_kernel(
    q_ptr, k_ptr, most_ptr, sum_ptr, q_stride_B, q_stride_H, q_stride_W, k_stride_B, k_stride_G, k_stride_S, scale,
    groups, window, rows, keys, span,
    CAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, key ranges, batch times KV heads)."""
    batch = (tl.program_id(2) // groups).to(tl.int64)
    group = (tl.program_id(2) % groups).to(tl.int64)
    q_base = q_ptr + batch * q_stride_B + group * (rows // window) * q_stride_H
    k_base = k_ptr + batch * k_stride_B + group * k_stride_G
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MD = _queries(q_base, row_M, rows, window, q_stride_H, q_stride_W, D, BLOCK_D)
    most_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    first = tl.program_id(1) * span
    seen = (keys - window + 1) // BLOCK_N * BLOCK_N  # by every row
    for HIDDEN in tl.static_range(2):
        begin = tl.maximum(first, seen) if HIDDEN else first
        for start in range(begin, tl.minimum(first + span, keys if HIDDEN else seen), BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            k_DN = _keys(k_base, key_N, keys, k_stride_S, D, BLOCK_D)
            s_MN = _scores(q_MD, k_DN, row_M, key_N, scale, window, keys, CAP, HIDDEN)
            new_M = tl.maximum(most_M, tl.max(s_MN, 1))
            safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
            sum_M = sum_M * tl.exp2(most_M - safe_M) + tl.sum(tl.exp2(s_MN - safe_M[:, None]), 1)
            most_M = new_M
    at_M = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * rows + row_M
    tl.store(most_ptr + at_M, most_M, mask=row_M < rows)
    tl.store(sum_ptr + at_M, sum_M, mask=row_M < rows)


@no_type_check
@triton.jit(do_not_specialize=["window", "rows", "keys"])
def sums_kernel(
    q_ptr, k_ptr, lse_ptr, sums_ptr, q_stride_B, q_stride_H, q_stride_W, k_stride_B, k_stride_G, k_stride_S, scale,
    groups, window, rows, keys,
    CAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of keys, batch times KV heads)."""
    batch = (tl.program_id(1) // groups).to(tl.int64)
    group = (tl.program_id(1) % groups).to(tl.int64)
    q_base = q_ptr + batch * q_stride_B + group * (rows // window) * q_stride_H
    key_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_DN = _keys(k_ptr + batch * k_stride_B + group * k_stride_G, key_N, keys, k_stride_S, D, BLOCK_D)
    sum_N = tl.zeros((BLOCK_N,), tl.float32)
    lse_base = lse_ptr + tl.program_id(1).to(tl.int64) * rows
    is_seen = (tl.program_id(0) + 1) * BLOCK_N <= keys - window + 1  # by every row
    seen, hidden = tl.where(is_seen, rows, 0), tl.where(is_seen, 0, rows)
    for HIDDEN in tl.static_range(2):
        for start in range(0, hidden if HIDDEN else seen, BLOCK_M):
            row_M = start + tl.arange(0, BLOCK_M)
            q_MD = _queries(q_base, row_M, rows, window, q_stride_H, q_stride_W, D, BLOCK_D)
            s_MN = _scores(q_MD, k_DN, row_M, key_N, scale, window, keys, CAP, HIDDEN)
            lse_M = tl.load(lse_base + row_M, mask=row_M < rows, other=float("inf"))
            sum_N += tl.sum(tl.exp2(s_MN - lse_M[:, None]), 0)
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * keys + key_N, sum_N, mask=key_N < keys)
