"""Adds the single columns of an index to attention over its tiles: checks, two launches, nothing else.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsekv.kernels.kept import on_device
from sparsekv.kernels.prefill.triton_columns_kernel import columns_kernel, pack_kernel
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex
from sparsekv.kernels.triton_support import check_device, check_head_size, check_row_strides, interpreting
from sparsekv.plans.errors import ShapeError

_LOG2_E = 1.4426950408889634


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


def column_launch(dtype: torch.dtype, block_d: int) -> ColumnLaunch:
    """The launch for a dtype and padded head size."""
    table = _FLOAT32 if dtype == torch.float32 else _HALF
    return next(launch for limit, launch in table if block_d <= limit)


def add_columns(
    found: AttentionOutput,
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    index: TileIndex,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
    launch: ColumnLaunch | None = None,
) -> None:
    """Makes attention over the tiles into attention over tiles and live columns, in place.

    Args:
        found: output and log-sum-exp over the tiles alone, all rows of it; rows that see nothing hold 0 and -inf.
            Both are written; the log-sum-exp must be contiguous.
        launch: block sizes to use instead of the table's, for tuning.

    The other arguments are those of `dispatch.prefill_attention`.

    Raises:
        BackendError: the tensors are not on a GPU, or the head size is not supported.
        ShapeError: there is no log-sum-exp to go on from, or a stride is too long for 32-bit offsets inside a block.
    """
    check_device(q_BHSD)
    check_head_size(q_BHSD.shape[-1])
    check_row_strides(q_BHSD, k_BGKD, v_BGKD, found.out_BHSD)
    out_BHSD, lse_BHS = found.out_BHSD, found.lse_BHS
    if lse_BHS is None or not lse_BHS.is_contiguous():
        raise ShapeError("columns are added to an output with a contiguous log-sum-exp: ask the tile pass for it")
    if out_BHSD.numel() == 0 or index.columns_BHC.shape[2] == 0:
        return
    B, H, S, D = q_BHSD.shape
    G, C = k_BGKD.shape[1], index.columns_BHC.shape[2]
    block_d = triton.next_power_of_2(D)
    blocks = launch or column_launch(q_BHSD.dtype, block_d)
    blocks = replace(blocks, block_m=min(blocks.block_m, index.tile.query))
    past_B = on_device(chunk.past, q_BHSD.device, torch.int32)
    lengths_B = on_device(chunk.lengths, q_BHSD.device, torch.int32)
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
            scale * _LOG2_E, window or 0, G, S, index.live_BHTN.shape[2], C, packed, index.live_BHTN.shape[3],
            GROUP=H // G, D=D, BLOCK_D=block_d, TILE_M=index.tile.query, BLOCK_M=blocks.block_m,
            BLOCK_C=blocks.block_c, STAGES=blocks.stages, WINDOWED=window is not None and window < chunk.longest,
            PRECISION="ieee", UPCAST=interpreting() and q_BHSD.dtype == torch.bfloat16,
            num_warps=blocks.warps, **({"maxnreg": blocks.registers} if blocks.registers else {}),
        )  # fmt: skip
