"""A decode step of one layer: dense, dense and choosing (a filter layer), over selected tokens, or both choosing and
over what it chose.

Source: OmniKV (ICLR 2025), algorithm 1. The layers between a filter and the first layer of its segment are dense:
they are the paper's wait layers.

Shapes: B batch, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from sparsekv.kernels.backends import decode_attention, decode_scores
from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.softmax import Softmax
from sparsekv.runtime.core.budgets import counts_of
from sparsekv.runtime.core.program import LayerProgram, Program, SegmentProgram
from sparsekv.runtime.core.select import choose_tokens, scoring_for, selected_for
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter


class KeySource(Protocol):
    """Where a layer's keys and values come from, the new token's included. Stores are such sources."""

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All of them, on the compute device."""

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """At least the selected ones, the selection counted in what is returned, and the window left to apply; `slots`
        are what hot sets of layers with the same choice share."""


class Resident:
    """Keys and values that lie on the compute device, contiguous or in pages."""

    def __init__(self, keys: KeyView) -> None:
        self._keys = keys

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All of them."""
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


class WithSoftmax:
    """Keys and values of a layer whose softmax has more than their scores."""

    def __init__(self, source: KeySource, softmax: Softmax) -> None:
        self._source, self._softmax = source, softmax

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """As of the source."""
        return replace(self._source.view(lengths_B), softmax=self._softmax)

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """As of the source."""
        keys, found, left = self._source.gather(selection, lengths_B, window, slots)
        return replace(keys, softmax=self._softmax), found, left


def decode(
    layer: LayerProgram,
    q_BH1D: torch.Tensor,
    source: KeySource,
    state: DecodeState,
    *,
    scale: float,
    backend: str,
    out_BH1D: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token in every row.

    Args:
        layer: what the layer computes.
        q_BH1D: queries of the rank's heads.
        source: of the layer's keys and values.
        state: of the step: `begin` was called, and filter layers come before the layers of their segments.
        scale: softmax scale.
        backend: the name that `choose_backend` gave.
        out_BH1D: where the output goes; rows without keys are left as they are.

    Returns:
        [B, H, 1, D].
    """
    state.remember_step(layer, q_BH1D)
    device = q_BH1D.device  # layers may be spread over devices
    lengths_B = state.lengths_B.to(device)
    attend = partial(decode_attention, scale=scale, backend=backend, out=out_BH1D)
    if layer.chooses_for_itself:
        choose_alone(layer, q_BH1D, source.view(lengths_B), state, scale=scale, backend=backend)
    selection = selected_for(layer, state, device) if layer.follows else None
    if selection is not None:
        keys, found, window = source.gather(selection, lengths_B, layer.window, state.slots(layer, device))
        return attend(q_BH1D, keys, found, window=window).out_BHSD
    keys = source.view(lengths_B)
    if layer.filters is None or layer.follows or _all_attend_to_everything(layer.filters, state):
        return attend(q_BH1D, keys, window=layer.window).out_BHSD
    scoring = scoring_for(layer, keys, state, backend)
    in_passing = scoring if layer.filters.queries == 1 else None
    output = attend(q_BH1D, keys, scoring=in_passing)
    choose_tokens(layer, q_BH1D, keys, state, scoring, output.scores_gT, scale=scale, backend=backend)
    return output.out_BHSD


def decode_dense(
    layer: LayerProgram,
    q_BHQD: torch.Tensor,
    source: KeySource,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    backend: str,
    new_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, Q, D]: dense attention of the newest tokens of every row, in one pass over its keys.

    Args:
        layer: what the layer is; what it chooses, and whom it follows, are left aside.
        q_BHQD: queries of the rank's heads; Q as `decode_attention` takes them.
        source: of the layer's keys and values.
        lengths_B: int32 [B]: tokens of each row, the new ones included.
        new_B: how many of the Q tokens each row has; all of them when None.
    """
    there = [None if x is None else x.to(q_BHQD.device) for x in (lengths_B, new_B)]
    assert there[0] is not None
    keys = source.view(there[0])
    return decode_attention(q_BHQD, keys, scale=scale, window=layer.window, new_B=there[1], backend=backend).out_BHSD


def choose_alone(
    layer: LayerProgram, q_BH1D: torch.Tensor, keys: KeyView, state: DecodeState, *, scale: float, backend: str
) -> None:
    """The choice of a filter layer before it attends to anything: only keys are read. Arguments as in `decode`."""
    assert layer.filters is not None
    if _all_attend_to_everything(layer.filters, state):
        return
    scoring, scores_gT = scoring_for(layer, keys, state, backend), None
    if layer.filters.queries == 1:
        scores_gT = decode_scores(q_BH1D, keys, scoring, scale=scale, backend=backend)
    choose_tokens(layer, q_BH1D, keys, state, scoring, scores_gT, scale=scale, backend=backend)


def _all_attend_to_everything(segment: SegmentProgram, state: DecodeState) -> bool:
    """Whether the host knows that no row chooses in this step; the layers of the segment are then told so."""
    if state.lengths is None or any(segment.count(length) != ALL for length in state.lengths):
        return False
    state.choose(segment, None)
    return True


def count_step(program: Program, lengths: Sequence[int], meter: Meter) -> None:
    """Counts what one decode step attends to, at lengths with the new tokens included."""
    for layer, layers in program.alike_in_decode:
        segment, window = layer.follows, layer.window
        counts = [ALL] * len(lengths) if segment is None else counts_of(segment, program, lengths)
        for length, chosen in zip(lengths, counts, strict=True):
            visible = attended = length if window is None else min(length, window)
            if segment is not None and chosen != ALL:
                scored = length // 2 if layer.chooses_for_itself else 0  # keys alone
                attended = min(visible, scored + segment.sink + chosen + segment.recent)
            meter.add_decode(layers * attended, layers * visible)
