"""What runs in place of a model's attention: one call of one layer, and the engine that answers it.

Shapes: B batch, H query heads, G KV heads, S tokens of this call, K past + S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import Cache

from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.cache import CacheOwner, SparseLayer


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
        if self.entry is None or self.past == 0:
            return self.k_BGSD, self.v_BGSD
        return self.entry.store.view()


class Engine(CacheOwner, Protocol):
    """Computes the attention of every layer of the model it is attached to."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The attention output, [B, H, S, D], before the output projection."""
