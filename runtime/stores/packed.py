"""Tokens packed as the host holds them: one token's keys and values of all heads, of all batch rows, side by side.

Shapes: B batch, G KV heads, S tokens, D head size, P = 2 for key and value.
"""

from __future__ import annotations

import torch

from sparsekv.runtime.stores.base import Layout


def empty_packed(tokens: int, layout: Layout) -> torch.Tensor:
    """[S, B, P, G, D] on the device, as the host holds tokens."""
    shape = (tokens, layout.batch, 2, layout.heads, layout.size)
    return torch.empty(shape, dtype=layout.dtype, device=layout.device)


def unpacked(packed_SBPGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as views, [B, G, S, D]."""
    k_BGSD, v_BGSD = (packed_SBPGD[:, :, pair].permute(1, 2, 0, 3) for pair in (0, 1))
    return k_BGSD, v_BGSD


def packed(k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """[S, B, P, G, D], contiguous: the memory of the two where they came from `unpacked`, else a copy."""
    (batch, heads, tokens, size), layout = k_BGSD.shape, Layout.of(k_BGSD)
    strides = (2 * heads * size, size, batch * 2 * heads * size, 1)
    together = k_BGSD.untyped_storage().data_ptr() == v_BGSD.untyped_storage().data_ptr()
    apart = v_BGSD.storage_offset() - k_BGSD.storage_offset()
    if k_BGSD.stride() == v_BGSD.stride() == strides and together and apart == heads * size:
        return k_BGSD.as_strided((tokens, batch, 2, heads, size), (strides[2], strides[0], heads * size, size, 1))
    packed_SBPGD = empty_packed(tokens, layout)
    packed_SBPGD[:, :, 0] = k_BGSD.permute(2, 0, 1, 3)
    packed_SBPGD[:, :, 1] = v_BGSD.permute(2, 0, 1, 3)
    return packed_SBPGD
