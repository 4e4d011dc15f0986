"""The oracle behind the interface of a backend: dense, float32, with an explicit mask. Never used for work."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex


@torch.no_grad()
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
) -> AttentionOutput:
    """Attention under the mask that the index stands for; arguments as in `dispatch`."""
    mask_BHSK = mask_of(index, chunk, q_BHSD.shape[2], window)
    found = reference_attention(q_BHSD, k_BGKD, v_BGKD, mask_BHSK, scale=scale)
    return found if want_lse else replace(found, lse_BHS=None)
