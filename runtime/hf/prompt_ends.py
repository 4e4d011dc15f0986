"""When the prompt of a cache begins and ends, for the roles of its layers.

`generate` says where its prompt ends: each layer then evicts as soon as it has attended, so that all of a prompt is in
memory for one layer at a time. Behind other forward passes a prompt is complete when the first
token behind it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.roles import Attempt
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.cache import CACHE_NAME, SparseLayer, named


def check_evicting(evicting: frozenset[int], in_host_memory: frozenset[int]) -> None:
    """Raises UsageError where an evicting layer is to be in host memory."""
    if both := evicting & in_host_memory:
        raise UsageError(
            f"expected layers in host memory that evict nothing, found {format_ids(both)}, of which the plan's "
            "kv_cache evicts tokens; name other layers, or run without kv_host_layers"
        )


def check_handed_over(program: Program) -> None:
    """Refuses a program that needs queries of a prompt that was prefilled elsewhere.

    Raises:
        UnsupportedError: a selector looks at older queries than the newest, or a layer evicts.
    """
    if program.remembers:
        raise UnsupportedError(
            f"expected a plan whose selectors look at the newest query alone, found older ones in filter layer "
            f"{program.remembers[0]}; prefill the prompt under this handle"
        )
    if program.evicting:
        raise UnsupportedError(
            f"expected a plan that evicts nothing, found one that does in layers {format_ids(program.evicting)}; "
            "prefill the prompt under this handle"
        )


def begin_prompt(program: Program, cache: Cache) -> None:
    """A pass over tokens of a prompt is about to run."""
    for layer, entry in _attending(program, cache):
        layer.role.begin_prompt(layer.layer, entry.store, entry.state)


def begin_step(program: Program, cache: Cache, attempt: Attempt, meter: Meter) -> None:
    """A decode step is about to run: what came before it was the whole prompt. Counts what evicting layers read."""
    for layer, entry in _attending(program, cache):
        layer.role.end_prompt(layer.layer, entry.store, entry.state, attempt, entry.scales)
        layer.role.count_step(entry.store, meter)


def _attending(program: Program, cache: Cache) -> Iterator[tuple[LayerProgram, SparseLayer]]:
    for layer, entry in zip(program.layers, cache.layers, strict=False):
        if isinstance(entry, SparseLayer):
            yield layer, entry


def prompt_end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns how many tokens are cached once `generate` with these arguments has run its prompt; 0 where it has no
    ids."""
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 0
    mask, cache, tokens = kwargs.get("attention_mask"), named(kwargs).get(CACHE_NAME), ids.shape[1]
    # transformers takes the ids for those behind the cached ones alone where the mask has another length
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != tokens and isinstance(cache, Cache):
        return cache.get_seq_length() + tokens
    return tokens
