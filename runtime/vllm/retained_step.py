"""Layers that drop tokens, in a step of an engine: which blocks their kernels read, and what happens at the end of a
prompt.

Shapes: B requests of a step, P pages of a request, T rows of a step, N pages in memory, G KV heads, H query heads, S
tokens of a page, W observed queries, K kept tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.retention import Observed, kept_rows
from sparsekv.runtime.core.state import Gather
from sparsekv.runtime.vllm.kept_blocks import UNMOVED, KeptBlocks, Moves
from sparsekv.runtime.vllm.request_lengths import Requests

Pages = tuple[torch.Tensor, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Writes keys and values, [K, G, D] each, to slots, int64 [K]."""

_WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request that belong to its prompt, where their queries are observed."""

    name: str
    request: int  # its row in the block table
    tokens: slice  # its rows among those of the step
    past: int
    prompt: int  # tokens of the prompt
    kept: KeptBlocks  # of it

    @property
    def end(self) -> int:
        """Tokens of the prompt behind these rows."""
        return self.past + self.tokens.stop - self.tokens.start


class KeptStep(NamedTuple):
    """What the layers of a group read in a step."""

    lengths_B: torch.Tensor  # int32, tokens of each request
    lengths: list[int]
    table_BP: torch.Tensor  # their pages
    shortened: list[bool]  # whether it lacks tokens of the request
    prompts: tuple[PromptRows, ...]  # whose queries are observed


class Saved(NamedTuple):
    """Queries of earlier chunks, and the tokens up to them."""

    queries: Observed
    end: int


class RetentionHost:
    """The layers of a plan that drop tokens, in one worker of an engine.

    Args:
        backend: of the kernels.
        fallback: should they fail.
        copy: gives the first tokens of a request contiguously, until the next copy; see `Scratch`.
        rows: of a step, at most.
        gather: over the ranks whose heads choose together.
    """

    def __init__(
        self, backend: str, fallback: Fallback, copy: Callable[[Pages, torch.Tensor, int], Any], rows: int,
        gather: Gather | None,
    ) -> None:  # fmt: skip
        self.requests = Requests()
        self.most_rows = rows
        self._backend, self._fallback, self._copy, self._gather = backend, fallback, copy, gather
        self._saved: dict[str, dict[int, Saved]] = {}

    def forget(self) -> None:
        """Lets go of what was saved of requests that finished."""
        self._saved.pop(_WARM_UP, None)
        while self.requests.gone:
            self._saved.pop(self.requests.gone.pop(), None)

    def observe(
        self, layer: LayerProgram, rows: PromptRows, new: Observed, pages: Pages, table_P: torch.Tensor, write: Write
    ) -> None:
        """Rows of a prompt have attended. At its end the layer drops what it does not keep.

        Args:
            layer: of which they are.
            rows: that belong to the prompt.
            new: their queries.
            pages: the layer's keys and values, [N, G, S, D] each.
            table_P: the request's pages.
            write: puts rows into the pages.
        """
        assert layer.retains is not None
        assert layer.retains.observe is not None
        saved = self._saved.get(rows.name, {}).pop(layer.layer, None)
        older = saved.queries if saved and saved.end == rows.past else None
        if rows.end == rows.prompt:
            observed = new.before(older, layer.retains.observe)
            self._drop(layer, rows, observed, pages, table_P, write)
        else:
            wanted = layer.retains.observe - (rows.prompt - rows.end)
            if wanted > 0:
                newest = new.before(older, wanted)
                copied = Observed(newest.q_BHWD.clone(), newest.scale, newest.softmax)
                self._saved.setdefault(rows.name, {})[layer.layer] = Saved(copied, rows.end)

    def _drop(
        self, layer: LayerProgram, rows: PromptRows, observed: Observed, pages: Pages, table_P: torch.Tensor,
        write: Write,
    ) -> None:  # fmt: skip
        keys = self._copy(pages, table_P, rows.prompt)
        rows_1gK = self._choose(layer, rows.prompt, observed, keys.k, rows.kept)
        if rows_1gK is None:
            return
        k_KGD, v_KGD = (x_1GKD.gather(2, _rows_of(rows_1gK, x_1GKD))[0].transpose(0, 1) for x_1GKD in (keys.k, keys.v))
        write(k_KGD.contiguous(), v_KGD.contiguous(), _slots(rows.kept, rows.prompt, table_P, pages[0].shape[2]))

    def _choose(
        self, layer: LayerProgram, prompt: int, observed: Observed, k_1GKD: torch.Tensor, kept: KeptBlocks
    ) -> torch.Tensor | None:
        assert layer.retains is not None
        rule = kept.rule(layer.retains, prompt)

        def call(backend: str) -> torch.Tensor | None:
            return kept_rows(rule, prompt, observed, k_1GKD, backend=backend, gather=self._gather)

        return self._fallback.decode(call, self._backend, k_1GKD.device)

    def warm_up(self, layer: LayerProgram, observed: Observed, k_1GKD: torch.Tensor) -> None:
        """Chooses among these keys, so that kernels are compiled and memory is taken where the engine measures it; the
        queries of one prompt are saved until the first step.

        Args:
            layer: that drops tokens.
            observed: the last queries.
            k_1GKD: of the longest prompt.
        """
        assert layer.retains is not None
        length = k_1GKD.shape[2]
        kept = KeptBlocks.of(layer.retains, 1)
        if kept.dropped(length):
            self._choose(layer, length, observed, k_1GKD, kept)
        copied = Observed(observed.q_BHWD.clone(), observed.scale, observed.softmax)
        self._saved.setdefault(_WARM_UP, {})[layer.layer] = Saved(copied, 0)


def _rows_of(rows_1gK: torch.Tensor, x_1GKD: torch.Tensor) -> torch.Tensor:
    return rows_1gK[..., None].expand(-1, x_1GKD.shape[1], -1, x_1GKD.shape[3])


def _slots(kept: KeptBlocks, prompt: int, table_P: torch.Tensor, page: int) -> torch.Tensor:
    """Where the kept tokens of a complete prompt lie: in its first blocks, then in the block of its end."""
    device, shared = table_P.device, prompt % kept.block
    first_K = torch.arange(kept.kept(prompt) - shared, device=device)
    place_K = torch.cat((first_K, torch.arange(prompt - shared, prompt, device=device)))
    return table_P.long()[place_K // page] * page + place_K % page


class KeptTables:
    """The lengths and block tables that the kernels of a group's layers read: without the blocks that are freed. At
    fixed addresses, as graphs read them.

    Args:
        kept: of each layer of the group.
        host: of the engine.
        page: tokens of a page, as kernels see it: a block, or a part of one.
        device: of the engine.
    """

    def __init__(self, kept: KeptBlocks, host: RetentionHost, page: int, device: torch.device) -> None:
        self.kept, self.host = kept, host
        self._page, self._per_block = page, kept.block // page
        self._lengths_B = torch.zeros(host.most_rows, dtype=torch.int32, device=device)
        self._table_BP: torch.Tensor | None = None

    def step(
        self, starts: Sequence[int], lengths: Sequence[int], lengths_B: torch.Tensor, table_BP: torch.Tensor
    ) -> KeptStep:
        """What the layers of the group read in a step.

        Args:
            starts: the first row of each request, then the end of the last one.
            lengths: tokens of each request, the new ones included; padding may follow.
            lengths_B: the same, on the device.
            table_BP: their pages.
        """
        self.host.forget()
        requests = self.host.requests.rows
        counts = [end - first for first, end in pairwise(starts)]
        pasts = [length - count for length, count in zip(lengths, counts, strict=True)]
        moves = [self.kept.moves(prompt, past) for (_, prompt), past in zip(requests, pasts, strict=False)]
        moves += [UNMOVED] * (len(lengths) - len(moves))
        shorter = [length - move.skipped * self.kept.block for length, move in zip(lengths, moves, strict=True)]
        lengths_B, table_BP = self._write(moves, max(shorter), lengths_B, table_BP)
        prompts = tuple(self._prompts(requests, starts, pasts))
        return KeptStep(lengths_B, shorter, table_BP, [move.skipped > 0 for move in moves], prompts)

    def _prompts(
        self, requests: Sequence[tuple[str, int]], starts: Sequence[int], pasts: Sequence[int]
    ) -> Iterator[PromptRows]:
        for request, ((name, prompt), past) in enumerate(zip(requests, pasts, strict=False)):
            first, end = starts[request : request + 2]
            if past < prompt and self.kept.dropped(prompt):
                yield PromptRows(name, request, slice(first, min(end, first + prompt - past)), past, prompt, self.kept)

    def _write(
        self, moves: Sequence[Moves], longest: int, lengths_B: torch.Tensor, table_BP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, pages = table_BP.shape
        if self._table_BP is None:
            self._table_BP = table_BP.new_zeros((self.host.most_rows, pages))
        used = min(pages, max(1, -(-longest // self._page)))
        moves_4B1 = _to_device(moves, table_BP.device).T[..., None] * self._per_block
        front_B1, middle_B1, dropped_B1, skipped_B1 = moves_4B1
        at_P = torch.arange(used, device=table_BP.device)
        moved_BP = torch.where(at_P < middle_B1, dropped_B1, skipped_B1).masked_fill_(at_P < front_B1, 0)
        index_BP = (at_P + moved_BP).clamp_(max=pages - 1)
        self._table_BP[:rows, :used] = table_BP.gather(1, index_BP)
        torch.sub(lengths_B, skipped_B1[:, 0] * self._page, out=self._lengths_B[:rows])
        return self._lengths_B[:rows], self._table_BP[:rows]


def _to_device(moves: Sequence[Moves], device: torch.device) -> torch.Tensor:
    moves_B4 = torch.tensor(moves, dtype=torch.int64, device="cpu")
    return moves_B4.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else moves_B4
