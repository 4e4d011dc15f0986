"""What layers that drop tokens do with a prompt in an engine: its last queries are observed, and at its end what is
kept moves together.

Shapes: P pages of a request, N pages in memory, G KV heads, H query heads, S tokens of a page, W observed queries, K
kept tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.retention import Observed, kept_rows
from sparsekv.runtime.core.state import Gather
from sparsekv.runtime.vllm.kept_blocks import KeptBlocks
from sparsekv.runtime.vllm.kept_tables import PromptRows, StepTables
from sparsekv.runtime.vllm.request_lengths import Requests

Pages = tuple[torch.Tensor, torch.Tensor]  # keys and values
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Writes keys and values, [K, G, D] each, to slots, int64 [K]."""

_WARM_UP = "warm-up"  # no request, so that it is forgotten by the first one


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
        self, backend: str, fallback: Fallback, copy: Callable[[Pages, torch.Tensor, int], KeyView], rows: int,
        gather: Gather | None,
    ) -> None:  # fmt: skip
        self.requests = Requests()
        self.tables = StepTables(self.requests, rows)
        self._backend, self._fallback, self._copy, self._gather = backend, fallback, copy, gather
        self._saved: dict[str, dict[int, Saved]] = {}

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
        self._forget()
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

    def _forget(self) -> None:
        for name in [name for name in self._saved if not self.requests.knows(name)]:
            del self._saved[name]

    def _drop(
        self, layer: LayerProgram, rows: PromptRows, observed: Observed, pages: Pages, table_P: torch.Tensor,
        write: Write,
    ) -> None:  # fmt: skip
        keys = self._copy(pages, table_P, rows.prompt)
        rows_1gK = self._choose(layer, rows.prompt, observed, keys.k, rows.kept)
        if rows_1gK is None:
            return
        write(*_taken(keys, rows_1gK), _slots(rows.kept, rows.prompt, table_P, pages[0].shape[2]))

    def _choose(
        self, layer: LayerProgram, prompt: int, observed: Observed, k_1GKD: torch.Tensor, kept: KeptBlocks
    ) -> torch.Tensor | None:
        assert layer.retains is not None
        rule = kept.rule(layer.retains, prompt)

        def call(backend: str) -> torch.Tensor | None:
            return kept_rows(rule, prompt, observed, k_1GKD, backend=backend, gather=self._gather)

        return self._fallback.decode(call, self._backend, k_1GKD.device)

    def warm_up(self, layer: LayerProgram, observed: Observed, keys: KeyView) -> None:
        """Chooses among these keys and takes them, so that kernels are compiled and memory is taken where the engine
        measures it; the queries of one prompt are saved until the first step.

        Args:
            layer: that drops tokens.
            observed: the last queries.
            keys: of the longest prompt.
        """
        assert layer.retains is not None
        length = keys.k.shape[2]
        rows_1gK = self._choose(layer, length, observed, keys.k, KeptBlocks.of(layer.retains, 1))
        if rows_1gK is not None:
            _taken(keys, rows_1gK)
        copied = Observed(observed.q_BHWD.clone(), observed.scale, observed.softmax)
        self._saved.setdefault(_WARM_UP, {})[layer.layer] = Saved(copied, 0)


def _taken(keys: KeyView, rows_1gK: torch.Tensor) -> Pages:
    """[K, G, D] each: keys and values."""
    k_KGD, v_KGD = (x.gather(2, _rows_of(rows_1gK, x))[0].transpose(0, 1).contiguous() for x in (keys.k, keys.v))
    return k_KGD, v_KGD


def _rows_of(rows_1gK: torch.Tensor, x_1GKD: torch.Tensor) -> torch.Tensor:
    return rows_1gK[..., None].expand(-1, x_1GKD.shape[1], -1, x_1GKD.shape[3])


def _slots(kept: KeptBlocks, prompt: int, table_P: torch.Tensor, page: int) -> torch.Tensor:
    """Where the kept tokens of a complete prompt lie: in its first blocks, then in the block of its end."""
    device, shared = table_P.device, prompt % kept.block
    first_K = torch.arange(kept.kept(prompt) - shared, device=device)
    place_K = torch.cat((first_K, torch.arange(prompt - shared, prompt, device=device)))
    return table_P.long()[place_K // page] * page + place_K % page
