"""Which rows of an engine step are prefill, and which of those a layer runs sparse.

Shapes: T tokens of the step, all requests one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.core.program import LayerProgram


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of one request in a step."""

    request: int  # its row in the block table
    tokens: slice  # its rows among those of the step
    chunk: Chunk  # where they lie in the request


@dataclass(frozen=True, slots=True)
class Rest:
    """The rows that are left to vLLM's own kernel in a layer where others run sparse."""

    tokens_T: torch.Tensor  # int64: which rows of the step
    metadata: Any  # what vLLM's kernel takes for these rows alone


@dataclass(frozen=True)
class StepRows:
    """The prefill rows of a step, and the metadata of any part of it.

    Args:
        prefill: a chunk of each request that prefills.
        table: the block table, int32 [requests, pages].
        rest_of: builds what vLLM's kernel takes for all requests but these; None where none are left.
    """

    prefill: tuple[PrefillRows, ...]
    table: torch.Tensor
    rest_of: Callable[[frozenset[int]], Rest | None]
    _built: dict[frozenset[int], Rest | None] = field(default_factory=dict)

    def rest(self, done: frozenset[int]) -> Rest | None:
        """The requests that are not `done`, built once a step: most layers leave the same ones."""
        if done not in self._built:
            self._built[done] = self.rest_of(done)
        return self._built[done]


def prefill_rows(starts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool]) -> tuple[PrefillRows, ...]:
    """The chunks of a step.

    Args:
        starts: the first row of each request, then the end of the last one. Requests without rows are padding.
        lengths: tokens of each request, the new ones included.
        prefilling: whether a request's prompt is still being computed. More than one row is always prefill: without
            speculative decoding they are a prompt, or what is computed again after a preemption.
    """
    found = []
    for request, (first, end, length, unfinished) in enumerate(
        zip(starts[:-1], starts[1:], lengths, prefilling, strict=True)
    ):
        rows = end - first
        if rows > 1 or (rows == 1 and unfinished):
            found.append(PrefillRows(request, slice(first, end), Chunk.uniform(1, length - rows, length)))
    return tuple(found)


def split_rows(
    layer: LayerProgram, prefill: Sequence[PrefillRows]
) -> tuple[tuple[PrefillRows, ...], tuple[PrefillRows, ...]]:
    """The chunks that a layer runs by the plan's patterns, and those that it runs dense."""
    sparse = tuple(rows for rows in prefill if layer.patterns_at(rows.chunk.longest))
    return sparse, tuple(rows for rows in prefill if rows not in sparse)


@lru_cache(maxsize=4096)
def causal_tiles(chunk: Chunk, tile: TileShape) -> int:
    """Tiles of one head of a chunk that a dense kernel computes."""
    return chunk.causal_tiles(tile)
