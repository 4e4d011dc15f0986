"""A plan in an engine: what its layers compute, its decode phase, and the scratch that a request's past is copied into.

Shapes: G KV heads, H query heads, T rows of a request's chunk, N pages in memory, S tokens of a page, P pages of a
request, K tokens of a request, D head size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from sparsekv.kernels.backends import Fallback, is_backend_failure
from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, Softmax, full_view
from sparsekv.kernels.tiles import LEAST_SAMPLED, SAMPLED_PART, Chunk
from sparsekv.plans.patterns import TileShape, VerticalSlash
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.timed_layers import Place
from sparsekv.runtime.paged.captured_prefill import CapturedPrefill
from sparsekv.runtime.paged.metrics import Counters, publish
from sparsekv.runtime.paged.step_rows import DecodeHost, PrefillRows


class Scratch:
    """One request's keys and values, contiguous: memory for the longest request's tokens, of at most so many numbers
    each, used by all layers in turn."""

    def __init__(self, tokens: int, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._k, self._v = torch.empty(2, tokens * numbers, dtype=dtype, device=device).unbind()

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        return self._k.dtype, self._k.device

    @property
    def bytes(self) -> int:
        return 2 * self._k.nbytes

    def copy(
        self, pages: tuple[torch.Tensor, torch.Tensor], table_P: torch.Tensor, length: int, scales: Scales | None = None
    ) -> KeyView:
        """The first `length` tokens of a request, until the next copy.

        Args:
            pages: keys and values, [N, G, S, D] each, of any strides.
            table_P: the request's pages; entries behind its end may hold anything.
            scales: of pages in e4m3, which are multiplied; without them they are copied as they are.
        """
        _, heads, page, size = pages[0].shape
        used_P = table_P[: -(-length // page)]
        into_GKD = self.views((heads, length, size), pages[0].dtype if scales is None else self._k.dtype)
        by = None if scales is None else (scales.k_G, scales.v_G)
        if by is not None:
            pages = pages[0].view(FLOAT8), pages[1].view(FLOAT8)
        if used_P.is_cuda:
            from sparsekv.kernels.pages import copy_pages  # it loads Triton

            copy_pages(pages, used_P, into_GKD, by)
        else:
            for x_NGSD, into in zip(pages, into_GKD, strict=True):  # index_select would copy the whole cache
                into.copy_(x_NGSD.transpose(0, 1)[:, used_P.long()].flatten(1, 2)[:, :length])
            for into, scale_G in zip(into_GKD, by or (), strict=False):
                into.mul_(scale_G[:, None, None])
        k_GKD, v_GKD = into_GKD
        return full_view(k_GKD[None], v_GKD[None])

    def zeros(self, heads: int, size: int, length: int) -> KeyView:
        """Keys and values that are all 0, until the next copy."""
        k_GKD, v_GKD = self.views((heads, length, size), self._k.dtype)
        return full_view(k_GKD.zero_()[None], v_GKD.zero_()[None])

    def views(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = math.prod(shape)
        return self._k.view(dtype)[:numbers].view(shape), self._v.view(dtype)[:numbers].view(shape)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """The arguments of a layer's attention in a step."""

    queries: Callable[[slice], torch.Tensor]  # [T, H, D] of some rows, as they attend
    new: tuple[torch.Tensor | None, torch.Tensor | None]  # keys and values of the step, [T, G, D], where they are given
    pages: tuple[torch.Tensor, torch.Tensor]  # [N, G, S, D] each
    table_BP: torch.Tensor
    scale: float
    softmax: Softmax
    scales: Scales | None  # of a cache in 8 bits


class PlanHost:
    """A plan at work in one worker of an engine; all layers share it.

    Args:
        backend: of prefill; another one follows should it fail.
        scratch: for requests with a past.
        drafted: tokens that others draft at a time.
    """

    engine: Any  # with the names that timed_kernels.py calls
    model: str  # fingerprint of its architecture
    place: Place
    holds_dense = False  # whether decode steps are captured a second time, without our kernels
    kernel: Mapping[str, int] = MappingProxyType({})  # settings of the engine's kernel, for its `attention`
    program_us = 0.0  # microseconds of the engine's program from the attention of one layer to that of the next

    def __init__(self, program: Program, backend: str, scratch: Scratch, longest: int, drafted: int = 0) -> None:
        self.program = program
        self.decoded = 1 + drafted  # rows of a request in a step at most
        self.scratch = scratch
        self.decode: DecodeHost | None = None  # where the plan has a sparse one
        self.captured: CapturedPrefill | None = None  # where the engine's GPU runs graphs of it
        self.drafts = False  # whether decode of the plan only drafts, and a dense pass checks
        self.pays = program.hint  # until it is measured
        self.counters = Counters()
        self.longest = longest
        self.fallback = Fallback(backend)
        self._missing = len(program.attending)
        self._warm: set[tuple[object, ...]] = set()
        self._failures: set[type[Exception]] = set()

    @property
    def queries(self) -> int:
        """Rows of a request that decode by the plan in a step at most: those that are verified are each a step."""
        return 1 if self.drafts else self.decoded

    @property
    def phases(self) -> str:
        evicting = format_ids(self.program.evicting)
        phases = "prefill" if self.decode is None else "prefill and decode"
        if self.drafts:
            phases = f"drafts of {self.decoded - 1} tokens, verified by dense attention"
        return f"{phases}, layers {evicting} evict tokens" if evicting else phases

    def takes_layer(self) -> bool:
        """Counts one more attention layer of the engine; returns whether it is the model's own and not a drafter's."""
        self._missing -= 1
        return self._missing >= 0

    @property
    def backend(self) -> str:
        return self.fallback.backend

    def is_sparse(self, chunk: Chunk) -> bool:
        """Returns whether any layer prefills this chunk sparse, and that pays here."""
        pays = self.pays.prefill.pays(max(chunk.rows), chunk.longest)
        return pays and any(layer.patterns_at(chunk.longest) for layer in self.program.layers)

    def paying(self, prefill: Sequence[PrefillRows], counted: bool = True) -> tuple[PrefillRows, ...]:
        """The chunks of a step that are sparse; counts the tokens of all."""
        sparse = tuple(rows for rows in prefill if self.is_sparse(rows.chunk))
        if counted:
            of_sparse = sum(rows.chunk.rows[0] for rows in sparse)
            self.counters.sparse_tokens += of_sparse
            self.counters.dense_tokens += sum(rows.chunk.rows[0] for rows in prefill) - of_sparse
        return sparse

    def attend_chunks(
        self, layer: LayerProgram, step: LayerStep, prefill: Sequence[PrefillRows], out_THD: torch.Tensor
    ) -> frozenset[int]:
        """Computes those of a step's chunks that the plan runs sparse in this layer; which requests that were."""
        done = set()
        for rows in prefill:
            if layer.patterns_at(rows.chunk.longest):
                try:
                    out_THD[rows.tokens] = self._attend_chunk(layer, step, rows)
                    done.add(rows.request)
                    continue
                except Exception as error:
                    if not is_backend_failure(error, out_THD.device):
                        raise
                    if self._count_failure(error):  # one request must not end the engine, and with it all others
                        what = "sparsekv: prefill by %s failed, such chunks run dense"
                        self.engine.logger.warning(what, self.backend, exc_info=error)
            self.count_dense((layer,), rows.chunk)
        return frozenset(done)

    def _attend_chunk(self, layer: LayerProgram, step: LayerStep, rows: PrefillRows) -> torch.Tensor:
        chunk, (k_TGD, v_TGD), table_P = rows.chunk, step.new, step.table_BP[rows.request]
        q_THD, by = step.queries(rows.tokens), (step.scale, step.softmax, self.counters.meter, step.scales)
        if self.captured is not None and layer.role.evicts is None:
            attended = self.captured.attend(rows, layer, q_THD, step.pages, table_P, chunk, *by)
            if attended is not None:
                return attended
        if chunk.past[0] == 0 and step.scales is None and k_TGD is not None and v_TGD is not None:
            keys = full_view(*(x_TGD[rows.tokens].transpose(0, 1)[None] for x_TGD in (k_TGD, v_TGD)))
        else:  # new ones of a cache in 8 bits are read back, as answers would depend on the cut else
            keys = self.scratch.copy(step.pages, table_P, chunk.longest, step.scales)
        return self.prefill(layer, q_THD, replace(keys, softmax=step.softmax), chunk, step.scale)

    def prefill(
        self, layer: LayerProgram, q_THD: torch.Tensor, keys: KeyView, chunk: Chunk, scale: float, counted: bool = True
    ) -> torch.Tensor:
        """[T, H, D]: attention of one request's chunk by the plan, over all of its keys so far. Query tiles count from
        the chunk's first row, and patterns are estimated from its own last queries, so that any cut of a prompt runs
        sparse where that pays."""
        q_BHTD, meter = q_THD.transpose(0, 1)[None], self.counters.meter if counted else None
        out_BHTD = prefill(layer, q_BHTD, keys, chunk, scale=scale, fallback=self.fallback, meter=meter)
        return out_BHTD[0].transpose(0, 1)

    def warm_up(self, layer: LayerProgram, q_THD: torch.Tensor, softmax: Softmax, scale: float) -> None:
        """Runs a layer on chunks of these queries, as many as a step can have and fewer, at both ends of each bucket:
        kernels are compiled before anybody waits for them, and the engine measures the memory that they take. What was
        compiled before is skipped: families of patterns, about as many sampled queries, heads of this number and size,
        within a window or without."""
        most, fewest = len(q_THD), SAMPLED_PART * LEAST_SAMPLED  # chunks of fewer sample fewer
        bounds = {0, self.longest, *(bound for bound in (*layer.bounds, layer.window or 0) if bound < self.longest)}
        for before, end in reversed(tuple(pairwise(sorted(bounds)))):
            behind = ((max(1, min(rows, end // 2)), end) for rows in (2 * fewest, fewest))
            for wanted, length in ((most, end), (most, min(end, max(before + 1, most))), *behind):
                rows, patterns = min(wanted, most, length), layer.patterns_at(length)
                chunk = Chunk.uniform(1, length - rows, length)
                (sampled,) = chunk.sampled(max((x.last_q for x in patterns if isinstance(x, VerticalSlash)), default=1))
                kind = frozenset(pattern.pattern for pattern in patterns), (sampled - 1).bit_length()
                launched = *kind, layer.window and layer.window < length, layer.kv_heads, *q_THD.shape[1:]
                if patterns and launched not in self._warm:
                    self._warm.add(launched)
                    keys = replace(self.scratch.zeros(layer.kv_heads, q_THD.shape[-1], length), softmax=softmax)
                    self.prefill(layer, q_THD[:rows], keys, chunk, 1.0, counted=False)

    def _count_failure(self, error: Exception) -> bool:
        """Counts a chunk that runs dense as its backend failed; whether the error is the first of its kind."""
        self.counters.failures += 1
        is_new = type(error) not in self._failures
        self._failures.add(type(error))
        return is_new

    def report(self, prefilling: bool) -> None:
        """Tells the counts of the steps before, where it is time for that."""
        new = self.counters.report(time.monotonic(), prefilling)
        if new is not None and self.program.rank.index == 0:  # the others count the same
            self.engine.logger.info("sparsekv: %s", new)
            publish(new, self.pays)

    def count_dense(self, layers: Sequence[LayerProgram], chunk: Chunk) -> None:
        """Counts a chunk that the engine's own kernel computes in these layers, which have the tile of the plan."""
        tiles = (layer.heads * chunk.causal_tiles(layer.tile, layer.window) for layer in layers)
        self.counters.meter.add_dense_prefill(sum(tiles))


def merged(layers: Iterable[LayerProgram]) -> tuple[LayerProgram, ...]:
    """One layer with the heads of all that compute the same tiles where they are dense."""
    kinds: dict[tuple[TileShape, int | None], LayerProgram] = {}
    for layer in layers:
        before = kinds.get(kind := (layer.tile, layer.window))
        kinds[kind] = replace(layer, heads=layer.heads + (before.heads if before else 0))
    return tuple(kinds.values())
