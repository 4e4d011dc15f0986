"""Adds the single columns of an index to attention over its tiles: checks, launch, nothing else.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from sparsekv.kernels.prefill.triton_columns_kernel import columns_kernel
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex
from sparsekv.kernels.topk import on_device
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


# The largest padded head size that a row is for, and its launch; ascending. Not measured yet, only compiled for Hopper:
# with 128 registers two programs share a multiprocessor, so that one loads while the other multiplies. That spills 12
# bytes a thread at head size 64 and 72 at 128; at 256 the sums alone take 128 registers.
_HALF = (
    (64, ColumnLaunch(128, 64, 8, 3, 128)),
    (128, ColumnLaunch(128, 64, 8, 3, 128)),
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
    B, H, S, D = q_BHSD.shape
    G, C = k_BGKD.shape[1], index.columns_BHC.shape[2]
    if out_BHSD.numel() == 0 or C == 0:
        return
    block_d = triton.next_power_of_2(D)
    blocks = launch or column_launch(q_BHSD.dtype, block_d)
    blocks = replace(blocks, block_m=min(blocks.block_m, index.tile.query))
    past_B = on_device(chunk.past, q_BHSD.device, torch.int32)
    lengths_B = on_device(chunk.lengths, q_BHSD.device, torch.int32)
    grid = (H // G * triton.cdiv(S, blocks.block_m), G, B)
    with torch.cuda.device_of(q_BHSD):
        columns_kernel[grid](
            q_BHSD, k_BGKD, v_BGKD, out_BHSD, lse_BHS, index.columns_BHC.contiguous(), index.live_BHTN.contiguous(),
            index.dense_H.contiguous(), past_B, lengths_B,
            *q_BHSD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3], *out_BHSD.stride()[:3],
            scale * _LOG2_E, window or 0, G, S, index.live_BHTN.shape[2], C, index.live_BHTN.shape[3],
            GROUP=H // G, D=D, BLOCK_D=block_d, TILE_M=index.tile.query, BLOCK_M=blocks.block_m,
            BLOCK_C=blocks.block_c, STAGES=blocks.stages, WINDOWED=window is not None and window < chunk.longest,
            PRECISION="ieee", UPCAST=interpreting() and q_BHSD.dtype == torch.bfloat16,
            num_warps=blocks.warps, **({"maxnreg": blocks.registers} if blocks.registers else {}),
        )  # fmt: skip
