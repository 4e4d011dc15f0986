"""Eviction of a prompt's tokens in an engine: its last queries are observed, and at its end the tokens that stay move
together. The blocks that an evicting layer frees, and the tables of the others that kernels read in a step, are known
from lengths alone, so that the scheduler need not ask the device.

The tokens of a prompt that stay are moved, in their order, to the first blocks of the request, and behind them to the
rows of the prompt in the block that its end shares with the answer; the blocks between are freed. Positions keep their
place in the block table, and new tokens are appended as usual. Only whole blocks are freed, so that the rest has no
holes: a layer caches up to a block less one more tokens than its rule says, by score.

Shapes: B requests of a step, P pages of a request, N pages in memory, G KV heads, H query heads, S tokens of a page, W
observed queries, K cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import KeyView, Scales
from sparsekv.plans.patterns import Budget
from sparsekv.plans.phases import Eviction
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.select import rows_to_cache
from sparsekv.runtime.core.state import Gather, Observed


@dataclass(frozen=True, slots=True)
class Scheduled:
    rows: Mapping[str, int]  # of each request
    prompts: Mapping[str, int]  # tokens of the prompts of requests that are new to the worker
    computed: Mapping[str, int]  # of these, tokens before the step
    resumed: Collection[str]  # that were preempted and start again
    finished: Collection[str]  # since the last step, aborted ones among them


class Requests:
    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        self._open: dict[str, int] = {}  # tokens computed of prompts that are not complete
        self._order: Callable[[], Sequence[str]] | None = None
        self.steps = 0  # begun so far

    @contextmanager
    def step(self, scheduled: Scheduled, order: Callable[[], Sequence[str]] | None = None) -> Iterator[bool]:
        """A step runs meanwhile: whether it has single rows alone, one of them of a prompt. `order` gives its rows
        later."""
        for request in scheduled.finished:
            self._prompts.pop(request, None)
            self._open.pop(request, None)
        self._prompts.update(scheduled.prompts)
        self._open.update(scheduled.computed)
        self._open.update(dict.fromkeys(scheduled.resumed, 0))
        self._order = order
        self.steps += 1
        try:
            yield self._advance(scheduled.rows)
        finally:
            self._order = None

    def _advance(self, rows: Mapping[str, int]) -> bool:
        single = False
        for request in [request for request in self._open if request in rows]:
            single |= rows[request] == 1
            self._open[request] += rows[request]
            if self._open[request] >= self._prompts[request]:
                del self._open[request]
        return single and max(rows.values()) == 1

    def knows(self, request: str) -> bool:
        return request in self._prompts

    def order(self, requests: Sequence[str]) -> None:
        self._order = lambda: requests

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The request of each row of the step under way, and the tokens of its prompt; none of steps that vLLM makes
        up."""
        return [] if self._order is None else [(request, self._prompts[request]) for request in self._order()]


@dataclass(frozen=True, slots=True)
class EvictedBlocks:
    """The blocks that an evicting layer frees, by lengths alone: layers with equal ones share their blocks."""

    fixed: int  # tokens of a prompt that stay whatever its length
    share: Budget | None  # of all tokens of a prompt, that stay besides
    generated: int  # the newest tokens of an answer that stay
    block: int  # tokens of a block

    @classmethod
    def of(cls, rule: Eviction, block: int) -> EvictedBlocks:
        assert isinstance(rule.keep, Budget)
        assert rule.generated is not None
        fixed = _unscored(rule) + (rule.keep.tokens or 0)
        return cls(fixed, rule.keep if rule.keep.tokens is None else None, rule.generated, block)

    @lru_cache(maxsize=4096)  # noqa: B019 - of a few, which live as long as the engine
    def evicted(self, prompt: int) -> int:
        share = self.share.resolve(prompt) if self.share else 0
        return max(0, prompt - self.fixed - share) // self.block

    def cached(self, prompt: int) -> int:
        return prompt - self.evicted(prompt) * self.block

    def freed(self, prompt: int, computed: int) -> tuple[range, range]:
        """The blocks, of the prompt and of the answer, that no step reads once so many tokens are computed."""
        whole, first = prompt // self.block, -(-prompt // self.block)
        newest = max(first, (computed + 1 - self.generated) // self.block)
        return range(whole - self.evicted(prompt), whole), range(first, newest)

    def rule(self, given: Eviction, prompt: int) -> Eviction:
        """A layer's rule with as many chosen tokens as the blocks of this prompt have room for."""
        return given.model_copy(update={"keep": Budget(tokens=max(0, self.cached(prompt) - _unscored(given)))})


def _unscored(rule: Eviction) -> int:
    """First and last tokens of a prompt, which stay whatever their score."""
    return (rule.sink or 0) + (rule.recent or 0)


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
        return self.past + self.tokens.stop - self.tokens.start


class EvictedLengths(NamedTuple):
    """The tokens and pages that layers with equal eviction read in a step."""

    lengths_B: torch.Tensor  # int32, tokens of each request
    cpu_lengths_B: torch.Tensor  # the same, on the host
    shortened: list[bool]  # whether it lacks tokens of the request
    prompts: tuple[PromptRows, ...]
    entry_BP: torch.Tensor  # int64, of each page that is read, its entry in the table; as many as are read at most


TableRows = tuple[Sequence[int], Sequence[int], Any]
"""The requests of a step, without asking the device: the first row of each and the end of the last one, and tokens of
each, the new ones included; padding may follow."""


class StepTables:
    """The lengths of a step, of at most so many rows, that groups of layers with equal eviction share."""

    def __init__(self, requests: Requests, rows: int) -> None:
        self.rows = rows
        self._requests = requests
        self._buffers: dict[EvictedBlocks, torch.Tensor] = {}
        self._of_step: dict[EvictedBlocks, EvictedLengths] = {}
        self._step = 0

    def lengths(
        self, blocks: EvictedBlocks, page: int, rows: Callable[[], TableRows], lengths_B: torch.Tensor, pages: int
    ) -> EvictedLengths:
        """The tokens and pages that are read of each request, made once in a step. A page, as kernels see it, is a
        block or a part of one."""
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
        starts, lengths, _ = rows
        pasts_B = np.asarray(lengths) - np.diff(starts)
        moves_4B = np.zeros((4, len(pasts_B)), dtype=np.int64)
        moves_4B[:, : len(requests)] = moves(blocks, [prompt for _, prompt in requests], pasts_B[: len(requests)])
        shorter_B = np.asarray(lengths) - moves_4B[3] * blocks.block
        if blocks not in self._buffers:
            self._buffers[blocks] = lengths_B.new_zeros(self.rows)
        buffer_B = self._buffers[blocks][: len(lengths_B)]
        moved_4B = torch.from_numpy(moves_4B * (blocks.block // page))
        if lengths_B.is_cuda:
            moved_4B = moved_4B.pin_memory().to(lengths_B.device, non_blocking=True)
        torch.sub(lengths_B, moved_4B[3] * page, out=buffer_B)
        used = min(pages, max(1, -(-int(shorter_B.max()) // page)))
        prompts = tuple(_prompts(blocks, requests, starts, pasts_B.tolist()))
        entry_BP = _entries(moved_4B, used).clamp_(max=pages - 1)
        shorter = torch.from_numpy(shorter_B.astype(np.int32))
        return EvictedLengths(buffer_B, shorter, (moves_4B[3] > 0).tolist(), prompts, entry_BP)


class EvictedTable:
    """The block table that the kernels of a group's layers read, at a fixed address, as graphs read it."""

    def __init__(self, blocks: EvictedBlocks, shared: StepTables, page: int) -> None:
        self._blocks, self._shared, self._page = blocks, shared, page
        self._table_BP: torch.Tensor | None = None

    def step(
        self, rows: Callable[[], TableRows], lengths_B: torch.Tensor, table_BP: torch.Tensor
    ) -> tuple[EvictedLengths, torch.Tensor]:
        """The lengths and prompts of a step, and the pages of each request, of which as many are its own."""
        pages = table_BP.shape[1]
        if self._table_BP is None:
            self._table_BP = table_BP.new_zeros((self._shared.rows, pages))
        shortened = self._shared.lengths(self._blocks, self._page, rows, lengths_B, pages)
        count, used = shortened.entry_BP.shape
        self._table_BP[:count, :used] = table_BP.gather(1, shortened.entry_BP)
        return shortened, self._table_BP[:count]


def moves(blocks: EvictedBlocks, prompts: Sequence[int], pasts_B: np.ndarray) -> np.ndarray:
    """Where the blocks that a step reads are in each request's table, int64 [4, B], by its tokens before the step:
    block i of them is entry i before the first number, entry i + the third before the second, and entry i + the fourth
    behind. All are 0 where all are read."""
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


Pages = tuple[torch.Tensor, torch.Tensor]  # keys and values
_WARM_UP = "warm-up"  # no request, so that it is forgotten by the first one


class Saved(NamedTuple):
    """Queries of earlier chunks, and the tokens up to them."""

    queries: Observed
    end: int


class EvictingHost:
    """The layers of a plan that evict tokens, in one worker of an engine. `copy` gives a request's first tokens
    contiguously, until the next copy."""

    def __init__(
        self, backend: str, fallback: Fallback, copy: Callable[..., KeyView], rows: int,
        gather: Gather | None,
    ) -> None:  # fmt: skip
        self.requests = Requests()
        self.tables = StepTables(self.requests, rows)
        self._backend, self._fallback, self._copy, self._gather = backend, fallback, copy, gather
        self._saved: dict[str, dict[int, Saved]] = {}

    def observe(
        self, layer: LayerProgram, rows: PromptRows, new: Observed, pages: Pages, table_P: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:  # fmt: skip
        """Rows of a prompt have attended; pages are the layer's, [N, G, S, D] each. At its end the layer evicts."""
        seen = _rule(layer).observe or 0
        self._saved = {name: saved for name, saved in self._saved.items() if self.requests.knows(name)}
        saved = self._saved.get(rows.name, {}).pop(layer.layer, None)
        older = saved.queries if saved and saved.end == rows.past else None
        if rows.end == rows.prompt:
            observed = new.before(older, seen)
            self._evict(layer, rows, observed, pages, table_P, scales)
        else:
            wanted = seen - (rows.prompt - rows.end)
            if wanted > 0:
                self._save(rows.name, layer, new.before(older, wanted), rows.end)

    def _save(self, name: str, layer: LayerProgram, queries: Observed, end: int) -> None:
        copied = Observed(queries.q_BHWD.clone(), queries.scale, queries.softmax)
        self._saved.setdefault(name, {})[layer.layer] = Saved(copied, end)

    def _evict(
        self, layer: LayerProgram, rows: PromptRows, observed: Observed, pages: Pages, table_P: torch.Tensor,
        scales: Scales | None,
    ) -> None:  # fmt: skip
        keys = self._copy(pages, table_P, rows.prompt, scales)
        rows_1gK = self._choose(layer, rows.prompt, observed, keys, rows.blocks)
        if rows_1gK is not None:
            if scales is not None:
                keys = self._copy(pages, table_P, rows.prompt)  # the bytes move as they are
            move((keys.k[0], keys.v[0]), rows_1gK[0], pages, table_P, rows.prompt % rows.blocks.block)

    def _choose(
        self, layer: LayerProgram, prompt: int, observed: Observed, keys: KeyView, blocks: EvictedBlocks
    ) -> torch.Tensor | None:
        rule = blocks.rule(_rule(layer), prompt)

        def call(backend: str) -> torch.Tensor | None:
            where: dict[str, Any] = {"layer": layer.layer, "backend": backend, "gather": self._gather}
            return rows_to_cache(rule, prompt, observed, keys.k, keys.v, **where)

        if self._gather is not None:  # one that went on alone would leave the others waiting: all end
            return call(self._backend)
        return self._fallback.decode(call, self._backend, keys.k.device)

    def warm_up(self, layer: LayerProgram, observed: Observed, keys: KeyView) -> None:
        """Chooses among these keys, so that kernels are compiled and the engine measures their memory; the queries of
        one prompt are saved until the first step."""
        self._choose(layer, keys.k.shape[2], observed, keys, EvictedBlocks.of(_rule(layer), 1))
        self._save(_WARM_UP, layer, observed, 0)


def _rule(layer: LayerProgram) -> Eviction:
    assert layer.role.evicts is not None
    return layer.role.evicts


def move(keys: Pages, rows_gK: torch.Tensor, pages: Pages, table_P: torch.Tensor, shared: int) -> None:
    """Copies the rows of a complete prompt that stay to its first blocks, the last ones to the block of its end.

    Args:
        keys: keys and values of the prompt, [G, S, D] each, contiguous.
        rows_gK: int64 ascending, of each KV head or for all.
        shared: tokens of the prompt in the block of its end, unless it fills it.
    """
    if table_P.is_cuda:
        from sparsekv.kernels.pages import move_rows  # it loads Triton

        return move_rows(keys, rows_gK, pages, table_P, shared)
    (_, length, size), count, page = keys[0].shape, rows_gK.shape[1], pages[0].shape[2]
    place_K = torch.arange(count, device=table_P.device)
    place_K[count - shared :] += length - count
    pages_K = table_P.long()[place_K // page]
    for x_GSD, into_NGSD in zip(keys, pages, strict=True):
        taken_GKD = x_GSD.gather(1, rows_gK[..., None].expand(len(x_GSD), -1, size))
        into_NGSD[pages_K, :, place_K % page] = taken_GKD.transpose(0, 1)
