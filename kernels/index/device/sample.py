"""Device code that the two passes over the keys share: which sampled queries a program holds, and what they see.

The sampled queries of a head are its last ones, counted back: row 0 is the last query of the batch row. A program
holds SLOTS heads of one KV head and STRIPS strips of ROWS rows of each. The heads are stacked, so that a block of keys
is read once for all of them; the strips are tuples of tensors, as every one needs a product of its own.

Shapes: M = SLOTS * ROWS stacked rows of a strip, N keys of a step, D head size padded to a power of two.
"""

# ruff: noqa: RUF005 (tuples are joined by +: the language has no unpacking)

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def held_rows(slots_ptr, unit, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Of each stacked row of the first strip: which of the builder's heads it is, or -1, and its place counted back."""
    lane_M = tl.arange(0, SLOTS * ROWS)
    return tl.load(slots_ptr + unit * SLOTS + lane_M // ROWS), lane_M % ROWS


@triton.jit
@no_type_check
def load_strips(
    q_base, head_ptr, limits_ptr, own_M, back_M, row_M, q_stride_H, q_stride_S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STRIPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The queries of every strip, and which of them count; the others are 0."""
    lane_D = tl.arange(0, BLOCK_D)
    known_M = tl.maximum(own_M, 0)
    limit_M = tl.where(own_M >= 0, tl.load(limits_ptr + known_M), 0)
    head_M = tl.load(head_ptr + known_M).to(tl.int64) * q_stride_H
    q = ()
    used = ()
    for strip in tl.static_range(STRIPS):
        used_M = back_M + strip * ROWS < limit_M
        at_M = head_M + (row_M - strip * ROWS).to(tl.int64) * q_stride_S
        q_MD = tl.load(
            q_base + at_M[:, None] + lane_D[None, :], mask=used_M[:, None] & (lane_D < D)[None, :], other=0.0
        )
        if UPCAST:
            q_MD = q_MD.to(tl.float32)
        q = q + (q_MD,)
        used = used + (used_M,)
    return q, used


@triton.jit
@no_type_check
def load_keys(
    k_base, first_key, length, k_stride_S,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The keys from `first_key` on; with a mask, memory from `length` on is not read."""
    lane_N = tl.arange(0, BLOCK_N)
    lane_D = tl.arange(0, BLOCK_D)
    # The first key is one 64-bit product; the rows behind it are 32-bit offsets that stay the same.
    at_ND = k_base + k_stride_S.to(tl.int64) * first_key + (lane_N[:, None] * k_stride_S + lane_D[None, :])
    if MASKED:
        k_ND = tl.load(at_ND, mask=(first_key + lane_N < length)[:, None] & (lane_D < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        k_ND = tl.load(at_ND)
    else:
        k_ND = tl.load(at_ND, mask=(lane_D < D)[None, :], other=0.0)
    if UPCAST:
        k_ND = k_ND.to(tl.float32)
    return k_ND


@triton.jit
@no_type_check
def visible(i, j, window, WINDOWED: tl.constexpr):
    """Whether query i sees key j: causal, and within the layer's own window where it has one. Both are broadcast."""
    keep = j <= i
    if WINDOWED:
        keep = keep & (i - j < window)
    return keep
