"""Evicting layers, in a captured decode step: how many rows they have, and where the next token goes.

Both follow from the lengths, which the step reads on the device, and from three numbers of each layer's store, which
are written when another cache is served or another prompt was dropped from.

Shapes: B batch, R evicting layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparsekv.runtime.stores.evicting import Ring

_LEAST_ROWS = 512


class KeptRows(NamedTuple):
    """Rows that kernels of a captured step are made for."""

    all: int

    @classmethod
    def of(cls, rows: int) -> KeptRows:
        """Powers of two: few graphs serve all prompts."""
        return cls(max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))


class StepRings:
    """Of one captured step.

    Args:
        kinds: of all layers.
        lengths_B: int32 on the device, tokens of each row: read in every step.
    """

    def __init__(self, kinds: Sequence[Any], lengths_B: torch.Tensor) -> None:
        self._layers = [layer for layer, kind in enumerate(kinds) if isinstance(kind, KeptRows)]
        self._numbers = {layer: number for number, layer in enumerate(self._layers)}
        self._lengths_B = lengths_B
        self._rings_3R1 = lengths_B.new_ones((3, len(self._layers), 1))
        self._held_RB = self._next_RB = lengths_B
        self._bound: list[Ring] = []

    def serves(self, stores: Sequence[Any]) -> bool:
        """Whether the rings are still as when they were bound."""
        return all(stores[layer].ring == ring for layer, ring in zip(self._layers, self._bound, strict=True))

    def bind(self, stores: Sequence[Any]) -> None:
        """The next steps are of these stores."""
        self._bound = [stores[layer].ring for layer in self._layers]
        rings_R3 = torch.tensor(self._bound, dtype=torch.int32, device="cpu").view(-1, 3)
        rings_3R1 = rings_R3.T.contiguous()[..., None]
        if self._rings_3R1.is_cuda:
            rings_3R1 = rings_3R1.pin_memory()  # which is not reused before the copy has read it
        self._rings_3R1.copy_(rings_3R1, non_blocking=True)

    def begin(self) -> None:
        """A step begins."""
        if not self._layers:
            return
        kept_R1, complete_R1, generated_R1 = self._rings_3R1
        made_RB = self._lengths_B - complete_R1
        self._held_RB = kept_R1 + torch.minimum(made_RB, generated_R1)
        self._next_RB = kept_R1 + (made_RB - 1) % generated_R1 + 1

    def __contains__(self, layer: int) -> bool:
        return layer in self._numbers

    def held(self, layer: int) -> torch.Tensor:
        """int32 [B]: rows, the new token's included."""
        return self._held_RB[self._numbers[layer]]

    def behind_next(self, layer: int) -> torch.Tensor:
        """int32 [B]: one more than the row of the new token."""
        return self._next_RB[self._numbers[layer]]
