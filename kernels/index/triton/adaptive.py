"""Adaptive indices on a GPU: antidiagonal tile scores by a Triton kernel, their choice by torch.

The scores are those that tile_scores.py defines, without strided scores in memory. A program scores BLOCK_X strided
rows of one query head: several whole row tiles. It walks the strided keys that they see twice, BLOCK_N at a time: once
for the maximum and the sum of every strided row's softmax, and once more for the weights, which it adds up per tile and
stores. Computing the products twice costs less than writing them once: what goes to memory is a number a tile. No two
programs store to one number: results are the same run to run.

The products alone are an eighth of those of queries and keys in dense attention, so these heads are far from as cheap
as those of the other patterns: on an H200 they took 8 of the 9 ms that the index of a layer of mixed patterns took at
128K tokens, and 3.6 of 4.7 ms at 32K.

Shapes: as in layout.py; R row tiles of one block, M key tiles, X strided rows of a program, N strided keys of a step,
D head size padded to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.adaptive import index_adaptive
from sparsekv.kernels.index.layout import HeadGroup, HeadIndex, IndexCall, ceil_div
from sparsekv.kernels.index.tile_scores import STRIDE, ScoreKind, TileScores, tile_scores, tiles_up_to
from sparsekv.kernels.index.triton.sizes import strided_launch
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import LONGEST_ROW_STRIDE, head_size_obstacle, interpreting


def obstacle(group: HeadGroup, call: IndexCall) -> str | None:
    """Why the tiles of these heads cannot be scored by the kernel; None when they can."""
    if any(x.stride(3) != 1 or x.stride(2) >= LONGEST_ROW_STRIDE for x in (call.q_BHSD, call.k_BGKD)):
        return f"it needs contiguous heads, and tokens less than {LONGEST_ROW_STRIDE} elements apart"
    return head_size_obstacle(call.layout.head_dim)


def prepare(group: HeadGroup, call: IndexCall) -> HeadIndex:
    """The index of heads with Adaptive patterns; `obstacle` has found nothing against them."""
    return index_adaptive(group, call, score)


def score(kind: ScoreKind, heads: Sequence[int], call: IndexCall) -> Iterator[TileScores]:
    """`tile_scores`, the antidiagonal ones of all heads and a block of row tiles in one launch.

    Takes any strides of batch, heads and tokens and copies neither queries nor keys; what it yields holds about
    topk.BLOCK_ELEMENTS elements. Nothing waits for the device.
    """
    if kind != "antidiagonal":
        yield from tile_scores(kind, heads, call)
        return
    layout = call.layout
    heads_h = on_device(list(heads), layout.device, torch.int32)
    past_B, lengths_B = on_device([layout.chunk.past, layout.chunk.lengths], layout.device, torch.int32)
    for part in blocks(layout.row_tiles, layout.batch * len(heads) * layout.key_tiles):
        shape = (layout.batch, len(heads), part.stop - part.start, tiles_up_to(part, layout))
        scores_BhRM = torch.zeros(shape, dtype=torch.float32, device=layout.device)
        with torch.cuda.device_of(scores_BhRM):
            _launch(scores_BhRM, part.start, (heads_h, past_B, lengths_B), call)
        yield TileScores(tuple(range(len(heads))), part, scores_BhRM)


def _launch(
    scores_BhRM: torch.Tensor, first_tile: int, where: tuple[torch.Tensor, torch.Tensor, torch.Tensor], call: IndexCall
) -> None:
    layout, q_BHSD, k_BGKD = call.layout, call.q_BHSD, call.k_BGKD
    batch, heads, row_tiles, key_tiles = scores_BhRM.shape
    block_d, per_tile = triton.next_power_of_2(layout.head_dim), layout.tile.query // STRIDE
    launch = strided_launch(layout.device, layout.dtype, block_d)
    antidiagonal_kernel[(ceil_div(row_tiles * per_tile, launch.rows), heads, batch)](
        q_BHSD, k_BGKD, scores_BhRM, *where, *q_BHSD.stride()[:3], *k_BGKD.stride()[:3],
        call.scale / STRIDE * math.log2(math.e), layout.window or 0, first_tile, row_tiles, key_tiles, heads,
        GROUP=layout.group_size, S=STRIDE, D=layout.head_dim, BLOCK_D=block_d, TILE_X=per_tile,
        TILE_N=layout.tile.key // STRIDE, BLOCK_X=launch.rows, BLOCK_N=launch.keys, STAGES=launch.stages,
        WINDOWED=layout.window is not None, PRECISION="ieee",
        UPCAST=interpreting() and layout.dtype == torch.bfloat16, num_warps=launch.warps,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["window", "first_tile", "row_tiles", "key_tiles", "asked"])
@no_type_check
def antidiagonal_kernel(
    q_ptr, k_ptr, scores_ptr, heads_ptr, past_ptr, lengths_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    scale_log2, window, first_tile, row_tiles, key_tiles, asked,
    GROUP: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE_X: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of strided rows, heads asked for, batch). TILE_X strided rows are a row tile, TILE_N strided keys
    a key tile. `scores_ptr` is [batch, asked, row_tiles, key_tiles], zeros before; tile 0 of it is `first_tile`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most: nothing long is left for the end
    own = tl.program_id(1)
    batch = tl.program_id(2)
    head = tl.load(heads_ptr + own)
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
    scores_R = ((batch * asked + own) * row_tiles + tile_R).to(tl.int64) * key_tiles
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
