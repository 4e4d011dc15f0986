"""Stands for SGLang's FlashAttention 3 backend on a CPU: it attends by the same metadata, and by nothing else."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class PagedBackend(TorchNativeAttnBackend):
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
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        given, q_THD = self.forward_metadata, q.view(-1, layer.tp_q_head_num, layer.head_dim)
        assert int(given.cu_seqlens_q[-1]) == len(q_THD)
        out_THD = torch.zeros_like(q_THD)
        keys = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        starts = given.cu_seqlens_q.tolist()
        for number, length in enumerate(given.cache_seqlens_int32.tolist()):
            rows = slice(starts[number], starts[number + 1])
            count = rows.stop - rows.start
            assert count <= given.max_seq_len_q
            if not length:  # the kernel writes zeros
                continue
            slots = given.page_table[number, :length].long()
            k_GKD, v_GKD = (x[slots].transpose(0, 1)[None] for x in keys)
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            q_HTD = q_THD[rows].transpose(0, 1)[None]
            out_HTD = scaled_dot_product_attention(
                q_HTD, k_GKD, v_GKD, attn_mask=mask, enable_gqa=True, scale=layer.scaling
            )
            out_THD[rows] = out_HTD[0].transpose(0, 1)
        return out_THD.flatten(1)

    forward_decode = forward_extend
