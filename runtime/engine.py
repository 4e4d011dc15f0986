"""What runs in place of a model's attention: one call of one layer, and the engine that answers it.

Shapes: B batch, H query heads, G KV heads, S tokens of this call, K past + S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from transformers import Cache

from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.hf.cache import CacheOwner, SparseLayer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention in one forward pass. The cache, if there is one, already holds the new tokens."""

    layer: int
    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor  # the new tokens only
    v_BGSD: torch.Tensor
    cache: Cache | None
    scale: float
    window: int | None
    q_is_spare: bool = False  # nobody reads q after the call: the output may take its place
    part: LayerPart | None = None  # of the layer's heads; None is all of them

    @property
    def entry(self) -> SparseLayer | None:
        """This layer of the cache."""
        if self.cache is None:
            return None
        entry = self.cache.layers[self.layer]
        assert isinstance(entry, SparseLayer)
        return entry

    @property
    def queries(self) -> int:
        """S: rows of this call."""
        return self.q_BHSD.shape[2]

    @property
    def length(self) -> int:
        """Tokens up to and with this call."""
        return self.queries if self.entry is None else self.entry.store.length

    @property
    def past(self) -> int:
        """Tokens before this call."""
        return self.length - self.queries

    @property
    def chunk(self) -> Chunk:
        """Where the rows lie, the same in every batch row."""
        return Chunk.uniform(self.q_BHSD.shape[0], self.past, self.length)

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, G, K, D] each. Without a past the new rows are all there is, wherever the store keeps its copy."""
        if self.part is not None:
            return self.part.k_BGKD, self.part.v_BGKD
        if self.entry is None or self.past == 0:
            return self.k_BGSD, self.v_BGSD
        return self.entry.store.view()

    @property
    def layer_heads(self) -> int:
        """Query heads of the whole layer."""
        return self.q_BHSD.shape[1] if self.part is None else self.part.of

    def own(self, per_head: Sequence[T]) -> Sequence[T]:
        """What belongs to the heads of this call, out of one value for each query head of the layer."""
        first = 0 if self.part is None else self.part.first
        return per_head[first : first + self.q_BHSD.shape[1]]

    def cut(self, groups: int) -> list[LayerCall]:
        """The same call as several of at most `groups` KV heads each; the keys and values are fetched once."""
        assert self.part is None, "a part is not cut again"
        k_BGKD, v_BGKD = self.keys_values()
        heads, kv_heads = self.q_BHSD.shape[1], k_BGKD.shape[1]
        ratio, calls = heads // kv_heads, []
        for first in range(0, kv_heads, groups):
            kv = slice(first, min(first + groups, kv_heads))
            calls.append(
                replace(
                    self,
                    q_BHSD=self.q_BHSD[:, kv.start * ratio : kv.stop * ratio],
                    k_BGSD=self.k_BGSD[:, kv],
                    v_BGSD=self.v_BGSD[:, kv],
                    part=LayerPart(first * ratio, heads, k_BGKD[:, kv], v_BGKD[:, kv]),
                )
            )
        return calls


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Some neighbouring heads of a layer."""

    first: int  # query head
    of: int  # query heads of the layer
    k_BGKD: torch.Tensor  # all keys so far, of their KV heads
    v_BGKD: torch.Tensor


class Engine(CacheOwner, Protocol):
    """Computes the attention of every layer of the model it is attached to."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The attention output, [B, H, S, D], before the output projection. May be q itself where that is spare."""
