"""Stands for SGLang's FlashAttention 3 backend on a CPU: it attends by the same metadata, and by nothing else."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang_engine import LONGEST
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: None = None,
    num_splits: int = 0,
    ver: int = 3,
    scheduler_metadata: None = None,
) -> torch.Tensor:
    """As SGLang's `flash_attn_with_kvcache`, of what its backend gives it here; caches are [N, S, G, D]."""
    assert (causal, softcap, sinks, num_splits, ver) == (True, 0.0, None, 0, 3)
    starts, out_THD = cu_seqlens_q.tolist(), torch.zeros_like(q)
    assert starts[-1] == len(q)
    for number, length in enumerate(cache_seqlens.tolist()):
        rows = slice(starts[number], starts[number + 1])
        count = rows.stop - rows.start
        assert count <= max_seqlen_q
        if not length:  # the kernel writes zeros
            continue
        pages = page_table[number, : -(-length // k_cache.shape[1])].long()
        k_GKD, v_GKD = (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None].to(q.dtype) for x in (k_cache, v_cache))
        if k_descale is not None and v_descale is not None:
            k_GKD, v_GKD = k_GKD * k_descale[number, :, None, None], v_GKD * v_descale[number, :, None, None]
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        q_HTD = q[rows].transpose(0, 1)[None]
        out_HTD = scaled_dot_product_attention(
            q_HTD, k_GKD, v_GKD, attn_mask=mask, enable_gqa=True, scale=softmax_scale
        )
        out_THD[rows] = out_HTD[0].transpose(0, 1)
    return out_THD


class PagedBackend(TorchNativeAttnBackend):
    flash_attn_with_kvcache = staticmethod(attend)
    num_splits, fa_impl_ver = 0, 3
    max_context_len = LONGEST

    def _compute_scheduler_metadata(self, requests: int, longest: int, lengths_B: Any, starts: Any) -> None:
        assert (requests, starts.tolist()) == (len(lengths_B), list(range(requests + 1)))
        assert longest >= max(lengths_B)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._init(forward_batch)

    def _init(self, forward_batch: Any) -> None:
        lengths_B = forward_batch.seq_lens.int()
        decodes = forward_batch.forward_mode.is_decode()
        rows_B = torch.ones_like(lengths_B) if decodes else forward_batch.extend_seq_lens.int()
        table = self.req_to_token_pool.req_to_token
        self.forward_metadata = FlashAttentionMetadata(
            cache_seqlens_int32=lengths_B,
            max_seq_len_q=int(rows_B.max()),
            max_seq_len_k=int(lengths_B.max()),
            cu_seqlens_q=torch.nn.functional.pad(rows_B.cumsum(0).int(), (1, 0)),
            cu_seqlens_k=torch.nn.functional.pad(lengths_B.cumsum(0).int(), (1, 0)),
            page_table=table[forward_batch.req_pool_indices, : max(1000, int(lengths_B.max()))],
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._init(forward_batch)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        if save_kv_cache and k is not None:
            by = (layer.k_scale, layer.v_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *by)
        given, q_THD = self.forward_metadata, q.view(-1, layer.tp_q_head_num, layer.head_dim)
        caches = (x[:, None] for x in self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        scales = {}
        if layer.k_scale is not None:
            shape = (len(given.page_table), layer.tp_k_head_num)
            scales = {"k_descale": layer.k_scale.expand(shape), "v_descale": layer.v_scale.expand(shape)}
        return self.flash_attn_with_kvcache(
            q_THD,
            *caches,
            page_table=given.page_table,
            cache_seqlens=given.cache_seqlens_int32,
            cu_seqlens_q=given.cu_seqlens_q,
            max_seqlen_q=given.max_seq_len_q,
            softmax_scale=layer.scaling,
            causal=True,
            **scales,
        ).flatten(1)

    forward_decode = forward_extend
