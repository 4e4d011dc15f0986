"""Layers of transformers' models with indexers that attend to the tokens that an earlier layer's indexer chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.types import format_ids
from sparsekv.runtime.hf.describe import decoder_of


def indexers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The indexer of every layer.

    Raises:
        UsageError: layers share choices by a plan already.
        UnsupportedError: a layer has none.
    """
    layers: Any = cast(Any, decoder_of(model)).layers
    indexers: list[Any] = [getattr(layer.self_attn, "indexer", None) for layer in layers]
    if without := [layer for layer, indexer in enumerate(indexers) if indexer is None]:
        raise UnsupportedError(
            f"expected an indexer in every layer, found none in layers {format_ids(without)}, which share choices by "
            "the model's config; load it without index_topk_pattern, index_topk_freq and indexer_types"
        )
    if any(getattr(indexer.forward, "func", None) is _reuse for indexer in indexers):
        raise UsageError("a plan is applied to this model already; close that handle before applying another")
    return indexers


def sources_of(sharing: IndexSharing) -> dict[int, int]:
    """The layer whose choice each reusing layer attends to: the last one before it that chooses."""
    return {layer: max(one for one in sharing.choosing if one < layer) for layer in sharing.reused}


def share(model: PreTrainedModel, sources: Mapping[int, int]) -> Callable[[], None]:
    """Has layers attend to the choice of their sources, each the last one before its layers, and returns what undoes
    it, any number of times. The indexers stay where they are, with their weights."""
    indexers, last = indexers_of(model), _Last()
    with ExitStack() as undo:
        for source in {*sources.values()}:
            undo.callback(indexers[source].register_forward_hook(last.keep).remove)
        for layer in sources:
            undo.callback(_restore, indexers[layer], vars(indexers[layer]).get("forward"))
            indexers[layer].forward = partial(_reuse, last)
        return undo.pop_all().close
    raise AssertionError("unreachable")


class _Last:
    """The choice of the source that ran last; one for all, as each may have a gigabyte of a long prompt."""

    choice: torch.Tensor

    def keep(self, module: nn.Module, given: object, choice: torch.Tensor) -> None:
        self.choice = choice


def _reuse(last: _Last, hidden_states: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
    return last.choice.to(hidden_states.device)


def _restore(indexer: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(indexer).pop("forward", None)
    else:
        indexer.forward = forward
