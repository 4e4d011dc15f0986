"""Differences between releases of vLLM, one function each; tools/vllm_contract.py names both sides.

Shapes: N pages, G KV heads, S tokens of a page, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig


def empty_pages(
    backend: Any, config: VllmConfig, pages: int, kv_heads: int, tokens: int, size: int, dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Returns a layer's cache on CUDA as the release allocates it, [N, G, S, 2D], whatever comes first in memory.

    Args:
        backend: vLLM's own, which had the order itself before 0.30; since then the configuration has it once an engine
            has resolved it, and the backend's preference is what it will be.
    """
    if hasattr(backend, "get_kv_cache_shape"):
        shape, order = backend.get_kv_cache_shape(pages, tokens, kv_heads, size), backend.get_kv_cache_stride_order()
    else:
        shape, order = (pages, kv_heads, tokens, 2 * size), _layout(backend, config).layer_view_order
    cache = torch.zeros([shape[at] for at in order], dtype=dtype, device=device)
    return cache.permute([order.index(at) for at in range(len(shape))])


def _layout(backend: Any, config: VllmConfig) -> Any:
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    if config.cache_config.kv_cache_layout is not None:
        return config.cache_config.get_resolved_kv_cache_layout()
    return get_supported_kv_cache_layouts([backend])[0]
