"""The kernel that vLLM attends by on a CPU, launched alone as `OnCuda.attention` launches that of a GPU: engines time
it on GPUs alone, and tests of that run here too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sparsekv.kernels.keys import PLAIN, Scales, Softmax
from sparsekv.runtime.vllm import devices


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
) -> Callable[[], Any]:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa, envs, ops

    (_, heads, size), (pages, kv_heads, tokens, _) = q_THD.shape, cache.shape
    keys, values = cache.view(pages, kv_heads, 2 * tokens, size).chunk(2, dim=2)
    starts, lengths_B, _ = devices._requests(q_THD, lengths)
    lengths_B = lengths_B if left_B is None else left_B
    stored: dict[str, Any] = {} if scales is None else {"kv_cache_dtype": "fp8"}
    by = {} if scales is None else {"k_scale": float(scales.k_G[0]), "v_scale": float(scales.v_G[0])}  # of a tensor
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=lengths_B,
        dtype=q_THD.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(q_THD.dtype, tokens, size),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        **stored,
    )
    return partial(
        ops.cpu_attention_with_kv_cache,
        query=q_THD,
        key_cache=keys,
        value_cache=values,
        output=out_THD,
        query_start_loc=starts,
        seq_lens=lengths_B,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table_BP,
        softcap=softmax.cap,
        scheduler_metadata=schedule,
        s_aux=softmax.sinks_H,
        **stored,
        **by,
    )
