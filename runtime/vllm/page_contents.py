"""Reads keys and values in a page of vLLM's cache: where `pages_of` looks for them, and by which scales.

Shapes: N pages, G KV heads, S tokens of a page, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.kernels.keys import FLOAT8, Scales
from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm import internals as vllm


def check_pages(
    config: Any, impl: Any, layer: Any, spec: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a page as vLLM does and reads it back: its layout depends on settings, the release and the CPU.

    Returns:
        Two pages of keys and of values, of which the second was written; bytes of a layer with `scales_of`.

    Raises:
        UnsupportedError: keys and values do not lie where `pages_of` looks for them.
    """
    tokens, heads, size = spec.block_size, spec.num_kv_heads, spec.head_size
    number_SGD = torch.arange(tokens * heads * size, device=device).view(tokens, heads, size)
    scales = scales_of(config, impl, layer)
    # What is exact, and differs from its neighbours: small whole numbers; of 8 bits, every number that there is.
    if scales is None:
        stored = k_SGD, v_SGD = [sign * number_SGD.remainder(251).to(spec.dtype) for sign in (1, -1)]
    else:
        stored = [(number_SGD.remainder(126) + 1 + sign).to(torch.uint8) for sign in (0, 128)]
        both = zip(stored, (scales.k_G, scales.v_G), strict=True)
        k_SGD, v_SGD = (x.view(FLOAT8).to(scales.dtype) * scale_G[:, None].to(scales.dtype) for x, scale_G in both)
    with vllm.set_current_vllm_config(config):  # backends ask it for the layout
        cache = vllm.platform.empty_cache(2, spec, device)
    impl.do_kv_cache_update(layer, k_SGD, v_SGD, cache, torch.arange(tokens, device=device) + tokens)
    pages = vllm.platform.pages_of(cache)
    if not all(torch.equal(x_NGSD[1], own.transpose(0, 1)) for x_NGSD, own in zip(pages, stored, strict=True)):
        raise UnsupportedError(
            f"expected keys and values in plain pages, found that vLLM packs those of {spec.dtype} in an order of its "
            f"own ({getattr(layer, 'isa', 'its settings')}); on a CPU use --dtype float32"
        )
    return pages


def scales_of(config: Any, impl: Any, layer: Any) -> Scales | None:
    """Those of a layer whose cache is in e4m3, once its weights are loaded; None of any other one."""
    if not impl.kv_cache_dtype.startswith("fp8"):  # some layers may skip it
        return None

    def of_heads(scale: torch.Tensor) -> torch.Tensor:
        return scale.detach().float().reshape(-1).expand(impl.num_kv_heads).contiguous()

    of_q = of_heads(layer._q_scale) if layer.query_quant is not None else None
    return Scales(of_heads(layer._k_scale), of_heads(layer._v_scale), config.model_config.dtype, of_q)
