"""Says how vLLM allocates and frees the blocks of evicting layers.

The spec derives from none that vLLM merges with its own: one group would hold all layers then, and nothing be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm import cache_internals as vllm
from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks
from sparsekv.runtime.vllm.internals import changed_calls

_Spec: Any
_Manager: Any
_Spec, _Manager = vllm.cache_bases()


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(_Spec):
    """The cache of a layer: pages as of any layer with full attention, and what is evicted of them."""

    blocks: EvictedBlocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """A prompt is there as a whole before any of it is evicted."""
        return -(-vllm_config.model_config.max_model_len // self.block_size) * int(self.page_size_bytes)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Returns whether all layers evict as much."""
        return all(isinstance(spec, EvictingSpec) and spec.blocks == self.blocks for spec in kv_cache_specs.values())


class EvictingManager(_Manager):
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
        """None."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, *args: Any, **settings: Any) -> None:
        """Nothing is cached for other requests."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None."""
        return 0


vllm.register_cache(EvictingSpec, EvictingManager)
vllm.refuse_sessions(EvictingSpec)


def evicting_spec(spec: Any, blocks: EvictedBlocks) -> EvictingSpec:
    """The cache of an evicting layer, of which vLLM would keep everything.

    Raises:
        UnsupportedError: vLLM caches the layer in another way, or frees blocks by other calls.
    """
    if changed := list(changed_calls(EvictingManager)):
        raise UnsupportedError(f"expected a release that calls {', '.join(changed)}, found another; use a tested one")
    if not vllm.is_full_attention(spec):
        raise UnsupportedError(
            f"expected a plain cache of keys and values in evicting layers, found {type(spec).__name__}; run a "
            "plan without kv_cache"
        )
    return EvictingSpec(**vllm.fields_of(spec), blocks=blocks)
