"""Device code of the single columns: goes on with the online softmax where a pass over the tiles has left it.

A row's output and log-sum-exp are an online softmax in a state like any other: maximum = lse, sum = 1, accumulator =
out. So the columns join it with one read and one write of both, and a row tile without a live column costs the words of
its live bits alone. Live columns are gathered BLOCK_C at a time, as in triton_kernel.py.

Shapes: M rows of a block, C columns of a step, D head size padded to a power of two.
"""

# Triton gives its language no types, so the checker has nothing to hold on to here; the launcher is typed.
# mypy: ignore-errors

import triton
import triton.language as tl

from sparsekv.kernels.prefill.triton_kernel import _attend, _live_words, _rows


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "kv_heads", "queries", "query_tiles", "columns", "words"])
def columns_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, columns_ptr, live_ptr, dense_ptr, past_ptr, lengths_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    v_stride_B, v_stride_G, v_stride_S, out_stride_B, out_stride_H, out_stride_S,
    scale_log2, window, kv_heads, queries, query_tiles, columns, words,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (GROUP * row blocks, KV heads, batch). Writes `out` and `lse` of rows that see a live column, no others."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUP  # the last rows have the most columns: they go first
    kv_head = tl.program_id(1)
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    batch = tl.program_id(2)
    batch_head = batch * kv_heads * GROUP + head

    past = tl.load(past_ptr + batch)
    length = tl.load(lengths_ptr + batch)
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)  # in the chunk
    i_M = past + row_M  # in the sequence
    real_M = (row_M < queries) & (i_M < length)
    computes = (past + block * BLOCK_M < length) & (tl.load(dense_ptr + head).to(tl.int32) == 0)
    live_row = live_ptr + (batch_head.to(tl.int64) * query_tiles + block * BLOCK_M // TILE_M) * words
    first_word, last_word = _live_words(live_row, tl.where(computes, words, 0), 128)

    if first_word < last_word:
        lanes_D = tl.arange(0, BLOCK_D)
        lanes_C = tl.arange(0, BLOCK_C)
        q_base = q_ptr + batch.to(tl.int64) * q_stride_B + head.to(tl.int64) * q_stride_H
        k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G
        v_base = v_ptr + batch.to(tl.int64) * v_stride_B + kv_head.to(tl.int64) * v_stride_G
        out_base = out_ptr + batch.to(tl.int64) * out_stride_B + head.to(tl.int64) * out_stride_H
        lse_at = lse_ptr + batch_head.to(tl.int64) * queries + row_M
        row64_M = row_M.to(tl.int64)
        q_MD = _rows(q_base, row64_M, q_stride_S, lanes_D, real_M, True, D, UPCAST)

        m_M = tl.load(lse_at, mask=real_M, other=float("-inf")) * 1.4426950408889634
        l_M = tl.where(m_M == float("-inf"), 0.0, 1.0)
        acc_MD = _rows(out_base, row64_M, out_stride_S, lanes_D, real_M, True, D, False).to(tl.float32)

        column_row = columns_ptr + batch_head.to(tl.int64) * columns
        WORDS: tl.constexpr = BLOCK_C // 32
        for step in tl.range(first_word // WORDS, (last_word + WORDS - 1) // WORDS, num_stages=STAGES):
            slot_C = step * BLOCK_C + lanes_C
            word_C = tl.load(live_row + slot_C // 32, mask=slot_C < columns, other=0)
            j_C = tl.load(column_row + slot_C, mask=slot_C < columns, other=-1)
            live_C = ((word_C >> (slot_C % 32)) & 1 != 0) & (j_C >= 0) & (j_C < length)
            k_CD = _rows(k_base, j_C.to(tl.int64), k_stride_S, lanes_D, live_C, True, D, UPCAST)
            v_CD = _rows(v_base, j_C.to(tl.int64), v_stride_S, lanes_D, live_C, True, D, UPCAST)
            # A dead column lies after every row: one comparison for each score serves both.
            place_C = tl.where(live_C, j_C, 2147483647)
            keep_MC = place_C[None, :] <= i_M[:, None]
            if WINDOWED:
                keep_MC = keep_MC & (i_M[:, None] - place_C[None, :] < window)
            acc_MD, m_M, l_M = _attend(acc_MD, m_M, l_M, q_MD, k_CD, v_CD, keep_MC, scale_log2, True, PRECISION)

        seen_M = real_M & (l_M > 0.0)
        l_M = tl.where(seen_M, l_M, 1.0)
        out_MD = acc_MD / l_M[:, None]
        out_at = out_base + row64_M[:, None] * out_stride_S + lanes_D[None, :]
        tl.store(out_at, out_MD.to(out_ptr.dtype.element_ty), mask=seen_M[:, None] & (lanes_D < D)[None, :])
        tl.store(lse_at, (m_M + tl.log2(l_M)) * 0.6931471805599453, mask=seen_M)
