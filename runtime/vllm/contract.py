"""Says what `internals.py` and `cache_internals.py` read and override of vLLM beyond what they import: whether the
installed release has it."""

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
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

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
    SchedulerConfig: {"disable_hybrid_kv_cache_manager", "max_num_batched_tokens", "max_num_seqs"},
    AttentionConfig: {"backend", "backend_per_kind"},
    CacheConfig: {"cache_dtype", "block_size", "enable_prefix_caching"},
    CompilationConfig: {"static_forward_context", "cudagraph_mode", "max_cudagraph_capture_size"},
    KVTransferConfig: {"kv_connector"},
    SpeculativeConfig: {"method"},
    AttentionSpec: {"block_size", "num_kv_heads", "head_size", "dtype"},
    KVCacheConfig: {"kv_cache_groups"},
    KVCacheGroupSpec: {"kv_cache_spec"},
    SchedulerOutput: {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"},
    NewRequestData: {"req_id", "prompt_token_ids", "prompt_embeds", "num_computed_tokens"},
    CachedRequestData: {"resumed_req_ids"},
    InputBatch: {"req_ids"},
    CommonAttentionMetadata: {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "block_table_tensor", "slot_mapping", "positions", "is_prefilling", "seq_lens_cpu_upper_bound",
        "_num_computed_tokens_cache", "_token_to_req_indices_cache",
    },
}  # fmt: skip
METHODS: dict[Any, tuple[str, ...]] = {
    VllmConfig: ("use_v2_model_runner",),
    FullAttentionSpec: ("page_size_bytes",),
    KVCacheSpecRegistry: ("_ensure_registered", "register"),
    SingleTypeKVCacheManager: (
        "_remove_blocks_in_range",
        "cache_blocks",
        "find_longest_cache_hit",
        "remove_skipped_blocks",
    ),
    EngineCore: ("preprocess_add_request",),
    EngineCoreRequest: ("resumable",),
    RunnerV2: ("execute_model", "prepare_attn"),
    GPUModelRunner: ("execute_model",),
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
    return {
        impl: _IMPL,
        Attention: _LAYER,
        LLM: {"llm_engine"},
        EngineCore: {"scheduler"},
        Scheduler: {"kv_cache_config"},
        SingleTypeKVCacheManager: {"block_size"},
        RunnerV2: {"vllm_config", "cudagraph_manager"},
        GPUModelRunner: {"vllm_config", "cudagraph_dispatcher", "input_batch"},
        CudaGraphManager: {"_graphs_captured"},
        CudagraphDispatcher: {"keys_initialized"},
    }


def calls_of(impl: Any, builder: Any) -> dict[Any, tuple[str, ...]]:
    """Returns what is overridden, with what it is called with."""
    return {
        impl.forward: (
            "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
            "output_block_scale",
        ),
        impl.do_kv_cache_update: ("layer", "key", "value", "kv_cache", "slot_mapping"),
        builder.__init__: ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        builder.build: ("common_prefix_len", "common_attn_metadata", "fast_build"),
        Attention.get_kv_cache_spec: ("vllm_config",),
        SingleTypeKVCacheManager.remove_skipped_blocks: (
            "request_id", "processed_computed_tokens", "num_prompt_tokens",
        ),
        RunnerV2.prepare_attn: ("input_batch",),
        EngineCore.preprocess_add_request: ("request",),
    }  # fmt: skip


def unfulfilled(impl: Any, builder: Any) -> Iterator[str]:
    """Returns what the installed release lacks or calls otherwise, by name.

    Args:
        impl, builder: vLLM's own classes of this device.
    """
    for kind, names in FIELDS.items():
        yield from (f"{kind.__name__}.{name}" for name in sorted(names - {field.name for field in fields(kind)}))
    for kind, methods in METHODS.items():
        yield from (f"{kind.__name__}.{name}" for name in methods if not hasattr(kind, name))
    for kind, attributes in set_by_init(impl).items():
        yield from (
            f"{kind.__name__}.{name}"
            for name in sorted(attributes - {*inspect.unwrap(kind.__init__).__code__.co_names})
        )
    for call, parameters in calls_of(impl, builder).items():
        if tuple(inspect.signature(call).parameters)[1:] != parameters:
            yield f"{call.__qualname__}({', '.join(parameters)})"
