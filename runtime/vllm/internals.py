"""Everything that is taken from inside vLLM, which promises none of it to stay: no other file imports it.

`tests/vllm/test_contract.py` checks each name against the installed release.

Shapes: N pages, G KV heads, S tokens of a page, D head size, T tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as release
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm.engine_facts import EngineFacts
from sparsekv.runtime.vllm.plan_host import EngineModel

__all__ = [
    "AttentionType",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadataBuilder",
    "get_current_vllm_config",
]

logger = init_logger("vllm.sparsekv")  # below "vllm", whose handler prints it


def engine_facts(config: VllmConfig) -> EngineFacts:
    """What of an engine decides whether it can run a plan."""
    parallel, model = config.parallel_config, config.model_config
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    stages, layers = parallel.pipeline_parallel_size, model.hf_text_config.num_hidden_layers
    return EngineFacts(
        release=release.partition("+")[0],
        device=current_platform.device_type,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=config.cache_config.cache_dtype,
        tensor_parallel=parallel.tensor_parallel_size,
        context_parallel=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
        stages=tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages)) if stages > 1 else (),
        speculative=None if speculative is None else str(speculative.method),
        kv_connector=None if transfer is None else transfer.kv_connector,
        encoder_decoder=model.is_encoder_decoder,
        latent=model.use_mla,
    )


def engine_model(config: VllmConfig) -> EngineModel:
    """The model of an engine."""
    model = config.model_config
    return EngineModel(
        name=model.model,
        revision=model.revision,
        config=model.hf_config,
        dtype=model.dtype,
        device=torch.device(current_platform.device_type),
        longest=model.max_model_len,
        page=config.cache_config.block_size,
    )


def layers_so_far(config: VllmConfig) -> dict[str, Any]:
    """The attention layers of an engine that were made already, by name."""
    return config.compilation_config.static_forward_context


def layer_number(name: str) -> int:
    """The number in the name of an attention layer, such as "model.layers.3.self_attn.attn"."""
    return extract_layer_index(name)


def pages_of(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in a layer's cache, [N, G, S, D] each: views.

    On the CPU a page holds, for each KV head, its keys transposed, then its values.
    """
    pages, heads, tokens, both = kv_cache.shape
    parts = kv_cache.view(pages, heads, 2, tokens * both // 2)
    k_NGSD = parts[:, :, 0].view(pages, heads, both // 2, tokens).transpose(2, 3)
    return k_NGSD, parts[:, :, 1].view(pages, heads, tokens, both // 2)


def check_pages(impl: CPUAttentionBackendImpl, layer: Any, spec: Any) -> None:
    """Writes a page as vLLM does and reads it back: the layout of the cache depends on the instructions of the CPU.

    Raises:
        UnsupportedError: keys and values do not lie where `pages_of` looks for them.
    """
    tokens, heads, size = spec.block_size, spec.num_kv_heads, spec.head_size
    # Small whole numbers are exact in every dtype, and differ from their neighbours.
    k_SGD = torch.arange(tokens * heads * size).remainder(251).view(tokens, heads, size).to(spec.dtype)
    v_SGD = k_SGD.neg()
    cache = torch.zeros(2, heads, tokens, 2 * size, dtype=spec.dtype)
    impl.do_kv_cache_update(layer, k_SGD, v_SGD, cache, torch.arange(tokens) + tokens)
    k_NGSD, v_NGSD = pages_of(cache)
    if not (torch.equal(k_NGSD[1].transpose(0, 1), k_SGD) and torch.equal(v_NGSD[1].transpose(0, 1), v_SGD)):
        raise UnsupportedError(
            f"expected keys and values in plain pages, found that vLLM packs those of {spec.dtype} in an order of its "
            f"own on this CPU ({layer.isa}); use --dtype float32"
        )


def requests_of(common: CommonAttentionMetadata) -> tuple[list[int], list[int], list[bool]]:
    """Of a step: the first row of each request and the end of the last, their lengths, and which are still prompts."""
    starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
    unfinished = common.is_prefilling
    return starts, lengths, [False] * len(lengths) if unfinished is None else unfinished.tolist()


@dataclass(frozen=True, slots=True)
class Part:
    """Some requests of a step as if they were all, and which of its rows they have: int64 [T]."""

    common: CommonAttentionMetadata
    rows_T: torch.Tensor


def part_without(common: CommonAttentionMetadata, done: frozenset[int]) -> Part | None:
    """The requests of a step that are not `done`; None where there are none."""
    starts = common.query_start_loc_cpu
    counts = starts[1:] - starts[:-1]
    left = [one for one, rows in enumerate(counts.tolist()) if rows and one not in done]
    if not left:
        return None
    chosen = torch.tensor(left)
    rows_T = torch.cat([torch.arange(int(starts[one]), int(starts[one + 1])) for one in left])
    new_starts = torch.nn.functional.pad(counts[chosen].cumsum(0, dtype=starts.dtype), (1, 0))
    part = common.replace(
        query_start_loc=new_starts,
        query_start_loc_cpu=new_starts,
        seq_lens=common.seq_lens[chosen],
        num_reqs=len(left),
        num_actual_tokens=len(rows_T),
        max_query_len=int(counts[chosen].max()),
        block_table_tensor=common.block_table_tensor[chosen],
        slot_mapping=common.slot_mapping[rows_T],
        positions=None if common.positions is None else common.positions[rows_T],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[chosen],
        seq_lens_cpu_upper_bound=None,
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return Part(part, rows_T)


def register() -> None:
    """Puts our backend in the place of vLLM's; it is imported when the first attention layer is made."""
    if current_platform.device_type == "cpu":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.attention_backend.SparseBackend")
    else:
        register_backend(AttentionBackendEnum.CUSTOM, f"{__package__}.unavailable.UnavailableBackend")
