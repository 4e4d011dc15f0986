"""Device code of antidiagonal tile scores: what tile_scores.py defines, without strided scores in memory.

A program scores BLOCK_X strided rows of one query head: several whole row tiles. It walks the strided keys that they
see twice, BLOCK_N at a time: once for the maximum and the sum of every strided row's softmax, and once more for the
weights, which it adds up per tile and stores. Computing the products twice costs less than writing them once: what goes
to memory is a number a tile. No two programs store to one number: results are the same run to run.

Shapes: X strided rows of a program, N strided keys of a step, D head size padded to a power of two.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _logits(
    q_base, k_base, row_X, odd_X, last_row, real_X, number_N, whole, q_stride_S, k_stride_S, scale_log2,
    S: tl.constexpr, D: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums along antidiagonals, one key of every strided key a step, in base 2."""
    lanes_D = tl.arange(0, BLOCK_D)
    z_XN = tl.zeros([BLOCK_X, BLOCK_N], tl.float32)
    for a in tl.range(0, S, num_stages=STAGES):
        at_X = tl.minimum(row_X + ((S - 1 - a - odd_X) & (S - 1)), last_row).to(tl.int64)
        at_N = (number_N * S + a).to(tl.int64)
        q_at = q_base + at_X[:, None] * q_stride_S + lanes_D[None, :]
        k_at = k_base + at_N[:, None] * k_stride_S + lanes_D[None, :]
        q_XD = tl.load(q_at, mask=(real_X > 0)[:, None] & (lanes_D < D)[None, :], other=0.0)
        k_ND = tl.load(k_at, mask=(number_N < whole)[:, None] & (lanes_D < D)[None, :], other=0.0)
        if UPCAST:
            q_XD = q_XD.to(tl.float32)
            k_ND = k_ND.to(tl.float32)
        z_XN = tl.dot(q_XD, tl.trans(k_ND), z_XN, input_precision=PRECISION)
    return z_XN * scale_log2


@triton.jit
@no_type_check
def _visible(first_X, end_X, number_N, window, S: tl.constexpr, WINDOWED: tl.constexpr):
    keep_XN = number_N[None, :] < end_X[:, None]
    if WINDOWED:
        keep_XN = keep_XN & (first_X[:, None] - (number_N * S + S - 1)[None, :] < window)
    return keep_XN


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "first_tile", "row_tiles", "key_tiles", "places"])
@no_type_check
def antidiagonal_kernel(
    q_ptr, k_ptr, scores_ptr, heads_ptr, past_ptr, lengths_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    scale_log2, window, first_tile, row_tiles, key_tiles, places,
    GROUP: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE_X: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of strided rows, heads asked for, batch). TILE_X strided rows are a row tile, TILE_N strided keys
    a key tile. `scores_ptr` is [batch, places, row_tiles, key_tiles], zeros before; tile 0 of it is `first_tile`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most: nothing long is left for the end
    place = tl.program_id(1)
    batch = tl.program_id(2)
    head = tl.load(heads_ptr + place)
    past = tl.load(past_ptr + batch).to(tl.int32)
    length = tl.load(lengths_ptr + batch).to(tl.int32)

    x_X = block * BLOCK_X + tl.arange(0, BLOCK_X)
    row_X = (first_tile * TILE_X + x_X) * S  # in the chunk
    first_X = past + row_X  # in the sequence
    real_X = tl.minimum(tl.maximum(length - first_X, 0), S)
    whole = length // S
    end_X = tl.where(real_X > 0, tl.minimum(first_X // S + 1, whole), 0)
    last_row = length - past - 1
    odd_X = x_X % 2

    q_base = q_ptr + batch.to(tl.int64) * q_stride_B + head.to(tl.int64) * q_stride_H
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + (head // GROUP).to(tl.int64) * k_stride_G
    lanes_N = tl.arange(0, BLOCK_N)
    stop = (tl.max(end_X) + BLOCK_N - 1) // BLOCK_N
    start = 0
    if WINDOWED:  # the last key of the first strided key seen is less than `window` before the first row
        start = tl.maximum(tl.min(first_X) - window - S + 1, 0) // S // BLOCK_N

    m_X = tl.full([BLOCK_X], float("-inf"), tl.float32)
    l_X = tl.zeros([BLOCK_X], tl.float32)
    for step in range(start, stop):
        number_N = step * BLOCK_N + lanes_N
        z_XN = _logits(
            q_base, k_base, row_X, odd_X, last_row, real_X, number_N, whole, q_stride_S, k_stride_S, scale_log2,
            S, D, BLOCK_X, BLOCK_N, BLOCK_D, STAGES, PRECISION, UPCAST,
        )  # fmt: skip
        z_XN = tl.where(_visible(first_X, end_X, number_N, window, S, WINDOWED), z_XN, float("-inf"))
        new_m_X = tl.maximum(m_X, tl.max(z_XN, 1))
        base_X = tl.where(new_m_X == float("-inf"), 0.0, new_m_X)
        l_X = l_X * tl.exp2(m_X - base_X) + tl.sum(tl.exp2(z_XN - base_X[:, None]), 1)
        m_X = new_m_X

    # What a strided row counts: its real rows among those of the row tile that see any strided key.
    TILES_X: tl.constexpr = BLOCK_X // TILE_X
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    rows_X = tl.where(l_X > 0.0, real_X, 0).to(tl.float32)
    total_R = tl.sum(tl.reshape(rows_X, (TILES_X, TILE_X)), 1)
    weight_X = rows_X / tl.where(l_X > 0.0, l_X, 1.0)
    base_X = tl.where(l_X > 0.0, m_X, 0.0)
    tile_R = block * TILES_X + tl.arange(0, TILES_X)
    scores_R = ((batch * places + place) * row_tiles + tile_R).to(tl.int64) * key_tiles
    for step in range(start, stop):
        number_N = step * BLOCK_N + lanes_N
        z_XN = _logits(
            q_base, k_base, row_X, odd_X, last_row, real_X, number_N, whole, q_stride_S, k_stride_S, scale_log2,
            S, D, BLOCK_X, BLOCK_N, BLOCK_D, STAGES, PRECISION, UPCAST,
        )  # fmt: skip
        keep_XN = _visible(first_X, end_X, number_N, window, S, WINDOWED)
        y_XN = tl.where(keep_XN, tl.exp2(z_XN - base_X[:, None]), 0.0) * weight_X[:, None]
        y_XM = tl.sum(tl.reshape(y_XN, (BLOCK_X, TILES_N, TILE_N)), 2)
        score_RM = tl.sum(tl.reshape(y_XM, (TILES_X, TILE_X, TILES_N)), 1) / tl.maximum(total_R, 1.0)[:, None]
        tile_M = step * TILES_N + tl.arange(0, TILES_N)
        keep_RM = (tile_R < row_tiles)[:, None] & (tile_M < key_tiles)[None, :]
        tl.store(scores_ptr + scores_R[:, None] + tile_M[None, :], score_RM, mask=keep_RM)
