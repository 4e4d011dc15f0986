"""Device code of the first pass over the keys: maximum and sum of the softmax of every sampled query.

The keys are cut into runs, so that a few heads fill the GPU; each run leaves a partial maximum and a partial sum
(flash decoding), which the second pass joins.

Shapes: M stacked rows, N keys of a step; see sample.py.
"""

# ruff: noqa: RUF005 (tuples are joined by +: the language has no unpacking)

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.index.device.sample import held_rows, load_keys, load_strips, visible


@triton.jit
@no_type_check
def _join(m_M, l_M, s_MN, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax, in base 2. With a mask, a row may have seen no key yet: its maximum is -inf."""
    new_m_M = tl.maximum(m_M, tl.max(s_MN, 1) * scale_log2)
    base_M = new_m_M
    if MASKED:
        base_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    l_M = l_M * tl.exp2(m_M - base_M) + tl.sum(tl.exp2(s_MN * scale_log2 - base_M[:, None]), 1)
    return new_m_M, l_M


@triton.jit
@no_type_check
def _step(
    q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys for every strip."""
    j_N = first_key + tl.arange(0, BLOCK_N)
    k_ND = load_keys(k_base, first_key, length, k_stride_S, MASKED, D, BLOCK_D, BLOCK_N, UPCAST)
    next_highest = ()
    next_total = ()
    for strip in tl.static_range(STRIPS):
        s_MN = tl.dot(q[strip], tl.trans(k_ND), input_precision=PRECISION)
        if MASKED:
            keep_MN = visible((i_M - strip * ROWS)[:, None], j_N[None, :], window, WINDOWED)
            s_MN = tl.where(keep_MN, s_MN, float("-inf"))
        m_M, l_M = _join(highest[strip], total[strip], s_MN, scale_log2, MASKED)
        next_highest = next_highest + (m_M,)
        next_total = next_total + (l_M,)
    return next_highest, next_total


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "heads", "run"])
@no_type_check
def stats_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, past_ptr, length_ptr, head_ptr, limits_ptr, slots_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    scale_log2, window, heads, run,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (units, runs of `run` keys, batch). Units of one KV head run side by side: they share K in cache."""
    unit = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2)
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    own_M, back_M = held_rows(slots_ptr, unit, SLOTS, ROWS)
    i_M = length - 1 - back_M
    q_base = q_ptr + batch.to(tl.int64) * q_stride_B
    q, used = load_strips(
        q_base, head_ptr, limits_ptr + batch * heads, own_M, back_M, i_M - past, q_stride_H, q_stride_S,
        D, BLOCK_D, ROWS, STRIPS, UPCAST,
    )  # fmt: skip
    kv_head = tl.load(head_ptr + tl.load(slots_ptr + unit * SLOTS)) // GROUP
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G

    begin = part * run
    end = tl.minimum(begin + run, length)
    # Up to `whole` every row sees every key.
    whole = begin
    if not WINDOWED:
        whole += tl.maximum(tl.minimum(end, length - STRIPS * ROWS + 1) - begin, 0) // BLOCK_N * BLOCK_N
    highest = ()
    total = ()
    for _ in tl.static_range(STRIPS):
        highest = highest + (tl.full([SLOTS * ROWS], float("-inf"), tl.float32),)
        total = total + (tl.zeros([SLOTS * ROWS], tl.float32),)
    for first_key in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        highest, total = _step(
            q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
            False, WINDOWED, D, BLOCK_D, ROWS, STRIPS, BLOCK_N, PRECISION, UPCAST,
        )  # fmt: skip
    for first_key in tl.range(whole, end, BLOCK_N, num_stages=1):
        highest, total = _step(
            q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
            True, WINDOWED, D, BLOCK_D, ROWS, STRIPS, BLOCK_N, PRECISION, UPCAST,
        )  # fmt: skip

    at_M = ((batch * heads + tl.maximum(own_M, 0)).to(tl.int64) * (STRIPS * ROWS) + back_M) * tl.num_programs(1) + part
    for strip in tl.static_range(STRIPS):
        tl.store(m_ptr + at_M + strip * ROWS * tl.num_programs(1), highest[strip], mask=used[strip])
        tl.store(l_ptr + at_M + strip * ROWS * tl.num_programs(1), total[strip], mask=used[strip])
