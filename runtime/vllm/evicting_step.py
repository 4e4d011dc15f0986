"""Eviction of a prompt's tokens in an engine: its last queries are observed, and at its end the tokens that stay move
together.

Shapes: P pages of a request, N pages in memory, G KV heads, H query heads, S tokens of a page, W observed queries, K
cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import KeyView, Scales
from sparsekv.plans.phases import Retention
from sparsekv.runtime.core.eviction import rows_to_cache
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.state import Gather, Observed
from sparsekv.runtime.vllm.evicted_tables import EvictedBlocks, PromptRows, Requests, StepTables

Pages = tuple[torch.Tensor, torch.Tensor]  # keys and values
_WARM_UP = "warm-up"  # no request, so that it is forgotten by the first one


class Saved(NamedTuple):
    """Queries of earlier chunks, and the tokens up to them."""

    queries: Observed
    end: int


class EvictingHost:
    """The layers of a plan that evict tokens, in one worker of an engine.

    Args:
        copy: gives the first tokens of a request contiguously, until the next copy; see `Scratch`.
        rows: of a step, at most.
    """

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
        """Rows of a prompt have attended. At its end the layer evicts.

        Args:
            pages: the layer's keys and values, [N, G, S, D] each.
        """
        seen = _rule(layer).observe or 0
        self._forget()
        saved = self._saved.get(rows.name, {}).pop(layer.layer, None)
        older = saved.queries if saved and saved.end == rows.past else None
        if rows.end == rows.prompt:
            observed = new.before(older, seen)
            self._evict(layer, rows, observed, pages, table_P, scales)
        else:
            wanted = seen - (rows.prompt - rows.end)
            if wanted > 0:
                newest = new.before(older, wanted)
                copied = Observed(newest.q_BHWD.clone(), newest.scale, newest.softmax)
                self._saved.setdefault(rows.name, {})[layer.layer] = Saved(copied, rows.end)

    def _forget(self) -> None:
        for name in [name for name in self._saved if not self.requests.knows(name)]:
            del self._saved[name]

    def _evict(
        self, layer: LayerProgram, rows: PromptRows, observed: Observed, pages: Pages, table_P: torch.Tensor,
        scales: Scales | None,
    ) -> None:  # fmt: skip
        keys = self._copy(pages, table_P, rows.prompt, scales)
        rows_1gK = self._choose(layer, rows.prompt, observed, keys.k, rows.blocks)
        if rows_1gK is not None:
            if scales is not None:
                keys = self._copy(pages, table_P, rows.prompt)  # the bytes move as they are
            move((keys.k[0], keys.v[0]), rows_1gK[0], pages, table_P, rows.prompt % rows.blocks.block)

    def _choose(
        self, layer: LayerProgram, prompt: int, observed: Observed, k_1GKD: torch.Tensor, blocks: EvictedBlocks
    ) -> torch.Tensor | None:
        rule = blocks.rule(_rule(layer), prompt)

        def call(backend: str) -> torch.Tensor | None:
            return rows_to_cache(rule, prompt, observed, k_1GKD, backend=backend, gather=self._gather)

        if self._gather is not None:  # one that went on alone would leave the others waiting: all end
            return call(self._backend)
        return self._fallback.decode(call, self._backend, k_1GKD.device)

    def warm_up(self, layer: LayerProgram, observed: Observed, keys: KeyView) -> None:
        """Chooses among these keys, so that kernels are compiled and memory is taken where the engine measures it; the
        queries of one prompt are saved until the first step.
        """
        self._choose(layer, keys.k.shape[2], observed, keys.k, EvictedBlocks.of(_rule(layer), 1))
        copied = Observed(observed.q_BHWD.clone(), observed.scale, observed.softmax)
        self._saved.setdefault(_WARM_UP, {})[layer.layer] = Saved(copied, 0)


def _rule(layer: LayerProgram) -> Retention:
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
