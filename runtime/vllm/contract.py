"""What `internals.py` reads and overrides of vLLM beyond what it imports: whether the installed release has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from vllm import LLM
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import AttentionSpec

FIELDS: dict[Any, set[str]] = {
    VllmConfig: {
        "additional_config", "attention_config", "cache_config", "compilation_config", "kv_transfer_config",
        "model_config", "parallel_config", "scheduler_config", "speculative_config",
    },
    ModelConfig: {"model", "revision", "hf_config", "hf_text_config", "dtype", "max_model_len"},
    ParallelConfig: {
        "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
        "decode_context_parallel_size",
    },
    SchedulerConfig: {"max_num_batched_tokens", "max_num_seqs"},
    AttentionConfig: {"backend", "backend_per_kind"},
    CacheConfig: {"cache_dtype", "block_size"},
    CompilationConfig: {"static_forward_context", "cudagraph_mode", "max_cudagraph_capture_size"},
    KVTransferConfig: {"kv_connector"},
    SpeculativeConfig: {"method"},
    AttentionSpec: {"block_size", "num_kv_heads", "head_size", "dtype"},
    CommonAttentionMetadata: {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "block_table_tensor", "slot_mapping", "positions", "is_prefilling", "seq_lens_cpu_upper_bound",
        "_num_computed_tokens_cache", "_token_to_req_indices_cache",
    },
}  # fmt: skip
METHODS: dict[Any, tuple[str, ...]] = {
    ModelConfig: ("is_encoder_decoder", "use_mla"),
    ParallelConfig: ("use_ubatching",),
    CUDAGraphMode: ("has_full_cudagraphs",),
    CommonAttentionMetadata: ("replace",),
    LLM: ("apply_model",),
    EngineArgs: ("get_batch_defaults",),
    LLMEngine: ("add_request", "has_unfinished_requests", "step"),
}
_IMPL = {"alibi_slopes", "attn_type", "kv_sharing_target_layer_name", "logits_soft_cap", "scale", "sinks"}
_LAYER = {"impl", "layer_name", "num_heads", "num_kv_heads", "sliding_window"}


def set_by_init(impl: Any) -> dict[Any, set[str]]:
    """Attributes that are set when one is made."""
    return {impl: _IMPL, Attention: _LAYER, LLM: {"llm_engine"}}


def calls_of(impl: Any, builder: Any) -> dict[Any, tuple[str, ...]]:
    """What is overridden, with what it is called with."""
    return {
        impl.forward: (
            "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
            "output_block_scale",
        ),
        impl.do_kv_cache_update: ("layer", "key", "value", "kv_cache", "slot_mapping"),
        builder.__init__: ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        builder.build: ("common_prefix_len", "common_attn_metadata", "fast_build"),
    }  # fmt: skip


def unfulfilled(impl: Any, builder: Any) -> Iterator[str]:
    """What the installed release lacks or calls otherwise, by name.

    Args:
        impl, builder: vLLM's own classes of this device.
    """
    for kind, names in FIELDS.items():
        yield from (f"{kind.__name__}.{name}" for name in sorted(names - {field.name for field in fields(kind)}))
    for kind, methods in METHODS.items():
        yield from (f"{kind.__name__}.{name}" for name in methods if not hasattr(kind, name))
    for kind, attributes in set_by_init(impl).items():
        yield from (f"{kind.__name__}.{name}" for name in sorted(attributes - {*kind.__init__.__code__.co_names}))
    for call, parameters in calls_of(impl, builder).items():
        if tuple(inspect.signature(call).parameters)[1:] != parameters:
            yield f"{call.__qualname__}({', '.join(parameters)})"
