"""Decides which rows of an engine step are prefill, and which of those a layer runs sparse.

Shapes: T tokens of the step, all requests one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.paged.decode_step import DecodeRows


@dataclass(frozen=True, slots=True)
class PrefillRows:
    request: int  # its row in the block table
    tokens: slice  # its rows among those of the step
    chunk: Chunk  # where they lie in the request


@dataclass(frozen=True, slots=True)
class Rest:
    """Contiguous rows that are left to the engine's own kernel in a layer where others run sparse."""

    tokens: slice  # their rows among those of the step
    metadata: Any  # what the engine's kernel takes for these rows alone


@dataclass(frozen=True)
class StepRows:
    """The prefill rows of a step, and the metadata of any part of it.

    Args:
        starts: the first row of each request, then the end of the last one. Requests without rows are padding.
        prefill: a chunk of each request that prefills; none where all of them are dense.
        table: the block table, int32 [requests, pages].
        part_of: builds what the engine's kernel takes for the requests from the first to before the second number.
        decode: the rows that decode, where some may attend to a choice.
        prompts: rows of prompts, of evicting layers, as the engine's eviction has them.
    """

    starts: tuple[int, ...]
    prefill: tuple[PrefillRows, ...]
    table: torch.Tensor
    part_of: Callable[[int, int], Any]
    decode: DecodeRows | None = None
    prompts: tuple[Any, ...] = ()
    _built: dict[frozenset[int], tuple[Rest, ...]] = field(default_factory=dict)

    def rest(self, done: frozenset[int]) -> tuple[Rest, ...]:
        """The requests that are not `done`, in contiguous ranges; built once a step: most layers leave the same ones.

        Requests are sorted by their rows: those that decode follow one another.
        """
        if done not in self._built:
            runs = contiguous_ranges(self.starts, done)
            self._built[done] = tuple(
                Rest(slice(self.starts[first], self.starts[end]), self.part_of(first, end)) for first, end in runs
            )
        return self._built[done]


def contiguous_ranges(starts: Sequence[int], done: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Intervals of requests that have rows and are not `done`, as long as they can be."""
    found: list[tuple[int, int]] = []
    for request, (first, end) in enumerate(pairwise(starts)):
        if first == end or request in done:
            continue
        if found and found[-1][1] == request:
            found[-1] = (found[-1][0], request + 1)
        else:
            found.append((request, request + 1))
    return tuple(found)


def prefill_rows(
    starts: Sequence[int], lengths: Sequence[int], prefilling: Sequence[bool], decoded: int = 1
) -> tuple[PrefillRows, ...]:
    """The chunks of a step.

    Args:
        starts: the first row of each request, then the end of the last one. Requests without rows are padding.
        lengths: tokens of each request, the new ones included.
        prefilling: whether a request's prompt is still being computed.
        decoded: rows that a request decodes in a step at most: its newest token, and those that a drafter proposed.
            More are always prefill: a prompt, or what is computed again after a preemption.
    """
    found = []
    for request, (first, end, length, unfinished) in enumerate(
        zip(starts[:-1], starts[1:], lengths, prefilling, strict=True)
    ):
        rows = end - first
        if rows > decoded or (rows and unfinished):
            found.append(PrefillRows(request, slice(first, end), Chunk.uniform(1, length - rows, length)))
    return tuple(found)


def behind_decode(starts: Sequence[int], prefilling: Sequence[bool], decoded: int = 1) -> list[bool]:
    """Returns which requests are prompts behind the last one that decodes. An engine may sort by the number of rows
    alone, so that a single row of a prompt may lie before others that decode; it is computed with those.

    Args:
        starts: the first row of each request, then the end of the last one.
        prefilling: whether a request's prompt is still being computed.
        decoded: rows that a request decodes in a step at most.
    """
    decoding = (0 < end - first <= decoded for first, end in pairwise(starts))
    both = enumerate(zip(decoding, prefilling, strict=True))
    last = max((request for request, (few, prompt) in both if few and not prompt), default=-1)
    return [prompt and request > last for request, prompt in enumerate(prefilling)]


def decode_rows(starts: Sequence[int], prefill: Sequence[PrefillRows]) -> int:
    """Returns how many requests decode: the first of the step, a row each, with the padding behind them where nothing
    else is. They are sorted so, but for single rows of prompts: see `behind_decode`."""
    return min((rows.request for rows in prefill), default=len(starts) - 1)


def split_rows(
    layer: LayerProgram, prefill: Sequence[PrefillRows]
) -> tuple[tuple[PrefillRows, ...], tuple[PrefillRows, ...]]:
    """The chunks that a layer runs by the plan's patterns, and those that it runs dense."""
    sparse = tuple(rows for rows in prefill if layer.patterns_at(rows.chunk.longest))
    return sparse, tuple(rows for rows in prefill if rows not in sparse)
