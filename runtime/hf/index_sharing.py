"""Layers of transformers' models with indexers that attend to the tokens that an earlier layer's indexer chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.types import format_ids
from sparsekv.runtime.hf.describe import decoder_of

_SHARED = "sparsekv_shares_choices"  # on a decoder


def indexers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The indexer of every layer.

    Raises:
        UsageError: layers share choices by a plan already.
        UnsupportedError: a layer has none.
    """
    decoder: Any = decoder_of(model)
    indexers: list[Any] = [getattr(layer.self_attn, "indexer", None) for layer in decoder.layers]
    if without := [layer for layer, indexer in enumerate(indexers) if indexer is None]:
        raise UnsupportedError(
            f"expected an indexer in every layer, found none in layers {format_ids(without)}, which share choices by "
            "the model's config; load it without index_topk_pattern, index_topk_freq and indexer_types"
        )
    if is_shared(model):
        raise UsageError("a plan is applied to this model already; close that handle before applying another")
    return indexers


def is_shared(model: PreTrainedModel) -> bool:
    return _SHARED in vars(decoder_of(model))


def sources_of(sharing: IndexSharing) -> dict[int, int]:
    """The layer whose choice each reusing layer attends to: the last one before it that chooses."""
    return {layer: max(one for one in sharing.choosing if one < layer) for layer in sharing.reused}


def share(model: PreTrainedModel, sources: Mapping[int, int]) -> Callable[[], None]:
    """Has layers attend to the choice of their sources, each the last one before its layers, and returns what undoes
    it, any number of times. The indexers stay where they are, with their weights."""
    indexers, last, decoder = indexers_of(model), _Last(), decoder_of(model)
    readers = {source: layer for layer, source in sorted(sources.items())}  # of each choice the last
    with ExitStack() as undo:
        vars(decoder)[_SHARED] = True
        undo.callback(vars(decoder).pop, _SHARED, None)
        for source in readers:
            undo.callback(indexers[source].register_forward_hook(last.keep).remove)
        for layer, source in sources.items():
            undo.callback(_restore, indexers[layer], vars(indexers[layer]).get("forward"))
            indexers[layer].forward = partial(_reuse, last, layer, readers[source] == layer)
        return undo.pop_all().close
    raise AssertionError("unreachable")


class _Last:
    """The choice of the source that ran last; one for all, as each may have a gigabyte of a long prompt."""

    choice: torch.Tensor

    def keep(self, module: nn.Module, given: object, choice: torch.Tensor) -> None:
        self.choice = choice


def _reuse(
    last: _Last, layer: int, is_last: bool, hidden_states: torch.Tensor, *given: object, **named: Any
) -> torch.Tensor:
    cache = named.get("cache", named.get("past_key_values"))  # its older name
    if cache is not None:  # it lacks the keys that the layer's indexer would write
        cache.layers[layer].update_indexer = _refuse
    choice = last.choice.to(hidden_states.device)
    if is_last:
        del last.choice
    return choice


def _refuse(*given: object) -> torch.Tensor:
    raise UsageError(
        "expected a cache without tokens, or one whose tokens all have indexer keys, found one that was filled while "
        "layers shared choices by a plan; begin with a new cache"
    )


def _restore(indexer: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(indexer).pop("forward", None)
    else:
        indexer.forward = forward
