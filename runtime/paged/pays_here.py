"""Measures in an engine from how many tokens on the plan is faster than the engine's own attention.

Timed is one layer over random keys in scattered pages: the engine's kernel beside what runs in its place, the copy of a
past and the index of a chunk included.

Shapes: T rows of a chunk, H query heads, G KV heads, D head size, P pages of a request, B rows of a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from sparsekv.kernels.keys import KeyView, Scales, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.timed_layers import TimedLayers
from sparsekv.runtime.core.timing import Launch
from sparsekv.runtime.paged.plan_host import PlanHost

_MOST_PAGES = 1 << 31  # bytes of pages, many times a device's cache; more rows share them in another order


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer in pages, and the pages of each row.

    Attributes:
        cache: as the engine's kernel takes it.
        pages: the same as ours do, [N, G, S, D] each.
        table_BP: int32.
    """

    cache: torch.Tensor
    pages: tuple[torch.Tensor, torch.Tensor]
    table_BP: torch.Tensor


class EngineKernels(Protocol):
    """Allocates and attends as the engine does."""

    @property
    def device(self) -> torch.device:
        """The engine's."""

    @property
    def softmax(self) -> Softmax:
        """Of all layers."""

    @property
    def scales(self) -> Scales | None:
        """Of pages in 8 bits."""

    def queries(self, rows: int, heads: int) -> torch.Tensor:
        """[rows, H, D], random."""

    def pages(self, rows: int, tokens: int, kv_heads: int, most_bytes: int) -> Pages:
        """Random keys and values of so many rows, in pages that lie scattered."""

    def dense(self, q_THD: torch.Tensor, pages: Pages, lengths: Sequence[int], out_THD: torch.Tensor) -> Launch:
        """A launch of the engine's kernel for the last rows of requests."""

    def agreed(self, gain: float) -> float:
        """The first rank's, on all ranks."""


@dataclass(frozen=True, slots=True)
class EngineLayers(TimedLayers):
    """The layers of an engine beside its own kernel."""

    host: PlanHost
    kernels: EngineKernels

    def agreed(self, measured: float) -> float:
        return self.kernels.agreed(measured)

    def prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        kernels, chunk = self.kernels, Chunk.uniform(1, length - rows, length)
        q_THD = kernels.queries(rows, layer.heads)
        pages, out_THD = kernels.pages(1, length, layer.kv_heads, _MOST_PAGES), torch.empty_like(q_THD)
        scale = q_THD.shape[2] ** -0.5

        def keys() -> KeyView:
            copied = self.host.scratch.copy(pages.pages, pages.table_BP[0], length, kernels.scales)
            return replace(copied, softmax=kernels.softmax)

        alike = self.alike(layer, q_THD.transpose(0, 1)[None], keys().k, chunk, scale)
        if alike is None:
            return self.agreed(math.inf)  # ranks that reached the share wait

        def sparse() -> None:
            out_THD.copy_(self.host.prefill(alike, q_THD, keys(), chunk, scale, counted=False))

        dense = kernels.dense(q_THD, pages, [length], out_THD)
        return self.agreed(self.layer_gain(dense, sparse, q_THD.flatten(1)))

    def decode_gain(self, rows: int, length: int) -> float:
        """All layers of a step, of which one of each kind is timed, filter layers first."""
        assert self.host.decode is not None
        kernels, kinds = self.kernels, [layer for layer, _ in self.kinds]
        layer = kinds[0]
        pages, q_BHD = kernels.pages(rows, length, layer.kv_heads, _MOST_PAGES), kernels.queries(rows, layer.heads)
        out_BHD, scale = torch.empty_like(q_BHD), q_BHD.shape[2] ** -0.5
        lengths_B = torch.full((rows,), length, dtype=torch.int32, device=kernels.device)
        step = self.host.decode.begin(lengths_B, (), pages.table_BP, None)
        dense = kernels.dense(q_BHD, pages, [length] * rows, out_BHD)
        idle = kernels.dense(q_BHD, pages, [0] * rows, out_BHD)

        def sparse(layer: LayerProgram) -> None:
            idle()
            step.attend(layer, q_BHD, pages.pages, out_BHD, scale, kernels.softmax, kernels.scales)

        times = self.timers.replayed([dense, *(partial(sparse, layer) for layer in kinds)], kernels.device)
        return kernels.agreed(self.step_gain(times))
