"""Everything that is taken from inside vLLM, which promises none of it to stay: no other file imports it, but for
devices.py (caches and kernels by device), cache_internals.py (eviction), and of exact output self_speculator.py and
draft_scheduler.py. tools/vllm_contract.py names all of it, and tests look for it in each release that is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, partial, wraps
from inspect import Parameter, isfunction, signature
from types import SimpleNamespace
from typing import Any

import torch
from vllm import __version__ as release
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    model_parallel_is_initialized,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sparsekv.kernels.prefill.flash.limits import FlashPackage, offer_package
from sparsekv.plans.errors import BackendError, SparseKVError, UnsupportedError, UsageError
from sparsekv.runtime.architecture import MODALITIES
from sparsekv.runtime.core.program import Rank
from sparsekv.runtime.engine_plan import EngineModel
from sparsekv.runtime.model_config import quantisation_of
from sparsekv.runtime.vllm.devices import OnCpu, OnCuda, platform
from sparsekv.runtime.vllm.engine_host import KNOWN, READ, EngineHost
from sparsekv.runtime.vllm.exact_engine import WORKER, ask_for_drafts
from sparsekv.runtime.vllm.settings import EngineFacts, connectors_of, plan_path, read_options

__all__ = ["AttentionType", "get_current_vllm_config", "platform", "release", "set_current_vllm_config"]

logger = init_logger("vllm.sparsekv")  # below "vllm", whose handler prints it
# The flash-attn-4 that releases of vLLM bring along, and those whose copy was run over block lists.
_FLASH = FlashPackage("vllm.vllm_flash_attn.cute", "vllm", ("0.26.0", "0.33.0"), asks_lists=False)

_OURS = f"{__package__}.attention_backend"
_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_PREFERS_OTHERS = 10  # major compute capability of which vLLM prefers another backend where none is asked for


def engine_facts(config: VllmConfig, *derived: type) -> EngineFacts:
    """Returns the facts that decide whether an engine can run a plan; `derived` are classes of ours, from vLLM's."""
    parallel, model = config.parallel_config, config.model_config
    known = {field.name for field in fields(CommonAttentionMetadata)}
    ours = parallel.worker_cls == WORKER
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    stages, layers = parallel.pipeline_parallel_size, model.hf_text_config.num_hidden_layers
    return EngineFacts(
        release=release.partition("+")[0],
        device=current_platform.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=_cache_dtype(config.cache_config),
        tensor_parallel=parallel.tensor_parallel_size,
        context_parallel=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
        stages=tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages)) if stages > 1 else (),
        speculative=None if speculative is None or ours else str(speculative.method),
        drafted=0 if speculative is None else speculative.num_speculative_tokens,
        model=model.model,
        connectors=() if transfer is None else connectors_of(vars(transfer)),
        modalities=_modalities(model),
        micro_batches=parallel.use_ubatching,
        one_group=bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
        fast_prefill=bool(getattr(config.cache_config, "kv_sharing_fast_prefill", False)),
        missing=(*sorted({*READ} - known), *(call for kind in derived for call in changed_calls(kind))),
        unknown=tuple(sorted(known - KNOWN)),
        self_drafting=ours,
        beside=beside_drafts(config) if ours else (),
    )


def _cache_dtype(cache: Any) -> str:
    on_the_way = " by --calculate-kv-scales" if getattr(cache, "calculate_kv_scales", False) else ""  # before 0.30
    return f"{cache.cache_dtype}{on_the_way}"


def _modalities(model: Any) -> tuple[str, ...]:
    limits = model.multimodal_config
    if limits is None:
        return ()
    known = MODALITIES.get(model.hf_config.model_type, ())
    return tuple(kind for kind in known if limits.enable_mm_embeds or limits.get_limit_per_prompt(kind) > 0)


def changed_calls(ours: type) -> Iterator[str]:
    """The methods that a release calls with other parameters than a class of ours takes."""
    for name, method in vars(ours).items():
        given = getattr(ours.__mro__[1], name, None)
        if not (isfunction(method) and isfunction(given)):
            continue
        ours_taken, its = signature(method).parameters, signature(given).parameters
        if list(ours_taken) != list(its) and not any(parameter.kind in _ANY for parameter in ours_taken.values()):
            yield f"{given.__qualname__}({', '.join(list(ours_taken)[1:])})"


def engine_model(config: VllmConfig) -> EngineModel:
    """The model of an engine; of a multimodal one the decoder."""
    model = config.model_config
    is_multimodal = model.hf_config.model_type in MODALITIES
    return EngineModel(
        name=model.model,
        revision=model.revision,
        config=model.hf_text_config if is_multimodal else model.hf_config,
        dtype=model.dtype,
        device=torch.empty(0, device=current_platform.device_type).device,  # with its number
        longest=model.max_model_len,
        step=config.scheduler_config.max_num_batched_tokens,
        rows=config.scheduler_config.max_num_seqs,
        rank=Rank(get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size),
        graphs=config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE,
        float8=_cache_dtype(config.cache_config).startswith("fp8"),
        quantization=model.quantization and str(model.quantization),
        packed=quantisation_of(model.hf_config) is not None,
    )


def gather(x: torch.Tensor) -> torch.Tensor:
    """[ranks, ...]: what each tensor-parallel rank gives; also in a captured graph."""
    gathered: torch.Tensor = tensor_model_parallel_all_gather(x[None].contiguous(), dim=0)
    return gathered


def gather_bytes(given: bytes) -> list[bytes]:
    device = torch.empty(0, device=current_platform.device_type).device
    numbers = torch.tensor(list(given), dtype=torch.float32, device=device)  # not every backend gathers integers
    return [bytes(map(int, row)) for row in gather(numbers).tolist()]


def runs_ours(config: VllmConfig) -> bool:
    attention = config.attention_config
    if platform is None or platform is OnCpu or config.model_config.use_mla:
        return platform is OnCpu and not config.model_config.use_mla
    named = {attention.backend, *attention.backend_per_kind.values()} - {None}
    if named:
        return any(_is_ours(place) for place in named.intersection((platform.backend, platform.planned)))
    capability = current_platform.get_device_capability()
    return _is_ours(platform.planned) and (capability is None or capability.major != _PREFERS_OTHERS)


def say_dense(config: VllmConfig, error: Exception) -> None:
    """Warns that an engine does not run its plan. Raises the error where a plan is required, our backend was named, or
    it is of one rank's device: the other ranks would wait."""
    if not isinstance(error, SparseKVError):
        error = UnsupportedError(f"the engine could not be read ({type(error).__name__}: {error})")
    attention, options = config.attention_config, read_options(config.additional_config)
    ours = platform is OnCuda and platform.backend in (attention.backend, *attention.backend_per_kind.values())
    is_ranks_own = isinstance(error, BackendError) and config.parallel_config.tensor_parallel_size > 1
    if is_ranks_own or options.requires(options.plan is not None or ours):
        raise error
    logger.warning(
        "sparsekv: the plan beside the model is not run, all attention is dense: %s (to end such an engine instead: "
        '--additional-config \'{"sparsekv": {"require": true}}\')',
        error,
    )


def say_unused(config: VllmConfig) -> None:
    """Warns that an engine with a plan has attention that is not ours; see `say_dense`."""
    model, backend = config.model_config, config.attention_config.backend
    if runs_ours(config):
        return
    try:
        path = plan_path(read_options(config.additional_config), model.model, model.revision)
        if path is not None:
            by = "its own choice, which is another here" if backend is None else backend.name
            raise UsageError(
                f"expected a backend that executes the plan at {path}, found attention by {by}; add "
                '--attention-backend FLASH_ATTN, or --additional-config \'{"sparsekv": {"dense": true}}\' to leave it'
            )
    except SparseKVError as error:
        say_dense(config, error)


def engine_key(config: VllmConfig) -> Any:
    """The object that an engine's configuration shares with the copies that vLLM makes of it."""
    return config.compilation_config


def current_config() -> VllmConfig | None:
    """Returns the configuration of the engine that is being made; None outside of a worker that has its ranks."""
    return get_current_vllm_config_or_none() if model_parallel_is_initialized() else None


def layers_so_far(config: VllmConfig) -> dict[str, Any]:
    """The attention layers of an engine that were made already, by name."""
    return config.compilation_config.static_forward_context


def layer_number(name: str) -> int:
    """The number in the name of an attention layer, such as "model.layers.3.self_attn.attn"."""
    return extract_layer_index(name)


def empty_cache(pages: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A layer's cache outside of an engine, with pages as vLLM has them where nothing else is asked for."""
    spec = SimpleNamespace(num_kv_heads=kv_heads, block_size=platform.page, head_size=size, dtype=dtype)
    with set_current_vllm_config(_defaults()):  # backends ask it for the layout
        empty: torch.Tensor = platform.empty_cache(pages, spec, device)
    return empty


@cache
def _defaults() -> VllmConfig:
    """A configuration without an engine; made once, as making it logs."""
    return VllmConfig()


def without_prefill(config: VllmConfig, support: AttentionCGSupport) -> AttentionCGSupport:
    """The most that is captured in whole graphs: steps that decode or verify drafts. Sparse prefill is launched
    anew."""
    drafts = config.speculative_config is not None
    most = AttentionCGSupport.UNIFORM_BATCH if drafts else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return min(support, most, key=lambda level: level.value)


def graph_rows(config: VllmConfig) -> int:
    """The most requests of a step that decodes in one captured graph; 0 where none is captured."""
    compilation = config.compilation_config
    if not platform.captures or not compilation.cudagraph_mode.has_full_cudagraphs():
        return 0
    return compilation.max_cudagraph_capture_size or 0


_DENSE = "sparsekv_dense"  # on a manager of captured steps: those without our kernels


def hold_dense_graphs(config: VllmConfig, host_of: Callable[[VllmConfig], EngineHost | None]) -> bool:
    """Has vLLM capture decode steps a second time, without our kernels, and replay those where nothing chooses.
    Returns whether this engine does: by its second runner, without data-parallel ranks, which wait for each other in
    each capture but have rules of their own."""
    alone = config.parallel_config.data_parallel_size == 1
    if not (config.use_v2_model_runner and alone and graph_rows(config)):
        return False
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager  # which a CPU build may lack

    replace_method(ModelCudaGraphManager, "capture", partial(_capturing_both, host_of))
    replace_method(ModelCudaGraphManager, "run_fullgraph", partial(_replaying_either, host_of))
    return True


def _capturing_both(
    host_of: Callable[[VllmConfig], EngineHost | None], given: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    host = host_of(self.vllm_config)
    if host is None or not host.holds_dense:
        return given(self, *args, **kwargs)
    host.dense_graphs = False
    setattr(self, _DENSE, {})
    given(self, *args, **kwargs)
    samples: list[int] | None = getattr(self, "_capture_mem_samples", None)
    if samples is not None:  # since 0.30 vLLM takes the bytes of a few for all, of which there are twice as many
        samples[1:] = [2 * taken if host.pays.decode.rows else taken for taken in samples[1:]]
        return None
    full = self._capture_descs.get(CUDAGraphMode.FULL, ())
    chosen = [step for step in full if host.pays.decode.at(step.num_reqs) is not None]
    before = host.decode, self.graphs, self._capture_descs
    host.decode, self.graphs, self._capture_descs = None, {}, {CUDAGraphMode.FULL: chosen}
    try:
        given(self, *args, **kwargs)
        setattr(self, _DENSE, self.graphs)
    finally:
        host.decode, self.graphs, self._capture_descs = before
    host.dense_graphs = True
    return None


def _replaying_either(host_of: Callable[[VllmConfig], EngineHost | None], given: Any, self: Any, step: Any) -> Any:
    dense = getattr(self, _DENSE, None)
    host = host_of(self.vllm_config) if dense and step in dense else None
    if host is None or not (host.dense_graphs and host.decodes_dense):
        return given(self, step)
    graphs, self.graphs = self.graphs, dense
    try:
        return given(self, step)
    finally:
        self.graphs = graphs


def register() -> None:
    """Makes our backend known to vLLM, which imports it for the first attention layer, and vLLM's flash-attn-4 to our
    kernels. Names that another plugin has taken stay its own."""
    replace_method(EngineArgs, "create_engine_config", _asking_for_drafts)
    if platform is None:
        return
    if platform.backend is not platform.planned:  # else one name, as on a CPU
        _register(platform.backend, f"{_OURS}.SparseBackend")
    _register(platform.planned, f"{_OURS}.PlannedBackend")
    offer_package(_FLASH)


def _register(place: AttentionBackendEnum, ours: str) -> None:
    if place.is_overridden() and place.get_path() != ours:
        logger.info("sparsekv: another plugin stands for %s, by which no plan is run", place.name)
    else:
        register_backend(place, ours)


def _is_ours(place: AttentionBackendEnum) -> bool:
    return place.is_overridden() and place.get_path().startswith(_OURS)


_REPLACED = "sparsekv_given"  # what a method that was replaced by ours was, on ours


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """A class of vLLM runs `replacement(method, self, ...)` in place of a method: once in a process, whatever engines
    it has."""
    given = getattr(owner, name)
    if not hasattr(given, _REPLACED):

        @wraps(given)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return replacement(given, *args, **kwargs)

        setattr(ours, _REPLACED, given)
        setattr(owner, name, ours)


def _asking_for_drafts(given: Any, self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
    """Nothing of vLLM lets a plugin choose a drafter."""
    ask_for_drafts(self)
    config: VllmConfig = given(self, *args, **kwargs)
    say_unused(config)
    return config


def worker_class() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def beside_drafts(config: VllmConfig) -> tuple[str, ...]:
    parallel, model = config.parallel_config, config.model_config
    there = {
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-lora": config.lora_config is not None,
        "positions of several axes (M-RoPE)": model.uses_mrope,
        # Drafts begin with tokens, and a compiled model takes only one of the two.
        "prompts as embeddings": model.enable_prompt_embeds or model.supports_multimodal_inputs,
        # The target stands for its own draft model, whose configuration vLLM reads from its files alone.
        "--hf-overrides": isinstance(model.hf_overrides, dict) and bool(model.hf_overrides),
        "--max-model-len beyond what the model's files say": model.max_model_len < (model.original_max_model_len or 0),
    }
    return tuple(name for name, is_there in there.items() if is_there)
