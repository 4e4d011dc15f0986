"""Device code of decode attention over chosen tokens: split over the tokens, then merged (flash decoding).

A program of the first kernel gathers one run of the chosen tokens for one KV head and serves all of its query heads,
so every key is read once. The second kernel joins the runs of a query head by their log-sum-exp.

Shapes: R query heads of a KV head (padded to 16 or more for the product), N tokens of a step, D padded head size.
"""

# Triton gives its language no types, so the checker has nothing to hold on to here; the launcher is typed.
# mypy: ignore-errors

import triton
import triton.language as tl


# Numbers that change from token to token are not specialised on: no step may compile the kernel again.
@triton.jit(do_not_specialize=["listed", "tail_start", "tail_stop", "run", "kv_heads"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, tokens_ptr,
    q_stride_B, q_stride_H, k_stride_B, k_stride_G, k_stride_S, v_stride_B, v_stride_G, v_stride_S,
    tokens_stride_B, tokens_stride_G,
    scale_log2, listed, tail_start, tail_stop, run, kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (runs, KV heads, batch). The chosen tokens are numbered: first the listed ones, then the tail."""
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    row_R = tl.arange(0, ROWS)
    lanes_D = tl.arange(0, BLOCK_D)
    lanes_N = tl.arange(0, BLOCK_N)
    real_RD = (row_R < GROUP)[:, None] & (lanes_D < D)[None, :]
    head_R = kv_head * GROUP + row_R
    q_base = q_ptr + batch.to(tl.int64) * q_stride_B
    q_RD = tl.load(q_base + head_R.to(tl.int64)[:, None] * q_stride_H + lanes_D[None, :], mask=real_RD, other=0.0)
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G
    v_base = v_ptr + batch.to(tl.int64) * v_stride_B + kv_head.to(tl.int64) * v_stride_G
    tokens_row = tokens_ptr + batch.to(tl.int64) * tokens_stride_B + kv_head.to(tl.int64) * tokens_stride_G
    if UPCAST:
        q_RD = q_RD.to(tl.float32)

    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, listed + tail_stop - tail_start)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        number_N = start + lanes_N
        token_N = tl.load(tokens_row + number_N, mask=number_N < tl.minimum(listed, end), other=-1)
        in_list_N = (number_N < listed) & (token_N >= 0) & ((token_N < tail_start) | (token_N >= tail_stop))
        in_tail_N = (number_N >= listed) & (number_N < end)
        token_N = tl.where(number_N < listed, token_N, tail_start + number_N - listed)
        keep_N = in_list_N | in_tail_N
        keep_ND = keep_N[:, None] & (lanes_D < D)[None, :]
        at_N1 = token_N.to(tl.int64)[:, None]
        k_ND = tl.load(k_base + at_N1 * k_stride_S + lanes_D[None, :], mask=keep_ND, other=0.0)
        v_ND = tl.load(v_base + at_N1 * v_stride_S + lanes_D[None, :], mask=keep_ND, other=0.0)
        if UPCAST:
            k_ND = k_ND.to(tl.float32)
            v_ND = v_ND.to(tl.float32)
        s_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
        s_RN = tl.where(keep_N[None, :], s_RN, float("-inf"))
        new_m_R = tl.maximum(m_R, tl.max(s_RN, 1))
        base_R = tl.where(new_m_R == float("-inf"), 0.0, new_m_R)
        p_RN = tl.exp2(s_RN - base_R[:, None])
        decay_R = tl.exp2(m_R - base_R)
        l_R = l_R * decay_R + tl.sum(p_RN, 1)
        acc_RD = tl.dot(p_RN.to(v_ND.dtype), v_ND, acc_RD * decay_R[:, None], input_precision=PRECISION)
        m_R = new_m_R

    seen_R = l_R > 0.0
    l_R = tl.where(seen_R, l_R, 1.0)
    part_R = (batch * kv_heads * GROUP + head_R).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + part_R[:, None] * D + lanes_D[None, :], acc_RD / l_R[:, None], mask=real_RD)
    lse_R = tl.where(seen_R, m_R + tl.log2(l_R), float("-inf"))
    tl.store(part_lse_ptr + part_R, lse_R, mask=row_R < GROUP)


@triton.jit(do_not_specialize=["runs", "heads"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, out_stride_B, out_stride_H, heads, runs,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, WANT_LSE: tl.constexpr,
):  # fmt: skip
    """Grid: (query heads, batch). Joins the runs of a head: each weighs by the exponential of its log-sum-exp."""
    head = tl.program_id(0)
    batch = tl.program_id(1)
    part = (batch * heads + head).to(tl.int64) * runs
    lanes_P = tl.arange(0, BLOCK_P)
    lanes_D = tl.arange(0, BLOCK_D)
    lse_P = tl.load(part_lse_ptr + part + lanes_P, mask=lanes_P < runs, other=float("-inf"))
    m = tl.max(lse_P, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight_P = tl.exp2(lse_P - base)
    total = tl.sum(weight_P, 0)
    keep_PD = (lanes_P < runs)[:, None] & (lanes_D < D)[None, :]
    part_PD = tl.load(part_ptr + (part + lanes_P)[:, None] * D + lanes_D[None, :], mask=keep_PD, other=0.0)
    out_D = tl.sum(part_PD * weight_P[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out_at = out_ptr + batch.to(tl.int64) * out_stride_B + head.to(tl.int64) * out_stride_H + lanes_D
    tl.store(out_at, out_D.to(out_ptr.dtype.element_ty), mask=lanes_D < D)
    if WANT_LSE:
        lse = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + batch * heads + head, lse * 0.6931471805599453)
