"""Caches and attention kernels of vLLM: a small class for each device, and where keys and values lie in a page.

Shapes: N pages, G KV heads, S tokens of a page, D head size, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sparsekv.kernels.keys import FLOAT8, PLAIN, Scales, Softmax
from sparsekv.plans.errors import UnsupportedError


class OnCpu:
    """vLLM on a CPU. The platform chooses its own backend whatever is asked for."""

    backend = planned = AttentionBackendEnum.CPU_ATTN
    page = 128  # tokens, where nothing else is asked for
    captures = False  # CUDA graphs
    profiles = False  # runs the model without a cache first, and measures the memory that this takes

    @staticmethod
    def classes() -> tuple[Any, Any, Any]:
        """vLLM's own backend, implementation and metadata builder."""
        from vllm.v1.attention.backends.cpu_attn import (
            CPUAttentionBackend,
            CPUAttentionBackendImpl,
            CPUAttentionMetadataBuilder,
        )

        return CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    @staticmethod
    def empty_cache(pages: int, spec: Any, device: torch.device) -> torch.Tensor:
        sizes = (pages, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        return torch.zeros(sizes, dtype=spec.dtype, device=device)

    @staticmethod
    def pages_of(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in a layer's cache, [N, G, S, D] each: views. A page holds, for each KV head, its keys
        transposed, then its values."""
        pages, heads, tokens, both = kv_cache.shape
        parts = kv_cache.view(pages, heads, 2, tokens * both // 2)
        k_NGSD = parts[:, :, 0].view(pages, heads, both // 2, tokens).transpose(2, 3)
        return k_NGSD, parts[:, :, 1].view(pages, heads, tokens, both // 2)

    @staticmethod
    def of_lengths(metadata: Any, lengths_B: torch.Tensor) -> Any:
        """The same rows: those that choose are computed in vain."""
        return metadata


class OnCuda:
    """vLLM on an NVIDIA GPU: its FlashAttention backend where there is a plan, and by the name CUSTOM."""

    backend = AttentionBackendEnum.CUSTOM
    planned = AttentionBackendEnum.FLASH_ATTN
    page = 16
    captures = True
    profiles = True

    @staticmethod
    def classes() -> tuple[Any, Any, Any]:
        """Importing these reads the engine's configuration."""
        from vllm.v1.attention.backends.flash_attn import (
            FlashAttentionBackend,
            FlashAttentionImpl,
            FlashAttentionMetadataBuilder,
        )

        return FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

    @staticmethod
    def empty_cache(pages: int, spec: Any, device: torch.device) -> torch.Tensor:
        """A layer's cache as vLLM allocates it: heads or tokens come first in memory, as its settings say."""
        backend, *_ = OnCuda.classes()
        shape = (pages, spec.num_kv_heads, spec.block_size, spec.head_size)
        return empty_pages(backend, get_current_vllm_config(), *shape, spec.dtype, device)

    @staticmethod
    def pages_of(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in a layer's cache, [N, G, S, D] each: views. Those of a token lie side by side."""
        k_NGSD, v_NGSD = kv_cache.split(kv_cache.shape[-1] // 2, -1)
        return k_NGSD, v_NGSD

    @staticmethod
    def of_lengths(metadata: Any, lengths_B: torch.Tensor) -> Any:
        """The metadata with other lengths; rows of length 0 read nothing and their output is 0. The schedule of a step,
        made for the true lengths, remains: it says into how many parts a row is split at most."""
        other = copy(metadata)
        other.seq_lens = lengths_B
        return other

    @staticmethod
    def kernel(config: VllmConfig, layers: Sequence[Any], graph_rows: int) -> dict[str, int]:
        """Settings of FlashAttention 3 as vLLM launches it, for `attention`: into how many parts a request's keys are
        split at most in steps of so many rows, which graphs may hold, and whether one schedule serves all layers."""
        from vllm.envs import VLLM_BATCH_INVARIANT

        if VLLM_BATCH_INVARIANT:
            return {"splits": 1, "split_rows": 1 << 31, "scheduled": False}
        splits = config.attention_config.flash_attn_max_num_splits_for_cuda_graph
        scheduled = len({layer.sliding_window for layer in layers}) == 1
        return {"splits": splits, "split_rows": graph_rows, "scheduled": scheduled}

    @staticmethod
    def attention(
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        table_BP: torch.Tensor,
        lengths: Sequence[int],
        scale: float,
        out_THD: torch.Tensor,
        scales: Scales | None = None,
        softmax: Softmax = PLAIN,
        left_B: torch.Tensor | None = None,
        *,
        splits: int = 0,
        split_rows: int = 0,
        scheduled: bool = True,
    ) -> Callable[[], Any]:
        """A launch of the kernel that an engine attends by, causal, of the last rows of requests.

        Args:
            cache: of a layer, as `empty_cache` makes it.
            lengths: tokens of each request, its rows included.
            out_THD: where each launch writes its result.
            scales: of a cache in e4m3, and of queries that are in that as well.
            left_B: int32, the lengths that are attended to, where they are less than those of the schedule.
            splits: parts of a request's keys at most in a step of at most so many rows; others, as `kernel` has it.
        """
        from vllm.v1.attention.backends.flash_attn import (
            flash_attn_varlen_func,
            get_flash_attn_version,
            get_scheduler_metadata,
        )

        starts, lengths_B, rows = _requests(q_THD, lengths)
        size, by = q_THD.shape[-1], dict[str, Any]()
        keys, values = cache.transpose(1, 2).split(size, dim=-1)
        if scales is not None:
            keys, values = keys.view(FLOAT8), values.view(FLOAT8)
            named = {"q_descale": scales.q_G, "k_descale": scales.k_G, "v_descale": scales.v_G}
            by = {
                name: None if scale_G is None else scale_G.expand(len(lengths), -1) for name, scale_G in named.items()
            }
        version = get_flash_attn_version(head_size=size)
        if version == 3:  # whose tiles an engine divides once a step, for all layers
            heads, (_, page, kv_heads, _) = q_THD.shape[1], keys.shape
            shape = len(lengths), rows, max(*lengths, 1), heads, kv_heads, size
            more = {"cu_seqlens_q": starts, "page_size": page, "causal": True}
            by["num_splits"] = more["num_splits"] = splits if len(q_THD) <= split_rows else 0
            if scheduled:
                by["scheduler_metadata"] = get_scheduler_metadata(*shape, lengths_B, q_THD.dtype, **more)
        by |= {"q": q_THD, "k": keys, "v": values, "out": out_THD, "block_table": table_BP, "fa_version": version}
        by |= {"cu_seqlens_q": starts, "max_seqlen_q": rows, "max_seqlen_k": max(*lengths, 1), "softmax_scale": scale}
        by |= {"seqused_k": lengths_B if left_B is None else left_B, "causal": True}
        return partial(flash_attn_varlen_func, **by, softcap=softmax.cap, s_aux=softmax.sinks_H)


# None on devices that no backend of ours was made for. AMD's devices are of type "cuda" as well.
platform: Any = OnCpu if current_platform.is_cpu() else OnCuda if current_platform.is_cuda() else None


def _requests(q_THD: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where requests of as many rows each begin and the last ends, their lengths, and the rows of one."""
    like: Any = {"dtype": torch.int32, "device": q_THD.device}
    rows = len(q_THD) // len(lengths)
    return torch.arange(0, len(q_THD) + 1, rows, **like), torch.tensor(lengths, **like), rows


def empty_pages(
    backend: Any, config: VllmConfig, pages: int, kv_heads: int, tokens: int, size: int, dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """A layer's cache on CUDA as the release allocates it, [N, G, S, 2D], whatever comes first in memory. vLLM's own
    backend had the order before 0.30; since then the configuration has it once an engine has resolved it, and the
    backend's preference until then."""
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


def check_pages(
    config: Any, impl: Any, layer: Any, spec: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes a page as vLLM does and reads it back: its layout depends on settings, the release and the CPU. Gives two
    pages of keys and of values, the second written; bytes of a layer with `scales_of`."""
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
    with set_current_vllm_config(config):  # backends ask it for the layout
        cache = platform.empty_cache(2, spec, device)
    impl.do_kv_cache_update(layer, k_SGD, v_SGD, cache, torch.arange(tokens, device=device) + tokens)
    pages = platform.pages_of(cache)
    if not all(torch.equal(x_NGSD[1], written.transpose(0, 1)) for x_NGSD, written in zip(pages, stored, strict=True)):
        raise UnsupportedError(
            f"expected keys and values in plain pages, found that vLLM packs those of {spec.dtype} in an order of its "
            f"own ({getattr(layer, 'isa', 'its settings')}); on a CPU use --dtype float32"
        )
    return pages


def scales_of(config: Any, impl: Any, layer: Any) -> Scales | None:
    """The scales of a layer whose cache is in e4m3, once its weights are loaded; None for any other layer."""
    if not impl.kv_cache_dtype.startswith("fp8"):  # some layers may skip it
        return None

    def of_heads(scale: torch.Tensor) -> torch.Tensor:
        return scale.detach().float().reshape(-1).expand(impl.num_kv_heads).contiguous()

    of_q = of_heads(layer._q_scale) if layer.query_quant is not None else None
    return Scales(of_heads(layer._k_scale), of_heads(layer._v_scale), config.model_config.dtype, of_q)
