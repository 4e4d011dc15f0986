"""Starts the plan of an engine of SGLang, or says why the engine does not run it. docs/sglang.md says what was run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.runtime_context import get_parallel

from sparsekv.kernels.backends import summary
from sparsekv.kernels.keys import PLAIN, Scales, Softmax
from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.errors import PlanWarning, SparseKVError, UnsupportedError, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import Rank
from sparsekv.runtime.engine_plan import EngineModel, Wanted, agreed_plan, start
from sparsekv.runtime.hub import plan_beside
from sparsekv.runtime.model_config import quantisation_of
from sparsekv.runtime.paged.plan_host import PlanHost, merged
from sparsekv.runtime.paged.timed_kernels import measured_rule
from sparsekv.runtime.plan_checks import Host, segments_of
from sparsekv.runtime.sglang.planned_backend import OnCpu, OnCuda, PlannedLayer, logger, with_methods

TESTED = ("0.5.23",)
# Of a release or a model that is unlike what was seen.
_UNLIKE = (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)


class ServedPlan(PlanHost):
    """A plan at work in an engine of SGLang."""

    float8 = False  # keys and values
    step = 0  # most tokens that are computed at once


def with_plan(backend: Any, runner: Any, required: bool) -> Any:
    """The attention backend of a runner, with the plan beside its model; as it is where none lies there, or the engine
    cannot run it.

    Raises:
        SparseKVError: the engine does not run a plan that is `required`.
    """
    try:
        path = agreed_plan(partial(_plan_path, runner.model_config, required), _gather_bytes)
        if path is None:  # and nothing else of SGLang has been looked at
            return backend
        host = _started(path, backend, runner)
        attention = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
        ours = with_methods(backend, OnCuda if runner.device == "cuda" else OnCpu)
        ours.plan_host, ours.plan_page = host, runner.page_size
        host.engine = _engine_of(ours)
        ours.plan_layers = {layer.layer_id: _planned_layer(host, layer) for layer in attention}
        ours.plan_dense = merged(layer.program for layer in ours.plan_layers.values())
        settings = resolved_view(runner.server_args)
        # Beside drafts, rows of mixed steps are dense as well.
        ours.plan_mixes = bool(settings.enable_mixed_chunk) and settings.speculative_algorithm is None
        if runner.device == "cuda":
            _warm_up(ours, attention, host.step)
            first = ours.plan_layers[attention[0].layer_id]
            host.pays = measured_rule(host, host.scratch.kind[1], attention[0].head_dim, first.scales, first.softmax)
    except Exception as error:  # whatever compilers raise, too
        if not isinstance(error, (SparseKVError, *_UNLIKE)) and get_parallel().attn_tp_size > 1:
            raise  # other ranks may have succeeded, and would wait for this one
        if not isinstance(error, SparseKVError):
            error = UnsupportedError(f"the plan could not be started ({summary(error)})")
        if required:
            raise error from None
        logger.warning(
            "sparsekv: the plan beside the model is not run, all attention is dense: %s (to end such an engine "
            "instead: --attention-backend sparsekv)",
            error,
        )
        return backend
    logger.info("sparsekv: %s by %s, kernels: %s", host.phases, path, host.backend)
    return ours


def _plan_path(model: Any, required: bool) -> Path | None:
    path = plan_beside(model.model_path, model.revision)
    if path is None and required:
        raise UsageError(
            f"expected a {PLAN_NAME} beside {model.model_path}, as --attention-backend sparsekv asks, found none; put "
            "one there (sparsekv plan makes it), or leave the option out to run dense"
        )
    return path


def _started(path: Path, backend: Any, runner: Any) -> ServedPlan:
    plan, settings, model = load_plan(path), resolved_view(runner.server_args), runner.model_config
    parallel = get_parallel()
    cache = "auto" if runner.kv_cache_dtype == runner.dtype else str(runner.kv_cache_dtype).removeprefix("torch.")
    engine = EngineModel(
        name=model.model_path,
        revision=model.revision,
        config=model.hf_config,
        dtype=runner.dtype,
        device=torch.empty(0, device=runner.device).device,  # with its number
        longest=model.context_len,
        step=settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else model.context_len,
        rows=runner.req_to_token_pool.size,
        captured=max(settings.cuda_graph_config.decode.bs or (), default=None),
        tokens=runner.max_total_num_tokens,
        rank=Rank(parallel.attn_tp_rank, parallel.attn_tp_size),
        page=runner.page_size,
        graphs=runner.device == "cuda",
        float8=cache != "auto",
        quantization=model.quantization and str(model.quantization),
        packed=quantisation_of(model.hf_config) is not None,
    )
    if (release := version("sglang")) not in TESTED:
        warnings.warn(
            f"SGLang {release}, where tested is {', '.join(TESTED)}: the names that are used of it are there, and "
            "nothing more is known",
            PlanWarning,
            stacklevel=2,
        )
    # What would run the plan wrongly, or nobody tried.
    refused = {**_of_model(plan, runner), **_of_settings(settings, runner, cache)}
    able = Host(
        "SGLang",
        older_queries=False,
        windows=False,
        evicts=False,
        is_engine=True,
        ranks=engine.rank.count,
        obstacles=tuple(sentence for sentence, holds in refused.items() if holds),
        way_out="Change these settings, make another plan, or run dense: move the plan away from the model's folder.",
    )
    if settings.speculative_algorithm is not None and segments_of(plan):
        logger.warning("sparsekv: rows that verify drafts attend to everything: decode of the plan is not used")
    host = start(ServedPlan, plan, path, engine, Wanted(able), _gather)
    host.float8, host.step = engine.float8, engine.step
    return host


def _of_model(plan: Plan, runner: Any) -> dict[str, object]:
    groups, model = plan.model.attention, runner.model_config
    sliding = {layer for group in groups if group.kind == "sliding" for layer in group.layers}
    chosen = {layer for segment in segments_of(plan) for layer in (segment.filter, *segment.layers)}
    windowed = format_ids(sorted(sliding & chosen))
    return {
        "attention with latent keys (MLA): run dense": runner.use_mla_backend,
        "a model of more than text: serve its decoder alone": model.is_multimodal,
        "an encoder beside the decoder: run dense": model.is_encoder_decoder,
        "layers with a recurrent state: run dense": any(group.kind == "linear" for group in groups),
        "layers that attend to keys of others: run dense": any(group.keys_of is not None for group in groups),
        f"segments with layers that have a sliding window ({windowed}): leave these dense": windowed,
    }


def _of_settings(settings: Any, runner: Any, cache: str) -> dict[str, object]:
    names = runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    store = settings.hicache_storage_backend or ("lmcache" if settings.enable_lmcache else "")
    store = store or ("an external one" if settings.enable_unified_cache_external_linker else "")
    shared = settings.enable_kv_cache_sharding or settings.attn_cp_size > 1 or settings.dcp_size > 1
    graphs, role = settings.cuda_graph_config, settings.disaggregation_mode
    return {
        f"one backend for prefill ({names[0]}) and another for decode ({names[1]}): use --attention-backend "
        "alone": names[0] != names[1],
        "deterministic inference, where answers depend on how prompts are cut: remove "
        "--enable-deterministic-inference": settings.enable_deterministic_inference,
        "two batches that overlap, each half with a backend of its own: remove "
        "--enable-two-batch-overlap": settings.enable_two_batch_overlap,
        "prompts beside decode on parts of a GPU: remove --enable-pdmux": settings.enable_pdmux,
        f"an engine for {role} alone: remove --disaggregation-mode": role != "null",
        "data-parallel attention, whose steps are padded: remove --enable-dp-attention": settings.enable_dp_attention,
        f"a store of keys and values ({store}) that finds them by tokens, whatever plan made them: remove it": store,
        "keys and values that ranks share out: remove --enable-kv-cache-sharding, use --attn-cp-size 1 and "
        "--dcp-size 1": shared,
        "pipeline stages: use --pp-size 1": settings.pp_size > 1,
        f"keys and values in {cache}: use --kv-cache-dtype auto or fp8_e4m3": cache not in ("auto", "float8_e4m3fn"),
        f"keys and values in {cache} on a CPU, which SGLang stores without scales: use --kv-cache-dtype "
        "auto": runner.device == "cpu" and cache != "auto",
        "layers that are compiled: remove --enable-torch-compile": settings.enable_torch_compile,
        "drafts by diffusion: remove --dllm-algorithm": settings.dllm_algorithm is not None,
        "no keys and values behind prefill: remove "
        "--prefill-only-disable-kv-cache": settings.prefill_only_disable_kv_cache,
        "whole prompts in graphs, which hold one length: use --cuda-graph-backend-prefill breakable": graphs is not None
        and graphs.prefill.backend not in ("breakable", "disabled"),
    }


def _planned_layer(host: ServedPlan, layer: Any) -> PlannedLayer:
    """A layer of the engine and its program, which is lowered by the model's config."""
    program, window = host.program.layers[layer.layer_id], layer.sliding_window_size
    window = None if window is None or window < 0 else window + 1  # SGLang leaves out a token's own
    expected = (program.heads, program.kv_heads, program.window)
    found = (layer.tp_q_head_num, layer.tp_k_head_num, window)
    plain = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
    plain = plain and layer.v_head_dim == layer.head_dim and layer.xai_temperature_len <= 0 and not layer.use_irope
    if expected != found or not plain:
        raise UnsupportedError(
            f"expected layer {program.layer} with (heads, KV heads, window) {expected} and plain causal attention, as "
            f"the config of the model says, found {found}; run this model without a plan"
        )
    scales, stored = None, host.scratch.kind[0]
    if host.float8:
        of_heads = torch.ones(program.kv_heads, dtype=torch.float32, device=host.scratch.kind[1])
        k_G, v_G = (of_heads if x is None else of_heads * x.float() for x in (layer.k_scale, layer.v_scale))
        scales = Scales(k_G, v_G, stored)
    softmax = Softmax(layer.logit_cap, None) if layer.logit_cap else PLAIN
    return PlannedLayer(program, layer.scaling, softmax, scales)


def _warm_up(backend: Any, attention: Sequence[Any], step: int) -> None:
    """Compiles what steps launch, before graphs are captured and anybody waits."""
    host = backend.plan_host
    dtype, device = host.scratch.kind
    alike: dict[tuple[int, int], list[Any]] = {}  # layers whose pages have the same shape
    for layer in attention:
        own = backend.plan_layers[layer.layer_id]
        q_THD = torch.zeros(step, layer.tp_q_head_num, layer.head_dim, dtype=dtype, device=device)
        host.warm_up(own.program, q_THD, own.softmax, own.scale)
        alike.setdefault((layer.tp_k_head_num, layer.head_dim), []).append(layer)
    for layers in alike.values():
        planned = [backend.plan_layers[layer.layer_id] for layer in layers]
        pages, first = backend.pages(layers[0]), planned[0]
        host.scratch.copy(pages, torch.zeros(1, dtype=torch.int32, device=device), 1, first.scales)
        sparse = next((own for own in planned if own.program in host.program.prefilling), None)
        if host.captured is not None and sparse is not None:
            host.captured.warm_up(sparse.program, pages, sparse.scale, sparse.softmax, sparse.scales)
        if host.decode is not None:
            programs = [own.program for own in planned]
            host.decode.warm_up(programs, pages, host.longest, first.softmax, first.scales)


def _engine_of(backend: Any) -> Any:
    """SGLang as hosts use it: its log, its ranks, caches that are laid out as a layer's, and its kernel over them."""

    def empty_cache(pages: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(2, pages, backend.plan_page, kv_heads, size, dtype=dtype, device=device)

    platform = SimpleNamespace(
        page=backend.plan_page,
        pages_of=lambda cache: tuple(x_NSGD.transpose(1, 2) for x_NSGD in cache),
        attention=partial(OnCuda.attention, backend),
    )
    return SimpleNamespace(
        platform=platform, empty_cache=empty_cache, gather=_gather, gather_bytes=_gather_bytes, logger=logger,
        release=f"SGLang {version('sglang')}",
    )  # fmt: skip


def _gather(x: torch.Tensor) -> torch.Tensor:
    """[ranks, ...]: what each rank of attention's tensor parallelism gives; also in a captured graph."""
    gathered: torch.Tensor = get_parallel().attn_tp_group.all_gather(x[None].contiguous(), dim=0)
    return gathered


def _gather_bytes(given: bytes) -> list[bytes]:
    ranks = get_parallel()
    return [given] if ranks.attn_tp_size == 1 else list(ranks.attn_tp_group.all_gather_object(given))
