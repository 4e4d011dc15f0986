"""Caches of prompts that were prefilled elsewhere, as under another handle, from which decode goes on."""

from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from sparsekv.runtime.hf.apply import Handle
from sparsekv.runtime.hf.cache import SparseLayer, sparse_cache

Given = tuple[torch.Tensor, torch.Tensor] | LinearAttentionLayer
"""Of a layer: keys and values, [B, G, S, D] each, or its recurrent state."""


def handed_over(cache: Cache, tokens: int) -> Iterator[Given]:
    """Yields the first tokens of every layer; the cache is empty from then on."""
    layers = deque(cache.layers)
    cache.layers = []
    while layers:
        yield _first_tokens(layers.popleft(), tokens)


def _first_tokens(layer: Any, tokens: int) -> Given:
    if isinstance(layer, LinearAttentionLayer):
        return deepcopy(layer)  # a shallow copy of a cache shares it
    if not isinstance(layer, SparseLayer):
        if getattr(layer, "keys", None) is None:  # of an MLP alone, or of another layer's keys
            return LinearAttentionLayer()
        return layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    store: Any = layer.store
    lengths_B = torch.full(store.keys.shape[:1], tokens, dtype=torch.int32, device=store.keys.device)
    keys = store.view(lengths_B)
    k_BGSD, v_BGSD = (keys if layer.float8 is None else layer.float8.view(keys)).contiguous(tokens)
    return k_BGSD, v_BGSD


def cache_of(handle: Handle, layers: Iterable[Given]) -> Cache:
    """A cache of the handle with these layers of its model."""
    cache = sparse_cache(None, handle._engine, len(handle._layouts), handle._linear)
    for number, (layer, given) in enumerate(zip(cache.layers, layers, strict=True)):
        if isinstance(layer, SparseLayer):
            assert isinstance(given, tuple)
            layer.update(*given)
        else:
            cache.layers[number] = given
    return cache
