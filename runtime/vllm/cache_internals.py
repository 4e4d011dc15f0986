"""The blocks of evicting layers in vLLM's cache manager, and the requests of each step of its model runners: what is
taken from inside vLLM for eviction, as `internals.py`.

The spec of such a layer's cache derives from none that vLLM merges with its own: one group would hold all layers then,
and nothing be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
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
from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks, Requests, Scheduled
from sparsekv.runtime.vllm.internals import changed_calls, replace_method

_ROWS = attrgetter("input_batch.req_ids")  # of a model runner, once a step is prepared; V2's are handed on
# What of a model runner holds captured graphs, and what of that says whether there are any.
_GRAPHS, _GRAPHS_V2 = ("cudagraph_dispatcher", "keys_initialized"), ("cudagraph_manager", "_graphs_captured")


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(AttentionSpec):
    """The cache of a layer: pages as of any layer with full attention, and what is evicted of them."""

    blocks: EvictedBlocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """A prompt is there as a whole before any of it is evicted."""
        return -(-vllm_config.model_config.max_model_len // self.block_size) * int(self.page_size_bytes)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(isinstance(spec, EvictingSpec) and spec.blocks == self.blocks for spec in kv_cache_specs.values())


class EvictingManager(SingleTypeKVCacheManager):
    """The blocks of one group. No block is ever shared: what lies in it is no longer its tokens."""

    def __init__(self, kv_cache_spec: EvictingSpec, **settings: Any) -> None:
        super().__init__(kv_cache_spec, **settings)
        self._evicted = kv_cache_spec.blocks
        if self._evicted.block != self.block_size:
            raise UnsupportedError(
                f"expected blocks of {self._evicted.block} tokens in evicting layers, found {self.block_size}: "
                "other layers of this model have larger pages; run a plan without kv_cache"
            )

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Frees what no later step reads; null blocks keep the others in their place."""
        if num_prompt_tokens is None or processed_computed_tokens < num_prompt_tokens:
            return
        for blocks in self._evicted.freed(num_prompt_tokens, processed_computed_tokens):
            self._remove_blocks_in_range(request_id, blocks.start, blocks.stop)

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: Sequence[int], **settings: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, *args: Any, **settings: Any) -> None:
        """Nothing is cached for other requests."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0


def evicting_spec(spec: Any, blocks: EvictedBlocks) -> EvictingSpec:
    """The cache of an evicting layer, of which vLLM would keep everything."""
    if changed := list(changed_calls(EvictingManager)):
        raise UnsupportedError(f"expected a release that calls {', '.join(changed)}, found another; use a tested one")
    values = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
    if type(spec) is not FullAttentionSpec or spec != FullAttentionSpec(**values):  # one with more than any has
        raise UnsupportedError(
            f"expected a plain cache of keys and values in evicting layers, found {type(spec).__name__}; run a "
            "plan without kv_cache"
        )
    return EvictingSpec(**values, blocks=blocks)


def _refusing_sessions(given: Any, self: Any, request: EngineCoreRequest) -> Any:
    """Engines that evict refuse requests whose prompts grow: later parts would read blocks that are freed by then."""
    groups = self.scheduler.kv_cache_config.kv_cache_groups
    if request.resumable and any(isinstance(group.kv_cache_spec, EvictingSpec) for group in groups):
        raise UnsupportedError(
            "expected requests with a complete prompt where layers evict tokens, found streaming input; send each turn "
            "as a request of its own"
        )
    return given(self, request)


def without_prefix_caching(config: VllmConfig) -> bool:
    """Turns prefix caching off; whether it was on."""
    was_on = bool(config.cache_config.enable_prefix_caching)
    config.cache_config.enable_prefix_caching = False
    return was_on


def change_specs(change: Callable[[VllmConfig, Any, Any], Any]) -> None:
    """Has every layer's cache be what `change(config, layer, spec)` gives, from now on."""

    def changed(given: Any, self: Any, vllm_config: VllmConfig) -> Any:
        return change(vllm_config, self, given(self, vllm_config))

    replace_method(Attention, "get_kv_cache_spec", changed)


def follow_steps(config: VllmConfig, requests_of: Callable[[VllmConfig], Requests | None]) -> None:
    """Tells of each step which requests it has, row by row. A step of single rows, one of them of a prompt, is
    launched: in a captured graph nothing would see the row's query."""
    known = {field.name for field in fields(SchedulerOutput)}
    if lacks := {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids"} - known:
        raise UnsupportedError(f"expected steps of vLLM that tell {', '.join(sorted(lacks))}, found a release without")
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

        replace_method(RunnerV2, "execute_model", partial(_executing, requests_of, None, _GRAPHS_V2))
        replace_method(RunnerV2, "prepare_attn", partial(_preparing, requests_of))
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        replace_method(GPUModelRunner, "execute_model", partial(_executing, requests_of, _ROWS, _GRAPHS))


def _executing(
    requests_of: Callable[[VllmConfig], Requests | None], order: Callable[[Any], Sequence[str]] | None,
    graphs: tuple[str, str], given: Any, self: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    requests = requests_of(self.vllm_config)
    if requests is None:
        return given(self, scheduler_output, *args, **kwargs)
    rows = None if order is None else lambda: order(self)
    with requests.step(scheduled(scheduler_output), rows) as launch, _launched(self, graphs, launch):
        return given(self, scheduler_output, *args, **kwargs)


def _preparing(requests_of: Callable[[VllmConfig], Requests | None], given: Any, self: Any, input_batch: Any) -> Any:
    requests = requests_of(self.vllm_config)
    if requests is not None:
        requests.order(input_batch.req_ids)
    return given(self, input_batch)


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


KVCacheSpecRegistry._ensure_registered()  # vLLM adds its own only while there are none
KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, EvictingSpec)
replace_method(EngineCore, "preprocess_add_request", _refusing_sessions)
