"""Decides which blocks the kernels of evicting layers read in a step: block tables and lengths without what is freed.

Shapes: B requests of a step, P pages of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks
from sparsekv.runtime.vllm.request_lengths import Requests


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request that belong to its prompt, of which something will be evicted."""

    name: str
    request: int  # its row in the block table
    tokens: slice  # its rows among those of the step
    past: int
    prompt: int  # tokens of the prompt
    blocks: EvictedBlocks  # of it

    @property
    def end(self) -> int:
        """Tokens of the prompt up to these rows."""
        return self.past + self.tokens.stop - self.tokens.start


class EvictedLengths(NamedTuple):
    """Holds what the layers that evict as much read in a step."""

    lengths_B: torch.Tensor  # int32, tokens of each request
    cpu_lengths_B: torch.Tensor  # the same, on the host
    shortened: list[bool]  # whether it lacks tokens of the request
    prompts: tuple[PromptRows, ...]
    entry_BP: torch.Tensor  # int64, of each page that is read, its entry in the table; as many as are read at most


class TableRows(NamedTuple):
    """The requests of a step, without asking the device; padding may follow."""

    starts: Sequence[int]  # the first row of each, then the end of the last one
    lengths: Sequence[int]  # tokens of each, the new ones included


class StepTables:
    """Holds what groups of layers that evict as much share in a step.

    Args:
        requests: of the engine.
        rows: of a step, at most.
    """

    def __init__(self, requests: Requests, rows: int) -> None:
        self.rows = rows
        self._requests = requests
        self._buffers: dict[EvictedBlocks, torch.Tensor] = {}
        self._of_step: dict[EvictedBlocks, EvictedLengths] = {}
        self._step = 0

    def lengths(
        self, blocks: EvictedBlocks, page: int, rows: Callable[[], TableRows], lengths_B: torch.Tensor, pages: int
    ) -> EvictedLengths:
        """Returns what is read of each request, made once in a step.

        Args:
            blocks: of each layer.
            page: tokens of a page, as kernels see it: a block, or a part of one.
            rows: gives those of the step.
            lengths_B: tokens of each request, on the device.
            pages: of the longest request.
        """
        requests = self._requests.rows
        if self._step != self._requests.steps or not requests:
            self._of_step, self._step = {}, self._requests.steps
        if blocks not in self._of_step:
            self._of_step[blocks] = self._new(blocks, page, rows(), requests, lengths_B, pages)
        return self._of_step[blocks]

    def _new(
        self, blocks: EvictedBlocks, page: int, rows: TableRows, requests: Sequence[tuple[str, int]],
        lengths_B: torch.Tensor, pages: int,
    ) -> EvictedLengths:  # fmt: skip
        pasts_B = np.asarray(rows.lengths) - np.diff(rows.starts)
        moves_4B = np.zeros((4, len(pasts_B)), dtype=np.int64)
        moves_4B[:, : len(requests)] = moves(blocks, [prompt for _, prompt in requests], pasts_B[: len(requests)])
        shorter_B = np.asarray(rows.lengths) - moves_4B[3] * blocks.block
        if blocks not in self._buffers:
            self._buffers[blocks] = lengths_B.new_zeros(self.rows)
        buffer_B = self._buffers[blocks][: len(lengths_B)]
        moved_4B = _to_device(moves_4B * (blocks.block // page), lengths_B.device)
        torch.sub(lengths_B, moved_4B[3] * page, out=buffer_B)
        used = min(pages, max(1, -(-int(shorter_B.max()) // page)))
        prompts = tuple(_prompts(blocks, requests, rows.starts, pasts_B.tolist()))
        entry_BP = _entries(moved_4B, used).clamp_(max=pages - 1)
        shorter = torch.from_numpy(shorter_B.astype(np.int32))
        return EvictedLengths(buffer_B, shorter, (moves_4B[3] > 0).tolist(), prompts, entry_BP)


class EvictedTable:
    """The block table that the kernels of a group's layers read, at a fixed address, as graphs read it.

    Args:
        blocks: of each layer of the group.
        shared: by the groups of the engine.
        page: see `StepTables.lengths`.
    """

    def __init__(self, blocks: EvictedBlocks, shared: StepTables, page: int) -> None:
        self._blocks, self._shared, self._page = blocks, shared, page
        self._table_BP: torch.Tensor | None = None

    def step(
        self, rows: Callable[[], TableRows], lengths_B: torch.Tensor, table_BP: torch.Tensor
    ) -> tuple[EvictedLengths, torch.Tensor]:
        """Returns what the layers of the group read in a step, and the pages of each request, of which as many are its
        own.

        Args:
            rows: gives those of the step.
            lengths_B: tokens of each request, on the device.
            table_BP: pages of each request.
        """
        pages = table_BP.shape[1]
        if self._table_BP is None:
            self._table_BP = table_BP.new_zeros((self._shared.rows, pages))
        found = self._shared.lengths(self._blocks, self._page, rows, lengths_B, pages)
        count, used = found.entry_BP.shape
        self._table_BP[:count, :used] = table_BP.gather(1, found.entry_BP)
        return found, self._table_BP[:count]


def moves(blocks: EvictedBlocks, prompts: Sequence[int], pasts_B: np.ndarray) -> np.ndarray:
    """Where the blocks that a step reads are in each request's table, int64 [4, B]: block i of them is entry i before
    the first number, entry i + the third before the second, and entry i + the fourth behind. All are 0 where all are
    read.

    Args:
        blocks: of each layer.
        prompts: tokens of each request's prompt.
        pasts_B: tokens of each request before the step.
    """
    prompt_B = np.asarray(prompts, dtype=np.int64)
    evicted_B = np.fromiter(map(blocks.evicted, prompts), dtype=np.int64, count=len(prompts))
    whole_B, first_B = prompt_B // blocks.block, -(-prompt_B // blocks.block)
    newest_B = np.maximum(first_B, (pasts_B + 1 - blocks.generated) // blocks.block)
    front_B = whole_B - evicted_B
    found_4B = np.stack((front_B, front_B + first_B - whole_B, evicted_B, evicted_B + newest_B - first_B))
    return np.where(pasts_B < prompt_B, 0, found_4B)


def _prompts(
    blocks: EvictedBlocks, requests: Sequence[tuple[str, int]], starts: Sequence[int], pasts: Sequence[int]
) -> Iterator[PromptRows]:
    for request, ((name, prompt), past) in enumerate(zip(requests, pasts, strict=False)):
        first, end = starts[request], starts[request + 1]
        if past < prompt and blocks.evicted(prompt):
            yield PromptRows(name, request, slice(first, min(end, first + prompt - past)), past, prompt, blocks)


def _entries(moves_4B: torch.Tensor, pages: int) -> torch.Tensor:
    front_B1, middle_B1, evicted_B1, skipped_B1 = moves_4B[..., None]
    page_P = torch.arange(pages, device=moves_4B.device)
    moved_BP = torch.where(page_P < middle_B1, evicted_B1, skipped_B1).masked_fill_(page_P < front_B1, 0)
    return page_P + moved_BP


def _to_device(moves_4B: np.ndarray, device: torch.device) -> torch.Tensor:
    moves = torch.from_numpy(moves_4B)
    return moves.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else moves
