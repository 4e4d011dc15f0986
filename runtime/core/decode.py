"""A decode step of one layer, and sources of keys that lie on the device.

Shapes: B batch, H query heads, Q new tokens of a row, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.roles import Step
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.store import KeySource


class Resident:
    """Keys and values that lie on the compute device, contiguous or in pages."""

    def __init__(self, keys: KeyView) -> None:
        self._keys = keys

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return self._keys

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """All of them: kernels read the selected tokens where they lie."""
        return self._keys, selection, window


class Seen:
    """Keys and values of a source with what it does not know of them: their softmax, and their scales."""

    def __init__(self, source: KeySource, seen: Callable[[KeyView], KeyView]) -> None:
        self._source, self._seen = source, seen

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return self._seen(self._source.view(lengths_B))

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        keys, found, left = self._source.gather(selection, lengths_B, window, slots)
        return self._seen(keys), found, left


def decode(
    layer: LayerProgram,
    q_BHQD: torch.Tensor,
    source: KeySource,
    state: DecodeState,
    *,
    scale: float,
    backend: str,
    verifies: bool = False,
    new_B: torch.Tensor | None = None,
    out_BHQD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of every row in one layer, as its role has it.

    Args:
        q_BHQD: queries of the rank's heads; one token, but where a draft is verified.
        state: of the step: `begin` was called, and filter layers come before the layers of their segments.
        verifies: the tokens are a draft and what follows it: they attend to everything, in one pass over the keys.
        new_B: how many of the Q tokens each row has; all of them when None.
        out_BHQD: where the output goes; rows without keys are left as they are.

    Returns:
        [B, H, Q, D].
    """
    return layer.role.step(
        Step(layer.layer, layer.window, q_BHQD, source, state, scale, backend, verifies, new_B, out_BHQD)
    )


def count_step(program: Program, lengths: Sequence[int], meter: Meter) -> None:
    """Counts what one decode step attends to, at lengths with the new tokens included."""
    for layer, layers in program.alike_in_decode:
        for length, read in zip(lengths, layer.role.reads(lengths), strict=True):
            visible = length if layer.window is None else min(length, layer.window)
            meter.add_decode(layers * min(visible, read), layers * visible)
