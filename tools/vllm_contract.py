"""Says what the files of runtime/vllm/ that import vLLM, `engine_host.py` and the backend use of it, and whether a
release has it.

A release is read as source text, its own classes followed through their bases and re-exports: nothing of it is
imported, so that CUDA code is checked on any machine, and an unpacked wheel as well as what is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from sparsekv.runtime.vllm.engine_host import KNOWN

Places = Mapping[str, tuple[str, ...]]
"""Names that are used of each place, "module:Class" or "module"; parameters of each call."""

METADATA = "vllm.v1.attention.backend:CommonAttentionMetadata"
NAMES: Places = MappingProxyType(
    {
        "vllm.config:VllmConfig": (
            "additional_config", "attention_config", "cache_config", "compilation_config", "kv_transfer_config",
            "model_config", "parallel_config", "scheduler_config", "speculative_config", "use_v2_model_runner",
        ),
        "vllm.config:ModelConfig": (
            "model", "revision", "hf_config", "hf_text_config", "dtype", "max_model_len",
            "use_mla", "multimodal_config", "quantization",
        ),
        "vllm.config.multimodal:MultiModalConfig": ("enable_mm_embeds", "get_limit_per_prompt"),
        "vllm.config:ParallelConfig": (
            "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
            "decode_context_parallel_size", "use_ubatching",
        ),
        "vllm.config:SchedulerConfig": ("disable_hybrid_kv_cache_manager", "max_num_batched_tokens", "max_num_seqs"),
        "vllm.config:AttentionConfig": ("backend", "backend_per_kind", "flash_attn_max_num_splits_for_cuda_graph"),
        "vllm.config:CacheConfig": ("cache_dtype", "block_size", "enable_prefix_caching"),
        "vllm.config:CompilationConfig": ("static_forward_context", "cudagraph_mode", "max_cudagraph_capture_size"),
        "vllm.config:CUDAGraphMode": ("has_full_cudagraphs",),
        "vllm.config:KVTransferConfig": (
            "kv_connector", "kv_connector_extra_config", "kv_connector_module_path",
        ),
        "vllm.config:SpeculativeConfig": ("method", "num_speculative_tokens"),
        "vllm": ("LLM", "SamplingParams", "__version__"),
        "vllm.config": ("get_current_vllm_config", "get_current_vllm_config_or_none", "set_current_vllm_config"),
        "vllm.distributed": (
            "get_tensor_model_parallel_rank", "model_parallel_is_initialized", "tensor_model_parallel_all_gather",
        ),
        "vllm.distributed.utils": ("get_pp_indices",),
        "vllm.logger": ("init_logger",),
        "vllm.model_executor.models.utils": ("extract_layer_index",),
        "vllm.platforms": ("current_platform",),
        "vllm.platforms.interface:DeviceCapability": ("major",),
        "vllm.platforms.interface:Platform": ("device_type", "get_device_capability", "is_cpu", "is_cuda"),
        "vllm.envs": ("VLLM_BATCH_INVARIANT",),
        "vllm.entrypoints.llm:LLM": ("apply_model", "generate", "llm_engine"),
        "vllm.sampling_params:SamplingParams": ("temperature", "max_tokens", "ignore_eos", "detokenize"),
        "vllm.v1.attention.backend:AttentionType": ("DECODER",),
        "vllm.v1.attention.backend:AttentionCGSupport": ("UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"),
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": (
            "CPU_ATTN", "CUSTOM", "FLASH_ATTN", "get_path", "is_overridden",
        ),
        "vllm.v1.attention.backends.registry": ("register_backend",),
        METADATA: (
            "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
            "block_table_tensor", "slot_mapping", "positions", "is_prefilling", "seq_lens_cpu_upper_bound", "causal",
            "replace", "_num_computed_tokens_cache", "_token_to_req_indices_cache",
        ),
        "vllm.v1.kv_cache_interface:AttentionSpec": ("block_size", "num_kv_heads", "head_size", "dtype"),
        "vllm.v1.kv_cache_interface:FullAttentionSpec": ("page_size_bytes",),
        "vllm.v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups",),
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": ("_ensure_registered", "register"),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids",
        ),
        "vllm.v1.core.sched.output:NewRequestData": (
            "req_id", "prompt_token_ids", "prompt_embeds", "num_computed_tokens",
        ),
        "vllm.v1.core.sched.output:CachedRequestData": ("resumed_req_ids",),
        "vllm.v1.core.sched.scheduler:Scheduler": ("kv_cache_config",),
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
            "_remove_blocks_in_range", "block_size", "cache_blocks", "find_longest_cache_hit", "remove_skipped_blocks",
        ),
        "vllm.v1.engine.core:EngineCore": ("preprocess_add_request", "scheduler"),
        "vllm.v1.engine:EngineCoreRequest": ("resumable",),
        "vllm.v1.engine.llm_engine:LLMEngine": ("add_request", "has_unfinished_requests", "step"),
        "vllm.v1.worker.gpu.input_batch:InputBatch": ("req_ids",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
            "cudagraph_manager", "execute_model", "prepare_attn", "vllm_config",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": (
            "_capture_descs", "_graphs_captured", "graphs", "vllm_config",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": ("capture", "run_fullgraph"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "cudagraph_dispatcher", "execute_model", "input_batch", "vllm_config",
        ),
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": ("keys_initialized",),
        "vllm.model_executor.layers.attention:Attention": (
            "get_kv_cache_spec", "impl", "layer_name", "num_heads", "num_kv_heads", "query_quant", "sliding_window",
        ),
        "vllm.model_executor.layers.attention.attention": ("set_default_quant_scales",),  # whose scales are read
    }
)  # fmt: skip
_BACKEND = ("forward_includes_kv_cache_update", "get_builder_cls", "get_impl_cls", "get_name")
_IMPL = (
    "alibi_slopes", "attn_type", "do_kv_cache_update", "forward", "kv_cache_dtype", "kv_sharing_target_layer_name",
    "logits_soft_cap", "scale", "sinks",
)  # fmt: skip
_BUILDER = (
    "build", "build_for_drafting", "get_cudagraph_support", "reorder_batch_threshold", "supports_update_block_table",
)  # fmt: skip
_BY_TORCH = "vllm.v1.attention.backends.cpu_attn:CPUAttention"
_BY_FLASH = "vllm.v1.attention.backends.flash_attn:FlashAttention"
CLASSES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "cpu": (f"{_BY_TORCH}Backend", f"{_BY_TORCH}BackendImpl", f"{_BY_TORCH}MetadataBuilder"),
        "cuda": (f"{_BY_FLASH}Backend", f"{_BY_FLASH}Impl", f"{_BY_FLASH}MetadataBuilder"),
    }
)
"""vLLM's own backend, implementation and metadata builder, by device."""
OF_DEVICE: Mapping[str, Places] = MappingProxyType(
    {
        "cpu": {},
        "cuda": {
            "vllm.v1.attention.backends.flash_attn": (
                "flash_attn_varlen_func",
                "get_flash_attn_version",
                "get_scheduler_metadata",
            )
        },
    }
)
EITHER: Mapping[str, tuple[Places, ...]] = MappingProxyType(
    {
        "cpu": (),
        "cuda": (
            {CLASSES["cuda"][0]: ("get_kv_cache_shape", "get_kv_cache_stride_order")},
            {
                "vllm.config:CacheConfig": ("get_resolved_kv_cache_layout", "kv_cache_layout"),
                "vllm.v1.attention.backends.utils": ("get_supported_kv_cache_layouts",),
                "vllm.v1.kv_cache_layout:KVCacheLayout": ("layer_view_order",),
            },
        ),
    }
)
"""Releases differ in these (`devices.empty_pages`): each has one of them."""
CALLS: Places = MappingProxyType(
    {
        "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec": ("vllm_config",),
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks": (
            "request_id", "processed_computed_tokens", "num_prompt_tokens",
        ),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn": ("input_batch",),
        "vllm.v1.engine.core:EngineCore.preprocess_add_request": ("request",),
    }
)  # fmt: skip
_GRAPHS = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager"
DRAFTS: Places = MappingProxyType(
    {
        "vllm.config:VllmConfig": (
            "additional_config", "lora_config", "model_config", "parallel_config", "scheduler_config",
            "use_v2_model_runner",
        ),
        "vllm.config:ModelConfig": (
            "enable_prompt_embeds", "hf_overrides", "max_model_len", "model", "original_max_model_len", "revision",
            "supports_multimodal_inputs", "uses_mrope",
        ),
        "vllm.config:ParallelConfig": ("data_parallel_size", "enable_eplb", "worker_cls"),
        "vllm.config:SchedulerConfig": ("async_scheduling", "scheduler_cls"),
        "vllm.config:SpeculativeConfig": ("method", "model", "num_speculative_tokens", "revision",
            "num_speculative_tokens_per_batch_size", "uses_draft_model", "uses_dynamic_speculative_decoding",
        ),
        "vllm.config:CompilationConfig": ("cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        "vllm.config.compilation:CUDAGraphMode": ("FULL", "FULL_DECODE_ONLY", "NONE", "decode_mode"),
        "vllm.engine.arg_utils:EngineArgs": (
            "additional_config", "compilation_config", "create_engine_config", "cudagraph_capture_sizes",
            "max_num_seqs", "model", "revision", "scheduler_cls", "speculative_config", "worker_cls",
        ),
        "vllm.forward_context": ("BatchDescriptor", "set_forward_context"),
        "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration": ("compute_logits",),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("_update_after_schedule",),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens", "num_spec_tokens_to_schedule", "scheduled_spec_decode_tokens",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "make_spec_decoding_stats", "num_spec_tokens", "requests", "update_from_output", "vllm_config",
        ),
        "vllm.v1.request:Request": ("num_computed_tokens",),
        "vllm.v1.worker.gpu.attn_utils": ("build_slot_mappings_by_layer", "init_attn_backend"),
        "vllm.v1.worker.gpu.block_table:BlockTables": ("compute_slot_mappings",),
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor": ("cg_mode", "num_reqs", "num_tokens"),
        "vllm.v1.worker.gpu.input_batch:InputBatch": (
            "idx_mapping", "num_reqs", "prefill_len_np", "seq_lens", "seq_lens_cpu_upper_bound",
        ),
        "vllm.v1.worker.gpu.input_batch:InputBuffers": ("input_ids", "positions", "query_start_loc", "seq_lens"),
        "vllm.v1.worker.gpu.kv_connector:KVConnector": ("set_disabled",),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("kv_connector", "speculator"),
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": (
            "_build_uniform_attn_metadata", "capture", "draft_max_seq_len", "draft_tokens", "idx_mapping",
            "init_cudagraph_manager", "input_buffers", "max_model_len", "max_num_reqs", "num_speculative_steps",
        ),
        _GRAPHS: ("capture", "dispatch", "run_fullgraph"),
        "vllm.v1.worker.utils:AttentionGroup": ("metadata_builders",),
    }
)  # fmt: skip
"""Names that exact output uses beside these (docs/exact.md)."""
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
DRAFT_CALLS: Places = MappingProxyType(
    {
        f"{_SPECULATOR}.load_draft_model": ("target_model", "target_attn_layer_names"),
        f"{_SPECULATOR}.set_attn": (
            "model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups",
        ),
        f"{_SPECULATOR}.init_cudagraph_manager": ("cudagraph_mode",),
        f"{_SPECULATOR}.capture": (),
        f"{_SPECULATOR}.propose": (
            "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
            "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds", "dp_sync_state",
            "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens",
        ),
        "vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings": (
            "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out",
        ),
        f"{_SPECULATOR}._build_uniform_attn_metadata": (
            "batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step", "causal",
            "dcp_local_seq_lens",
        ),
        f"{_GRAPHS}.__init__": (
            "vllm_config", "device", "cudagraph_mode", "decode_query_len", "lora_capture_cases", "varlen_decode",
            "ubatch_runner",
        ),
        f"{_GRAPHS}.capture": (
            "forward_fn", "model_state", "input_buffers", "block_tables", "attn_groups", "kv_cache_config",
            "progress_bar_desc", "specialize_spec_tokens",
        ),
        f"{_GRAPHS}.dispatch": (
            "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len", "num_ubatches",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats": (
            "spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens", "num_invalid_spec_tokens", "request_id",
        ),
        "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": ("scheduler_output",),
    }
)  # fmt: skip
WORKERS: Mapping[str, Places] = MappingProxyType(
    {
        "cpu": {"vllm.v1.worker.cpu_worker:CPUWorker": ("device", "init_device", "model_runner", "vllm_config")},
        "cuda": {"vllm.v1.worker.gpu_worker:Worker": ("device", "init_device", "model_runner", "vllm_config")},
    }
)
_IMPL_CALLS = {
    "forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
}  # fmt: skip
_BUILDER_CALLS = {
    "__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    "build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    "build_for_drafting": ("common_attn_metadata", "draft_index"),
}


class Release(Protocol):
    def names(self, place: str) -> frozenset[str] | None:
        """Returns the names of a class, those that are set on its instances included, or of a module; None where there
        is none."""

    def parameters(self, call: str) -> tuple[str, ...] | None:
        """The parameters of a method, without its instance; None where there is none."""


def names_on(device: str) -> dict[str, tuple[str, ...]]:
    """Returns all names that are used on a device but for those that releases differ in."""
    backend, impl, builder = CLASSES[device]
    return {**NAMES, **OF_DEVICE[device], backend: _BACKEND, impl: _IMPL, builder: _BUILDER}


def calls_on(device: str) -> dict[str, tuple[str, ...]]:
    """The parameters of every call that is overridden on a device, or made with arguments by position."""
    _, impl, builder = CLASSES[device]
    own = {f"{impl}.{name}": parameters for name, parameters in _IMPL_CALLS.items()}
    return {**CALLS, **own, **{f"{builder}.{name}": parameters for name, parameters in _BUILDER_CALLS.items()}}


def unfulfilled(release: Release, device: str) -> Iterator[str]:
    """Names everything that a release lacks or calls otherwise."""
    yield from _lacking(release, names_on(device))
    either = [list(_lacking(release, places)) for places in EITHER[device]]
    if either and all(either):
        yield " or ".join(", ".join(names) for names in either)
    for call, parameters in calls_on(device).items():
        if release.parameters(call) != parameters:
            yield f"{_short(call)}({', '.join(parameters)})"


def undrafted(release: Release, device: str) -> Iterator[str]:
    """Returns what a release lacks, or calls otherwise, of what exact output uses."""
    yield from _lacking(release, {**DRAFTS, **WORKERS[device]})
    for call, parameters in DRAFT_CALLS.items():
        if release.parameters(call) != parameters:
            yield f"{_short(call)}({', '.join(parameters)})"


def unknown_metadata(release: Release) -> tuple[str, ...]:
    """Returns the fields of a step's metadata that this version does not know."""
    fields = release.names(f"{METADATA}!") or frozenset()
    return tuple(sorted(fields - KNOWN))


def _lacking(release: Release, places: Places) -> Iterator[str]:
    for place, names in places.items():
        found = release.names(place) or frozenset()
        yield from (f"{_short(place)}.{name}" for name in names if name not in found)


def _short(place: str) -> str:
    module, _, name = place.partition(":")
    return name or module


# --- from source text -------------------------------------------------------------------------------------------------

Read = Callable[[str], str | None]


def installed() -> Sources:
    """Returns the release that is installed, of which nothing is imported."""
    spec = find_spec("vllm")
    assert spec is not None, "vLLM is running this"
    assert spec.submodule_search_locations, "it is a package"
    return Sources.of_folder(Path(spec.submodule_search_locations[0]).parent)


@dataclass(frozen=True)
class Sources:
    """A release as source text.

    Attributes:
        read: the text of a module; None where there is none.
    """

    read: Read
    _trees: dict[str, ast.Module | None] = field(default_factory=dict, compare=False, repr=False)
    _asked: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)  # modules import in circles

    @classmethod
    def of_folder(cls, folder: Path) -> Sources:
        def read(module: str) -> str | None:
            base = folder.joinpath(*module.split("."))
            files = (base / "__init__.py", base.with_suffix(".py"))
            return next((file.read_text("utf-8") for file in files if file.is_file()), None)

        return cls(read)

    def names(self, place: str) -> frozenset[str] | None:
        """See `Release`. Of a class that is marked by "!", its fields alone."""
        module, _, name = place.removesuffix("!").partition(":")
        if not name:
            return self._of_module(module)
        found = self._class(module, name)
        return None if found is None else found.fields if place.endswith("!") else found.names

    def parameters(self, call: str) -> tuple[str, ...] | None:
        module, _, rest = call.partition(":")
        kind, _, name = rest.partition(".")
        found = self._class(module, kind)
        method = None if found is None else found.methods.get(name)
        return None if method is None else tuple(one.arg for one in (*method.args.posonlyargs, *method.args.args))[1:]

    def _of_module(self, module: str) -> frozenset[str] | None:
        tree = self._tree(module)
        if tree is None or (module, "*") in self._asked:
            return None
        self._asked.add((module, "*"))
        found = frozenset(_bound(tree.body))
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found |= self._of_module(self._absolute(node, module)) or frozenset()
        self._asked.discard((module, "*"))
        return found

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            text = self.read(module)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _class(self, module: str, name: str) -> _Class | None:
        """A class, where it is defined or from where a module has it."""
        if (module, name) in self._asked:
            return None
        self._asked.add((module, name))
        try:
            return self._found_class(module, name)
        finally:
            self._asked.discard((module, name))

    def _found_class(self, module: str, name: str) -> _Class | None:
        tree = self._tree(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [_name_of(base) for base in node.bases]
                return _Class(node, tuple(one for base in bases if base and (one := self._class(module, base))))
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._class(self._absolute(node, module), alias.name)
        return None

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.read(f"{module}.__init__") is not None
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join((*base, *(node.module or "").split(".")))


@dataclass(frozen=True)
class _Class:
    node: ast.ClassDef
    bases: tuple[_Class, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """Those of the class and of its instances, wherever they are set."""
        set_here = (node.attr for node in ast.walk(self.node) if isinstance(node, ast.Attribute) and _is_set(node))
        return frozenset((*_bound(self.node.body), *set_here)).union(*(base.names for base in self.bases))

    @cached_property
    def fields(self) -> frozenset[str]:
        """Annotated ones: of a dataclass."""
        own = (_name_of(node.target) for node in self.node.body if isinstance(node, ast.AnnAssign))
        return frozenset(own).union(*(base.fields for base in self.bases))

    @cached_property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """By name, those of its bases included."""
        found = {name: method for base in reversed(self.bases) for name, method in base.methods.items()}
        return found | {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}


def _is_set(node: ast.Attribute) -> bool:
    """Returns whether it is an attribute of an instance that is written to."""
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or a class, those under conditions and in `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in _statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name for target in targets if (name := _name_of(target)))


def _name_of(node: ast.expr) -> str:
    """The name that an expression is; that of what is subscripted; empty where it is none."""
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
