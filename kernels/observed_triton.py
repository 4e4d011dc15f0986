"""The attention of observed queries summed over them, by Triton kernels: scores are never stored.

The first pass gives the maximum and the sum of the softmax of every query, over ranges of keys, so that few heads fill
the GPU, and joins the ranges; the second computes the scores again and sums the weights of each key. No two programs
add to one number: results are the same run to run.

Shapes: as in scores.py; X = N W rows of a KV head (head by head), R key ranges; in kernels M rows and N keys at a
time, D padded to a power of two.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.keys import Softmax
from sparsekv.kernels.triton_support import soft_cap

_LOG2_E = math.log2(math.e)
_RANGE = 4096  # keys of a program of the first pass, or more
_MOST_RANGES = 64
_WARPS = 4
# Rows and keys of a program at a time, by the most bytes of a key that they are for; ascending.
_BLOCKS = ((256, 64, 128), (512, 64, 64), (2048, 32, 32))
_AT_ONCE = 256  # numbers of a program that only adds


def attention_sums(q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, scale: float, softmax: Softmax) -> torch.Tensor:
    """As `sums_by_torch`, for tensors on a GPU with stride 1 in their last dimension."""
    (batch, groups, keys, size), (heads, window) = k_BGSD.shape, q_BHWD.shape[1:3]
    rows, device, block_d = heads // groups * window, k_BGSD.device, triton.next_power_of_2(size)
    token = block_d * k_BGSD.element_size()
    block_m, block = next((at_once, step) for most, at_once, step in _BLOCKS if token <= most)
    span = triton.cdiv(max(_RANGE, triton.cdiv(keys, _MOST_RANGES)), block) * block
    ranges = triton.cdiv(keys, span)
    shape_GRX = (batch * groups, ranges, rows)
    most_GRX, sum_GRX = (torch.empty(shape_GRX, dtype=torch.float32, device=device) for _ in range(2))
    lse_GX = torch.empty((batch * groups, rows), dtype=torch.float32, device=device)
    sums_BGS = torch.empty((batch, groups, keys), dtype=torch.float32, device=device)
    shared = (*q_BHWD.stride()[:3], *k_BGSD.stride()[:3], scale * _LOG2_E, groups, window, rows, keys)
    options: dict[str, Any] = {
        "CAP": softmax.cap * _LOG2_E, "D": size, "BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": block,
        "num_warps": _WARPS,
    }  # fmt: skip
    with torch.cuda.device_of(k_BGSD):
        observed_stats_kernel[(triton.cdiv(rows, block_m), ranges, batch * groups)](
            q_BHWD, k_BGSD, most_GRX, sum_GRX, *shared, span, **options
        )
        join_kernel[(triton.cdiv(rows, _AT_ONCE), batch * groups)](
            most_GRX, sum_GRX, softmax.sinks_H, lse_GX, groups, window, rows, ranges,
            SINKS=softmax.sinks_H is not None, LOG2_E=_LOG2_E, BLOCK_M=_AT_ONCE,
        )  # fmt: skip
        sums_kernel[(triton.cdiv(keys, block), batch * groups)](q_BHWD, k_BGSD, lse_GX, sums_BGS, *shared, **options)
    return sums_BGS


def near_sums(sums_BGS: torch.Tensor, factor: float, near: int, together: bool) -> torch.Tensor:
    """As `near_by_torch`, with so many keys on either side, for tensors on a GPU."""
    batch, groups, keys = sums_BGS.shape
    lists = 1 if together else groups
    scores_BgS = torch.empty((batch, lists, keys), dtype=torch.float32, device=sums_BGS.device)
    with torch.cuda.device_of(sums_BGS):
        near_kernel[(triton.cdiv(keys, _AT_ONCE), lists, batch)](
            sums_BGS, scores_BgS, factor, groups, keys, NEAR=near, BLOCK_N=_AT_ONCE
        )
    return scores_BgS


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
def observed_stats_kernel(
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
@triton.jit(do_not_specialize=["window", "rows", "ranges"])
def join_kernel(
    most_ptr, sum_ptr, sinks_ptr, lse_ptr, groups, window, rows, ranges,
    SINKS: tl.constexpr, LOG2_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, batch times KV heads). Log-sum-exp of each row, to the base of 2, with learned sinks."""
    row_M, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1).to(tl.int64)
    real_M = row_M < rows
    most_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    for number in range(ranges):
        at_M = (head * ranges + number) * rows + row_M
        other_M = tl.load(most_ptr + at_M, mask=real_M, other=0.0)
        new_M = tl.maximum(most_M, other_M)
        safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        found_M = tl.load(sum_ptr + at_M, mask=real_M, other=1.0)
        sum_M = sum_M * tl.exp2(most_M - safe_M) + found_M * tl.exp2(other_M - safe_M)
        most_M = new_M
    if SINKS:
        sink_M = tl.load(sinks_ptr + head % groups * (rows // window) + row_M // window, mask=real_M, other=0.0)
        sum_M += tl.exp2(sink_M.to(tl.float32) * LOG2_E - most_M)
    tl.store(lse_ptr + head * rows + row_M, most_M + tl.log2(sum_M), mask=real_M)


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
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # over rows at the end: threads have them in different warps
    lse_base = lse_ptr + tl.program_id(1).to(tl.int64) * rows
    is_seen = (tl.program_id(0) + 1) * BLOCK_N <= keys - window + 1  # by every row
    seen, hidden = tl.where(is_seen, rows, 0), tl.where(is_seen, 0, rows)
    for HIDDEN in tl.static_range(2):
        for start in range(0, hidden if HIDDEN else seen, BLOCK_M):
            row_M = start + tl.arange(0, BLOCK_M)
            q_MD = _queries(q_base, row_M, rows, window, q_stride_H, q_stride_W, D, BLOCK_D)
            s_MN = _scores(q_MD, k_DN, row_M, key_N, scale, window, keys, CAP, HIDDEN)
            lse_M = tl.load(lse_base + row_M, mask=row_M < rows, other=float("inf"))
            sum_MN += tl.exp2(s_MN - lse_M[:, None])
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * keys + key_N, tl.sum(sum_MN, 0), mask=key_N < keys)


@no_type_check
@triton.jit(do_not_specialize=["keys", "groups"])
def near_kernel(sums_ptr, scores_ptr, factor, groups, keys, NEAR: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (blocks of keys, lists, batch). The most of the KV heads of a list: all of them, or one."""
    lists, batch = tl.num_programs(1), tl.program_id(2).to(tl.int64)
    key_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    most_N = tl.zeros((BLOCK_N,), tl.float32)
    for group in range(tl.program_id(1), groups, lists):
        sum_N = tl.zeros((BLOCK_N,), tl.float32)
        for shift in tl.static_range(-NEAR, NEAR + 1):
            at_N = key_N + shift
            sum_N += tl.load(
                sums_ptr + (batch * groups + group) * keys + at_N, mask=(at_N >= 0) & (at_N < keys), other=0.0
            )
        most_N = tl.maximum(most_N, sum_N, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scores_ptr + (batch * lists + tl.program_id(1)) * keys + key_N, most_N * factor, mask=key_N < keys)
