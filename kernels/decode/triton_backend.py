"""Decode attention over chosen tokens on a GPU: how many runs to split the tokens into, and the two launches.

Shapes: B batch, H query heads, G KV heads, S tokens in memory, D head size, P runs.
"""

from __future__ import annotations

import torch
import triton

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.kernels.decode.triton_kernel import decode_kernel, merge_kernel
from sparsekv.kernels.tiles import AttentionOutput
from sparsekv.kernels.triton_support import check_device, check_head_size, check_row_strides, interpreting

_LOG2_E = 1.4426950408889634
# Runs of a head: what one program of the merge holds at once.
_MOST_RUNS = 64


def decode(
    q_BHQD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    rows: DecodeRows,
    *,
    scale: float,
    want_lse: bool = False,
    runs: int | None = None,
) -> AttentionOutput:
    """One query token a batch row; arguments as in `dispatch`.

    Args:
        runs: into how many runs to split the tokens, instead of as many as fill the GPU.

    Raises:
        BackendError: the tensors are not on a GPU, or head size or dtype is not supported.
        ShapeError: a stride is too long for 32-bit offsets inside a block.
    """
    check_device(q_BHQD)
    check_head_size(q_BHQD.shape[-1])
    check_row_strides(k_BGSD, v_BGSD)
    B, H, _, D = q_BHQD.shape
    G = k_BGSD.shape[1]
    tokens = rows.tokens_BGN
    listed = tokens.shape[2]
    block_n, stages = (32, 1) if q_BHQD.dtype == torch.float32 else (64, 3)
    blocks = max(1, triton.cdiv(listed + rows.tail, block_n))
    P = min(_MOST_RUNS, blocks, runs or _runs_that_fill(q_BHQD.device, B * G))
    run = triton.cdiv(blocks, P) * block_n
    P = triton.cdiv(blocks * block_n, run)
    part_BHPD = torch.empty((B, H, P, D), dtype=torch.float32, device=q_BHQD.device)
    part_lse_BHP = torch.empty((B, H, P), dtype=torch.float32, device=q_BHQD.device)
    out_BHQD = torch.empty_like(q_BHQD)
    lse_BHQ = torch.empty((B, H, 1), dtype=torch.float32, device=q_BHQD.device)
    block_d = triton.next_power_of_2(D)
    with torch.cuda.device_of(q_BHQD):
        decode_kernel[(P, G, B)](
            q_BHQD, k_BGSD, v_BGSD, part_BHPD, part_lse_BHP, tokens,
            *q_BHQD.stride()[:2], *k_BGSD.stride()[:3], *v_BGSD.stride()[:3],
            tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0,
            scale * _LOG2_E, listed, rows.tail_start, rows.tail_stop, run, G,
            GROUP=H // G, ROWS=max(16, triton.next_power_of_2(H // G)), D=D, BLOCK_D=block_d, BLOCK_N=block_n,
            STAGES=stages, PRECISION="ieee",
            UPCAST=interpreting() and q_BHQD.dtype == torch.bfloat16, num_warps=4,
        )  # fmt: skip
        merge_kernel[(H, B)](
            part_BHPD, part_lse_BHP, out_BHQD, lse_BHQ, *out_BHQD.stride()[:2], H, P,
            D=D, BLOCK_D=block_d, BLOCK_P=triton.next_power_of_2(P), WANT_LSE=want_lse, num_warps=4,
        )  # fmt: skip
    return AttentionOutput(out_BHQD, lse_BHQ if want_lse else None)


def _runs_that_fill(device: torch.device, programs: int) -> int:
    """Runs a KV head for about two programs on every multiprocessor."""
    if device.type != "cuda":
        return 4
    return max(1, 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs)
