"""Sparse prefill on any GPU that Triton serves: checks, launch, nothing else. The device code is triton_kernel.py.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, D head size.
"""

from __future__ import annotations

import torch
import triton

from sparsekv.kernels.kept import on_device
from sparsekv.kernels.prefill.launch import Launch, fit, launch_for
from sparsekv.kernels.prefill.triton_kernel import prefill_kernel
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex
from sparsekv.kernels.triton_support import check_device, check_head_size, check_row_strides, interpreting

_LOG2_E = 1.4426950408889634


def prefill(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    index: TileIndex,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
    want_lse: bool = False,
    launch: Launch | None = None,
) -> AttentionOutput:
    """Attention over the index's tiles and columns, all heads in one launch; arguments as in `dispatch`.

    Args:
        launch: block sizes to use instead of the table's, for tuning.

    Raises:
        BackendError: the tensors are not on a GPU, or head size or dtype is not supported.
        ShapeError: a stride is too long for 32-bit offsets inside a block.
    """
    check_device(q_BHSD)
    check_head_size(q_BHSD.shape[-1])
    check_row_strides(q_BHSD, k_BGKD, v_BGKD)
    B, H, S, D = q_BHSD.shape
    G = k_BGKD.shape[1]
    out_BHSD = torch.empty_like(q_BHSD)
    lse_BHS = torch.empty((B, H, S), dtype=torch.float32, device=q_BHSD.device) if want_lse else None
    if out_BHSD.numel() == 0:
        return AttentionOutput(out_BHSD, lse_BHS)
    block_d = triton.next_power_of_2(D)
    tile = index.tile
    blocks = fit(launch, tile) if launch else launch_for(q_BHSD.device, q_BHSD.dtype, block_d, tile)
    past_B = on_device(chunk.past, q_BHSD.device, torch.int32)
    lengths_B = on_device(chunk.lengths, q_BHSD.device, torch.int32)
    grid = (H // G * triton.cdiv(S, blocks.block_m), G, B)
    with torch.cuda.device_of(q_BHSD):
        prefill_kernel[grid](
            q_BHSD, k_BGKD, v_BGKD, out_BHSD, lse_BHS if lse_BHS is not None else out_BHSD,
            index.tiles_BHTW.contiguous(), index.counts_BHT.contiguous(), index.columns_BHC.contiguous(),
            index.live_BHTN.contiguous(), index.dense_H.contiguous(), past_B, lengths_B,
            *q_BHSD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3], *out_BHSD.stride()[:3],
            scale * _LOG2_E, window or 0, G, S, index.counts_BHT.shape[2], index.tiles_BHTW.shape[3],
            index.columns_BHC.shape[2], index.live_BHTN.shape[3],
            GROUP=H // G, D=D, BLOCK_D=block_d, TILE_M=tile.query, TILE_N=tile.key,
            BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, BLOCK_C=blocks.block_c, STAGES=blocks.stages,
            COLUMN_STAGES=blocks.column_stages, HAS_COLUMNS=index.columns_BHC.shape[2] > 0,
            WINDOWED=window is not None and window < chunk.longest, WANT_LSE=want_lse,
            PRECISION="ieee", UPCAST=interpreting() and q_BHSD.dtype == torch.bfloat16,
            num_warps=blocks.warps,
        )  # fmt: skip
    return AttentionOutput(out_BHSD, lse_BHS)
