"""Every name of vLLM that `runtime/vllm/internals.py` uses is there, and takes what we give it."""

import ast
import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
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
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import AttentionSpec

import sparsekv.runtime.vllm.internals as internals
from sparsekv.runtime.vllm.engine_facts import TESTED

DEVICE = "cuda" if internals.platform is internals.OnCuda else "cpu"
OTHERS = "flash_attn" if DEVICE == "cpu" else "cpu_attn"  # the backend of the other device, which need not import here
Backend, Impl, Builder = internals.platform.classes()
IMPORTS = [
    (node.module, alias.name)
    for node in ast.walk(ast.parse(Path(inspect.getfile(internals)).read_text()))
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
    for alias in node.names
    if not node.module.endswith(OTHERS)
]
FIELDS = {
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
        *(("req_idx",) if DEVICE == "cpu" else ("_seq_lens_cpu", "_num_computed_tokens_cpu")),
    },
}  # fmt: skip
CALLS = {
    Impl.forward: (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    Impl.do_kv_cache_update: ("layer", "key", "value", "kv_cache", "slot_mapping"),
    Builder.__init__: ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    Builder.build: ("common_prefix_len", "common_attn_metadata", "fast_build"),
}  # fmt: skip


METHODS = {
    ModelConfig: ("is_encoder_decoder", "use_mla"),
    ParallelConfig: ("use_ubatching",),
    CUDAGraphMode: ("has_full_cudagraphs",),
    CommonAttentionMetadata: ("replace",),
    LLM: ("apply_model",),
    EngineArgs: ("get_batch_defaults",),
    LLMEngine: ("add_request", "has_unfinished_requests", "step"),
}
SET_BY_INIT = {
    Impl: {
        "alibi_slopes", "attn_type", "kv_sharing_target_layer_name", "logits_soft_cap", "scale", "sinks",
    },
    Attention: {"impl", "layer_name", "num_heads", "num_kv_heads", "sliding_window"},
    LLM: {"llm_engine"},
}  # fmt: skip


def test_the_installed_release_is_one_of_the_tested() -> None:
    assert internals.release.partition("+")[0] in TESTED[DEVICE]


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_is_imported_is_there(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_configurations_and_metadata_have_the_fields_that_are_read(kind: type) -> None:
    assert FIELDS[kind] <= {field.name for field in fields(kind)}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_methods_and_properties_are_there(kind: type) -> None:
    assert [name for name in METHODS[kind] if not hasattr(kind, name)] == []


@pytest.mark.parametrize("kind", SET_BY_INIT, ids=lambda kind: kind.__name__)
def test_attributes_are_set_when_one_is_made(kind: type) -> None:
    assert SET_BY_INIT[kind] <= set(kind.__init__.__code__.co_names)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_what_is_overridden_is_called_as_we_expect(call: object) -> None:
    assert tuple(inspect.signature(call).parameters)[1:] == CALLS[call]


def test_the_backend_attends_after_the_cache_was_written() -> None:
    assert Backend.forward_includes_kv_cache_update is False


def test_graphs_of_steps_that_only_decode_are_less_than_graphs_of_everything() -> None:
    assert internals.without_prefill(AttentionCGSupport.ALWAYS) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert internals.without_prefill(AttentionCGSupport.NEVER) is AttentionCGSupport.NEVER
