"""Holds what is taken from inside vLLM's cache manager and its model runners, for evicting layers: as
`internals.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm.request_lengths import Requests, Scheduled

# What of a model runner holds captured graphs, and what of that says whether there are any.
_GRAPHS, _GRAPHS_V2 = ("cudagraph_dispatcher", "keys_initialized"), ("cudagraph_manager", "_graphs_captured")
_OURS = "sparsekv_given"  # what a method that was replaced by ours was, on ours


def cache_bases() -> tuple[Any, Any]:
    """Returns what the spec of a layer's cache and its manager derive from."""
    return AttentionSpec, SingleTypeKVCacheManager


def register_cache(spec: Any, manager: Any) -> None:
    """Makes a kind of cache known to vLLM, in this process."""
    KVCacheSpecRegistry._ensure_registered()  # vLLM adds its own only while there are none
    KVCacheSpecRegistry.register(spec, manager, spec)


def is_full_attention(spec: Any) -> bool:
    """Returns whether it is the plain cache of a layer that keeps everything, and nothing else is said of it than of
    any."""
    return type(spec) is FullAttentionSpec and spec == FullAttentionSpec(**fields_of(spec))


def refuse_sessions(kind: Any) -> None:
    """Has engines with such a cache refuse requests whose prompts grow (streaming input), each by itself: later parts
    would read blocks that are freed when the first is complete."""

    def replacement(given: Any) -> Any:
        def preprocess_add_request(self: Any, request: EngineCoreRequest) -> Any:
            groups = self.scheduler.kv_cache_config.kv_cache_groups
            if request.resumable and any(isinstance(group.kv_cache_spec, kind) for group in groups):
                raise UnsupportedError(
                    "expected requests with a complete prompt where layers evict tokens, found streaming input; send "
                    "each turn as a request of its own"
                )
            return given(self, request)

        return preprocess_add_request

    _replace(EngineCore, "preprocess_add_request", replacement)


def fields_of(spec: Any) -> dict[str, Any]:
    """Returns what the spec of any attention layer holds."""
    return {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}


def without_prefix_caching(config: VllmConfig) -> bool:
    """Turns prefix caching off; whether it was on."""
    was_on = bool(config.cache_config.enable_prefix_caching)
    config.cache_config.enable_prefix_caching = False
    return was_on


def change_specs(change: Callable[[VllmConfig, Any, Any], Any]) -> None:
    """Has every layer's cache be what `change(config, layer, spec)` gives, from now on."""

    def replacement(given: Any) -> Any:
        def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> Any:
            return change(vllm_config, self, given(self, vllm_config))

        return get_kv_cache_spec

    _replace(Attention, "get_kv_cache_spec", replacement)


def follow_steps(config: VllmConfig, requests_of: Callable[[VllmConfig], Requests | None]) -> None:
    """Tells of each step which requests it has, row by row.

    A step of single rows, one of them of a prompt, is launched: in a captured graph nothing would see the row's query.

    Args:
        config: of the engine; its model runner is one of two.
        requests_of: what to tell, of an engine.
    """
    told = {one.name for one in fields(SchedulerOutput)}
    if lacks := {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"} - told:
        raise UnsupportedError(f"expected steps of vLLM that tell {', '.join(sorted(lacks))}, found a release without")
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

        _replace(RunnerV2, "execute_model", lambda given: _executing(given, requests_of, None, _GRAPHS_V2))
        _replace(RunnerV2, "prepare_attn", lambda given: _preparing(given, requests_of))
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        _replace(GPUModelRunner, "execute_model", lambda given: _executing(given, requests_of, _order, _GRAPHS))


def _order(runner: Any) -> Sequence[str]:
    """The rows of a step, once it is prepared; the other runner's are known to what it calls alone."""
    ids: list[str] = runner.input_batch.req_ids
    return ids


def _executing(
    given: Any, requests_of: Callable[[VllmConfig], Requests | None], order: Callable[[Any], Sequence[str]] | None,
    graphs: tuple[str, str],
) -> Any:  # fmt: skip
    def execute_model(self: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        requests = requests_of(self.vllm_config)
        if requests is None:
            return given(self, scheduler_output, *args, **kwargs)
        rows = None if order is None else lambda: order(self)
        with requests.step(scheduled(scheduler_output), rows) as launch, _launched(self, graphs, launch):
            return given(self, scheduler_output, *args, **kwargs)

    return execute_model


def _preparing(given: Any, requests_of: Callable[[VllmConfig], Requests | None]) -> Any:
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        requests = requests_of(self.vllm_config)
        if requests is not None:
            requests.order(input_batch.req_ids)
        return given(self, input_batch)

    return prepare_attn


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
    given = getattr(owner, name)
    if not hasattr(given, _OURS):  # once in a process, whatever engines it has
        ours = wraps(given)(replacement(given))
        setattr(ours, _OURS, given)
        setattr(owner, name, ours)


@contextmanager
def _launched(runner: Any, graphs: tuple[str, str], launch: bool) -> Iterator[None]:
    """Meanwhile no graph is replayed where `launch`."""
    holder, name = getattr(runner, graphs[0]), graphs[1]
    if not launch or holder is None:
        yield
        return
    captured = getattr(holder, name)
    setattr(holder, name, False)
    try:
        yield
    finally:
        setattr(holder, name, captured)


def scheduled(output: SchedulerOutput) -> Scheduled:
    """Returns what a step schedules, in our words."""
    return Scheduled(
        rows=output.num_scheduled_tokens,
        prompts={
            new.req_id: len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)
            for new in output.scheduled_new_reqs
        },
        computed={new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs},
        resumed=output.scheduled_cached_reqs.resumed_req_ids,
        finished=output.finished_req_ids,
    )
