"""Adds the single columns of an index to attention over its tiles: goes on with the online softmax of the tile pass.

A row's output and log-sum-exp are an online softmax in a state like any other: maximum = lse, sum = 1, accumulator =
out. So the columns join it with one read and one write of both, and a row tile without a live column costs the words of
its live bits alone.

The columns of a head are packed first: their keys and values, read by every row tile, then lie side by side. Reading
them where they are would cost every row tile an address for each key, and the pass ran at a third of the speed that
whole tiles do. Columns that a row does not compute are few among those it may; they get a score of minus infinity.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory; in kernels M rows of a block, C columns of a
step, D head size padded to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsekv.kernels.prefill.triton import LOG2_E, _live_words, _rows
from sparsekv.kernels.tiles import PrefillCall, TileIndex
from sparsekv.kernels.triton_support import quick

_LOG_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class ColumnLaunch:
    """Rows of a program, columns gathered at once (a multiple of 32), warps, pipeline depth, most registers."""

    block_m: int
    block_c: int
    warps: int
    stages: int
    registers: int | None = None


# The largest padded head size that a row is for, and its launch; ascending. With 128 registers two programs share a
# multiprocessor, so that one takes exponentials while the other multiplies; a third stage would not fit beside another
# program. 1,024 columns of 32 heads of 128 at 128K tokens take 3.6 ms on an H200; with any number of registers 4.2.
_HALF = (
    (64, ColumnLaunch(128, 64, 8, 3, 128)),
    (128, ColumnLaunch(128, 64, 8, 2, 128)),
    (256, ColumnLaunch(128, 32, 8, 2)),
)
# Without tensor cores every product is unrolled into registers; this only has to be right.
_FLOAT32 = ((128, ColumnLaunch(32, 32, 4, 1)), (256, ColumnLaunch(16, 32, 4, 1)))


def add_columns(out_BHSD: torch.Tensor, lse_BHS: torch.Tensor, call: PrefillCall, index: TileIndex) -> None:
    """Makes attention over the tiles into attention over tiles and live columns, in place.

    Args:
        out_BHSD: over the tiles alone; rows that see nothing hold 0. Written.
        lse_BHS: its log-sum-exp, contiguous; rows that see nothing hold -inf. Written.
    """
    q_BHSD, k_BGKD, v_BGKD, chunk, window = call.q_BHSD, call.k_BGKD, call.v_BGKD, call.chunk, call.window
    B, H, S, D = q_BHSD.shape
    G, C = k_BGKD.shape[1], index.columns_BHC.shape[2]
    block_d = triton.next_power_of_2(D)
    launches = _FLOAT32 if q_BHSD.dtype == torch.float32 else _HALF
    blocks = next(launch for limit, launch in launches if block_d <= limit)
    blocks = replace(blocks, block_m=min(blocks.block_m, index.tile.query))
    past_B, lengths_B = chunk.on_device(q_BHSD.device)
    columns_BHC, dense_H = index.columns_BHC.contiguous(), index.dense_H.contiguous()
    packed = triton.cdiv(C, blocks.block_c) * blocks.block_c
    packed_k, packed_v = k_BGKD.new_empty((2, B * H * packed, block_d))
    with torch.cuda.device_of(q_BHSD):
        pack_kernel[(packed // blocks.block_c, H, B)](
            k_BGKD, v_BGKD, packed_k, packed_v, columns_BHC, dense_H, lengths_B,
            *k_BGKD.stride()[:3], *v_BGKD.stride()[:3], H, C, packed,
            GROUP=H // G, D=D, BLOCK_D=block_d, BLOCK_C=blocks.block_c, num_warps=4,
        )  # fmt: skip
        # Descriptors of the packed rows, all heads below one another: blocks of them are copied in bulk.
        k_rows, v_rows = (TensorDescriptor.from_tensor(x, [blocks.block_c, block_d]) for x in (packed_k, packed_v))
        columns_kernel[(H // G * triton.cdiv(S, blocks.block_m), G, B)](
            q_BHSD, k_rows, v_rows, out_BHSD, lse_BHS, columns_BHC, index.live_BHTN.contiguous(), dense_H, past_B,
            lengths_B, *q_BHSD.stride()[:3], *out_BHSD.stride()[:3],
            call.scale * LOG2_E, window or 0, G, S, index.live_BHTN.shape[2], C, packed, index.live_BHTN.shape[3],
            GROUP=H // G, D=D, BLOCK_D=block_d, TILE_M=index.tile.query, BLOCK_M=blocks.block_m,
            BLOCK_C=blocks.block_c, STAGES=blocks.stages, WINDOWED=window is not None and window < chunk.longest,
            PRECISION="ieee", num_warps=blocks.warps, **({"maxnreg": blocks.registers} if blocks.registers else {}),
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["heads", "columns", "packed"])
@no_type_check
def pack_kernel(
    k_ptr, v_ptr, packed_k_ptr, packed_v_ptr, columns_ptr, dense_ptr, lengths_ptr,
    k_stride_B, k_stride_G, k_stride_S, v_stride_B, v_stride_G, v_stride_S,
    heads, columns, packed,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of columns, H, B). Packed rows are BLOCK_D wide; what is no column is 0."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    batch_head = (batch * heads + head).to(tl.int64)
    slot_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    j_C = tl.load(columns_ptr + batch_head * columns + slot_C, mask=slot_C < columns, other=-1)
    # Columns ascend and what pads them comes last: a block without any is read by nobody.
    if (tl.max(j_C) >= 0) & (tl.load(dense_ptr + head).to(tl.int32) == 0):
        keep_C = (j_C >= 0) & (j_C < tl.load(lengths_ptr + batch))
        lanes_D = tl.arange(0, BLOCK_D)
        k_base = k_ptr + batch.to(tl.int64) * k_stride_B + (head // GROUP).to(tl.int64) * k_stride_G
        v_base = v_ptr + batch.to(tl.int64) * v_stride_B + (head // GROUP).to(tl.int64) * v_stride_G
        at_CD = (batch_head * packed + slot_C)[:, None] * BLOCK_D + lanes_D[None, :]
        j64_C = j_C.to(tl.int64)
        tl.store(packed_k_ptr + at_CD, _rows(k_base, j64_C, k_stride_S, lanes_D, keep_C, True, D))
        tl.store(packed_v_ptr + at_CD, _rows(v_base, j64_C, v_stride_S, lanes_D, keep_C, True, D))


@triton.jit
@no_type_check
def _live(live_row, slot_C, columns):
    word_C = tl.load(live_row + slot_C // 32, mask=slot_C < columns, other=0)
    return (word_C >> (slot_C % 32)) & 1 != 0


@triton.jit
@no_type_check
def _last_live(live_row, column_row, step, columns, BLOCK_C: tl.constexpr):
    """The last live column of a step; without one 2 ** 30, as it says nothing of the steps before."""
    slot_C = step * BLOCK_C + tl.arange(0, BLOCK_C)
    j_C = tl.load(column_row + slot_C, mask=slot_C < columns, other=-1)
    last = tl.max(tl.where(_live(live_row, slot_C, columns), j_C, -1))
    return tl.where(last < 0, 1 << 30, last)


@triton.jit
@no_type_check
def _join(acc_MD, m_M, l_M, q_MD, k_CD, v_CD, keep_C, keep_MC, scale_log2, MASKED: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax, in base 2. A row may have seen no key yet: its maximum is -inf."""
    s_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision=PRECISION) * scale_log2
    s_MC += tl.where(keep_C, 0.0, float("-inf"))[None, :]
    if MASKED:
        s_MC = tl.where(keep_MC, s_MC, float("-inf"))
    new_m_M = tl.maximum(m_M, tl.max(s_MC, 1))
    base_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    p_MC = tl.exp2(s_MC - base_M[:, None])
    decay_M = tl.exp2(m_M - base_M)
    l_M = l_M * decay_M + tl.sum(p_MC, 1)
    acc_MD = tl.dot(p_MC.to(v_CD.dtype), v_CD, acc_MD * decay_M[:, None], input_precision=PRECISION)
    return acc_MD, new_m_M, l_M


@quick
@triton.jit(do_not_specialize=["window", "kv_heads", "queries", "query_tiles", "columns", "packed", "words"])
@no_type_check
def columns_kernel(
    q_ptr, k_rows, v_rows, out_ptr, lse_ptr, columns_ptr, live_ptr, dense_ptr, past_ptr, lengths_ptr,
    q_stride_B, q_stride_H, q_stride_S, out_stride_B, out_stride_H, out_stride_S,
    scale_log2, window, kv_heads, queries, query_tiles, columns, packed, words,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (GROUP * row blocks, KV heads, batch). Writes `out` and `lse` of rows that see a live column, no others.

    `k_rows` and `v_rows` describe the packed columns, `packed` rows a head, in blocks of [BLOCK_C, BLOCK_D].
    """
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUP  # the last rows have the most columns: they go first
    kv_head = tl.program_id(1)
    head = kv_head * GROUP + tl.program_id(0) % GROUP
    batch = tl.program_id(2)
    batch_head = (batch * kv_heads * GROUP + head).to(tl.int64)

    past = tl.load(past_ptr + batch)
    length = tl.load(lengths_ptr + batch)
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)  # in the chunk
    i_M = past + row_M  # in the sequence
    real_M = (row_M < queries) & (i_M < length)
    computes = (past + block * BLOCK_M < length) & (tl.load(dense_ptr + head).to(tl.int32) == 0)
    live_row = live_ptr + (batch_head * query_tiles + block * BLOCK_M // TILE_M) * words
    first_word, last_word = _live_words(live_row, tl.where(computes, words, 0), 128)

    if first_word < last_word:
        lanes_D = tl.arange(0, BLOCK_D)
        lanes_C = tl.arange(0, BLOCK_C)
        q_base = q_ptr + batch.to(tl.int64) * q_stride_B + head.to(tl.int64) * q_stride_H
        out_base = out_ptr + batch.to(tl.int64) * out_stride_B + head.to(tl.int64) * out_stride_H
        lse_at = lse_ptr + batch_head * queries + row_M
        row64_M = row_M.to(tl.int64)
        q_MD = _rows(q_base, row64_M, q_stride_S, lanes_D, real_M, True, D)

        m_M = tl.load(lse_at, mask=real_M, other=float("-inf")) / _LOG_2
        l_M = tl.where(m_M == float("-inf"), 0.0, 1.0)
        acc_MD = _rows(out_base, row64_M, out_stride_S, lanes_D, real_M, True, D).to(tl.float32)

        WORDS: tl.constexpr = BLOCK_C // 32
        first_step = first_word // WORDS
        last_step = (last_word + WORDS - 1) // WORDS
        column_row = columns_ptr + batch_head * columns
        # Up to `whole` every row lies behind every live column. Mostly that is all: near the diagonal there are tiles.
        whole = first_step
        if not WINDOWED:
            whole = last_step
            last_live = _last_live(live_row, column_row, whole - 1, columns, BLOCK_C)
            while (whole > first_step) & (last_live > past + block * BLOCK_M):
                whole -= 1
                last_live = _last_live(live_row, column_row, tl.maximum(whole - 1, 0), columns, BLOCK_C)

        first_row = (batch * kv_heads * GROUP + head) * packed
        for step in tl.range(first_step, whole, num_stages=STAGES):
            k_CD = k_rows.load([first_row + step * BLOCK_C, 0])
            v_CD = v_rows.load([first_row + step * BLOCK_C, 0])
            keep_C = _live(live_row, step * BLOCK_C + lanes_C, columns)
            acc_MD, m_M, l_M = _join(
                acc_MD, m_M, l_M, q_MD, k_CD, v_CD, keep_C, keep_C, scale_log2, False, PRECISION
            )  # fmt: skip
        for step in tl.range(whole, last_step, num_stages=STAGES if WINDOWED else 1):
            slot_C = step * BLOCK_C + lanes_C
            k_CD = k_rows.load([first_row + step * BLOCK_C, 0])
            v_CD = v_rows.load([first_row + step * BLOCK_C, 0])
            j_C = tl.load(column_row + slot_C, mask=slot_C < columns, other=-1)
            keep_C = _live(live_row, slot_C, columns) & (j_C >= 0)
            keep_MC = j_C[None, :] <= i_M[:, None]
            if WINDOWED:
                keep_MC = keep_MC & (i_M[:, None] - j_C[None, :] < window)
            acc_MD, m_M, l_M = _join(acc_MD, m_M, l_M, q_MD, k_CD, v_CD, keep_C, keep_MC, scale_log2, True, PRECISION)

        seen_M = real_M & (l_M > 0.0)
        l_M = tl.where(seen_M, l_M, 1.0)
        out_MD = acc_MD / l_M[:, None]
        out_at = out_base + row64_M[:, None] * out_stride_S + lanes_D[None, :]
        tl.store(out_at, out_MD.to(out_ptr.dtype.element_ty), mask=seen_M[:, None] & (lanes_D < D)[None, :])
        tl.store(lse_at, (m_M + tl.log2(l_M)) * _LOG_2, mask=seen_M)
