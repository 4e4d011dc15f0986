"""The layers of a cache that drop tokens: when a prompt begins, and when it is complete.

`generate` says where its prompt ends: each layer then drops what it does not keep as soon as it has attended, so that
all of a prompt is in memory for one layer at a time. Behind other forward passes a prompt is complete when the first
token behind it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import Cache

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.retention import kept_rows
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.stores.retained import RetainedStore

Attempt = Callable[[Callable[[str], Any], torch.device], Any]
"""Calls a function of a backend's name, for tensors on that device."""


def check_retained(retained: frozenset[int], in_host_memory: frozenset[int]) -> None:
    """Raises UsageError where a layer that drops tokens is to be in host memory."""
    if both := retained & in_host_memory:
        raise UsageError(
            f"expected layers in host memory that keep all of their tokens, found {format_ids(both)}, of which the "
            "plan's kv_cache drops some; name other layers, or run without kv_host_layers"
        )


def check_handed_over(program: Program) -> None:
    """Refuses a program that needs queries of a prompt that was prefilled elsewhere.

    Raises:
        UnsupportedError: a selector looks at older queries than the newest, or a layer drops tokens.
    """
    if program.remembers:
        raise UnsupportedError(
            f"expected a plan whose selectors look at the newest query alone, found older ones in filter layer "
            f"{program.remembers[0]}; prefill the prompt under this handle"
        )
    if found := program.evicting:
        raise UnsupportedError(
            f"expected a plan that keeps all tokens, found one that drops some in layers {format_ids(found)}; prefill "
            "the prompt under this handle"
        )


def begin_prompt(program: Program, cache: Cache) -> None:
    """A pass over tokens of a prompt is about to run."""
    for layer, entry, store in _retaining(program, cache):
        store.begin_prompt()
        if not store.prompt_tokens:
            entry.state.observed(layer)  # of a prompt before


def begin_step(program: Program, cache: Cache, attempt: Attempt, meter: Meter) -> None:
    """A decode step is about to run: what came before it was the whole prompt. Counts what the layers attend to."""
    for layer, entry, store in _retaining(program, cache):
        end_prompt(layer, entry, attempt)
        rows = len(store.lengths)
        meter.add_decode(rows * store.held_after(1), rows * (store.length + 1))


def end_prompt(layer: LayerProgram, entry: SparseLayer, attempt: Attempt) -> None:
    """Drops what the layer does not keep of the prompt under way, if there is one."""
    store, observed = entry.store, entry.state.observed(layer)
    assert isinstance(store, RetainedStore)
    assert layer.retains is not None
    if not store.prompt_tokens:
        return store.resume()
    assert observed is not None, "check_handed_over"
    k_BGSD = store.tensors[0][:, :, : store.held]
    choose = partial(kept_rows, layer.retains, store.length, observed, k_BGSD)
    return store.keep(attempt(lambda backend: choose(backend=backend), k_BGSD.device))


def _retaining(program: Program, cache: Cache) -> Iterator[tuple[LayerProgram, SparseLayer, RetainedStore]]:
    for layer in program.layers:
        entry = cache.layers[layer.layer] if layer.retains else None
        if isinstance(entry, SparseLayer) and isinstance(entry.store, RetainedStore):
            yield layer, entry, entry.store
