"""Computes how far attention outputs lie from the dense ones, row by row, summed to one number a head; in Triton.

With delta the difference of a row from the dense one and g the gradient there, a row counts, times its weight,

    1/4 * ((g . delta)^2 + |delta|^2 * square).

A program reads some rows of one head, each element once, and leaves one partial sum. Those are added up in a fixed
order, so that equal inputs give equal bits.

Shapes: X batch rows of M rows each, H heads, P partial sums of a head, D head size; in the kernel M is the rows of a
program, and D padded to a power of two.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

# With 16 elements of each tensor a thread, a program takes 48 registers at head size 128 and bfloat16: five fit on a
# multiprocessor of an H200. Nothing spills at head sizes whose rows are not aligned either. Not tuned.
_ELEMENTS, _MOST_ROWS, _WARPS = 4096, 128, 8


def head_damage(
    out_XHMD: torch.Tensor,
    dense_XHMD: torch.Tensor,
    gradient_XHMD: torch.Tensor,
    square_XHM: torch.Tensor,
    weight_X1M: torch.Tensor,
) -> torch.Tensor:
    """The damage of each head: [H], float32, the same bits in every call.

    Args:
        out_XHMD: float32, float16 or bfloat16, any strides.
        dense_XHMD: likewise.
        gradient_XHMD: likewise, usually float32.
        square_XHM: what the squared distance of each row counts, float32.
        weight_X1M: how often each row counts, float32; a row of weight 0 is not read.
    """
    batch, heads, rows, size = out_XHMD.shape
    block_d = triton.next_power_of_2(size)
    block_m = max(1, min(_MOST_ROWS, _ELEMENTS // block_d))
    blocks = triton.cdiv(rows, block_m)
    partial_HP = torch.empty((heads, batch * blocks), dtype=torch.float32, device=out_XHMD.device)
    with torch.cuda.device_of(out_XHMD):
        damage_kernel[(batch * blocks, heads)](
            out_XHMD, dense_XHMD, gradient_XHMD, square_XHM, weight_X1M, partial_HP,
            *out_XHMD.stride(), *dense_XHMD.stride(), *gradient_XHMD.stride(), *square_XHM.stride(),
            weight_X1M.stride(0), weight_X1M.stride(2), rows, blocks,
            D=size, BLOCK_D=block_d, BLOCK_M=block_m, num_warps=_WARPS,
        )  # fmt: skip
    return partial_HP.sum(1)


@triton.jit(
    do_not_specialize=[
        "square_stride_X", "square_stride_H", "square_stride_M", "weight_stride_X", "weight_stride_M", "rows", "blocks",
    ]
)  # fmt: skip
@no_type_check
def damage_kernel(
    out_ptr, dense_ptr, gradient_ptr, square_ptr, weight_ptr, partial_ptr,
    out_stride_X, out_stride_H, out_stride_M, out_stride_D,
    dense_stride_X, dense_stride_H, dense_stride_M, dense_stride_D,
    gradient_stride_X, gradient_stride_H, gradient_stride_M, gradient_stride_D,
    square_stride_X, square_stride_H, square_stride_M, weight_stride_X, weight_stride_M, rows, blocks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows of all batch rows, heads)."""
    part = tl.program_id(0)
    batch = (part // blocks).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row_M = (part % blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes_D = tl.arange(0, BLOCK_D)[None, :]
    weight_at = weight_ptr + batch * weight_stride_X + row_M * weight_stride_M
    weight_M = tl.load(weight_at, mask=row_M < rows, other=0.0)
    counts_M = weight_M > 0.0
    read_MD = counts_M[:, None] & (lanes_D < D)

    out_at = out_ptr + batch * out_stride_X + head * out_stride_H + row_M[:, None] * out_stride_M
    dense_at = dense_ptr + batch * dense_stride_X + head * dense_stride_H + row_M[:, None] * dense_stride_M
    gradient_at = gradient_ptr + batch * gradient_stride_X + head * gradient_stride_H
    gradient_at += row_M[:, None] * gradient_stride_M
    square_at = square_ptr + batch * square_stride_X + head * square_stride_H + row_M * square_stride_M
    out_MD = tl.load(out_at + lanes_D * out_stride_D, mask=read_MD, other=0.0).to(tl.float32)
    dense_MD = tl.load(dense_at + lanes_D * dense_stride_D, mask=read_MD, other=0.0).to(tl.float32)
    g_MD = tl.load(gradient_at + lanes_D * gradient_stride_D, mask=read_MD, other=0.0).to(tl.float32)
    square_M = tl.load(square_at, mask=counts_M, other=0.0)

    off_MD = out_MD - dense_MD
    along_M = tl.sum(off_MD * g_MD, 1)
    damage_M = 0.25 * (along_M * along_M + tl.sum(off_MD * off_MD, 1) * square_M)
    # Rows that do not count are zeros here.
    tl.store(partial_ptr + head * tl.num_programs(0) + part, tl.sum(damage_M * weight_M, 0))
