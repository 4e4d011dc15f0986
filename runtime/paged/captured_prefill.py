"""Sparse prefill of a request's chunk as CUDA graphs, one a layer: what the program does for an index and its attention
takes longer than the GPU needs for a small model, or for a short turn behind a long past.

A graph serves every chunk up to a size: it was captured for the largest one (`AnyChunk`), and reads past, length, pages
and budgets where they are put once a chunk. The first chunk of a size is launched, the second captured in each layer.

Shapes: T rows of a chunk, H query heads, G KV heads, D head size, N pages in memory, S tokens of a page, P pages of a
request, h vertical-slash heads of a layer.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from sparsekv.kernels.backends import BackendWarning, Fallback, prefill_attention, summary
from sparsekv.kernels.device_cache import holding
from sparsekv.kernels.index.build import build_index, builds_by_triton, groups_of
from sparsekv.kernels.index.layout import FamilyHeads, IndexLayout
from sparsekv.kernels.keys import FLOAT8, Scales, Softmax
from sparsekv.kernels.tiles import LEAST_SAMPLED, AnyChunk, Chunk, spent_tiles
from sparsekv.plans.errors import BackendError
from sparsekv.plans.patterns import Dense, Pattern, VerticalSlash
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.stats import Meter

# Numbers of the queries of a chunk at most: beyond, the GPU takes longer than the program. 8K rows of 32 heads of 64.
MOST_NUMBERS = 1 << 24
_SMALLEST = 1024  # rows and keys of a graph at least
_TILE = 128
_ALIGNED = 4  # int32 numbers of 16 bytes
_SPARE = 1 << 30  # bytes of the device that graphs leave alone
_BACKENDS = ("flash", "triton")
_MOST_PREPARED = 64  # chunks of a step

Pages = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[tuple[int, ...], tuple[Any, ...]]
"""Heads of one family, and their patterns."""
Views = Callable[[tuple[int, int, int], torch.dtype], Pages]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Budgets of the vertical-slash heads of all layers, and what they come to in a chunk."""

    share_3h: torch.Tensor  # float64: columns, slashes, tokens of a row's tiles; 0 where tokens are given
    tokens_3h: torch.Tensor  # float64
    sampled_h: torch.Tensor  # int64
    at: Mapping[Heads, slice]

    @classmethod
    def of(cls, groups: Sequence[FamilyHeads]) -> Budgets:
        at, end = dict[Heads, slice](), 0
        for group in groups:
            at[group.named] = slice(end, end + len(group.heads))
            end += -(-len(group.heads) // _ALIGNED) * _ALIGNED
        share_3h, tokens_3h = torch.zeros(2, 3, end, dtype=torch.float64, device="cpu")
        sampled_h = torch.zeros(end, dtype=torch.int64, device="cpu")
        host_numbers = partial(torch.tensor, dtype=torch.float64, device="cpu")
        for (_, patterns), own in at.items():
            given = [(pattern.vertical, pattern.slash, pattern.max_tiles) for pattern in patterns]
            share_3h[:, own] = host_numbers([[x.fraction or 0.0 for x in row] for row in given]).T
            tokens_3h[:, own] = host_numbers([[x.tokens or 0 for x in row] for row in given]).T
            sampled_h[own] = host_numbers([pattern.last_q for pattern in patterns]).long()
        return cls(share_3h, tokens_3h, sampled_h, at)

    @property
    def most_sampled(self) -> int:
        return int(self.sampled_h.max())

    def in_chunk(self, layout: IndexLayout) -> torch.Tensor:
        """int32 [4, h], as `AnyChunk` has them; the numbers are those of `Budget.resolve` and `tile_bounds`."""
        length, (phase,) = layout.chunk.longest, layout.phases
        most_3h = torch.where(self.share_3h > 0, torch.ceil(self.share_3h * length - 1e-9), self.tokens_3h)
        columns_h, slashes_h, tiles_h = most_3h.clamp_(max=length).long()
        tiles_h = ((tiles_h + layout.tile.key - 1) // layout.tile.key).clamp_(min=layout.mandatory_tiles(phase))
        sampled_h = self.sampled_h.clamp(max=layout.chunk.sampled(self.most_sampled)[0])
        return torch.stack((sampled_h, columns_h, slashes_h, tiles_h)).int()


@dataclass(slots=True)
class _Size:
    """All chunks of up to so many rows and keys."""

    chunk: AnyChunk
    chunks: int = 0  # so far


@dataclass(frozen=True, slots=True)
class _Prepared:
    name: object
    size: _Size
    state: torch.Tensor | None  # what its graphs read; None for the first chunk of a size


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    spent_BH: torch.Tensor
    patterns: tuple[Pattern, ...]  # whose identity is a part of the graph's name


class CapturedPrefill:
    """The graphs of one engine. All layers have the same numbers of heads, and use the same memory in turn.

    Args:
        layers: those that prefill sparse, which `takes` accepts.
        fallback: the backend that launches run by; a graph keeps the one that it was captured by.
        views: gives memory for keys and values of a shape, the same for all layers: `memory_of(longest)` tokens.
        rows: of a chunk at most.
        longest: tokens of a request at most.
        page: tokens of a page at least.
    """

    def __init__(
        self, layers: Sequence[LayerProgram], fallback: Fallback, views: Views, head_dim: int, rows: int, longest: int,
        page: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._fallback, self._views, self._device, first = fallback, views, device, layers[0]
        self._made_for = rows, longest, page
        self._tile, self._dtype, self._most_keys = first.tile, dtype, memory_of(longest)
        self._rows = min(_rounded(rows), MOST_NUMBERS // (first.heads * head_dim), self._most_keys) // _TILE * _TILE
        self._layout = IndexLayout(
            Chunk((0,), (1,)), first.tile, None, 1, first.heads, first.kv_heads, rows, head_dim, dtype, device
        )
        shape = (2, self._rows, first.heads, head_dim)
        self._q_1HTD, self._out_1HTD = torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)[:, None].unbind()
        patterns = chain.from_iterable(layer.patterns for layer in layers)
        kinds = (group for row in patterns if row for group in groups_of(row) if group.kind is VerticalSlash)
        self._budgets = Budgets.of(tuple(dict.fromkeys(kinds)))
        # What graphs read: past, length, budgets and pages, one after another.
        self._sizes_of_state = (2 * _ALIGNED, 4 * len(self._budgets.sampled_h), -(-self._most_keys // page))
        self._state = torch.zeros(sum(self._sizes_of_state), dtype=torch.int32, device=device)
        self._numbers, budgets, self._table_P = self._state.split_with_sizes(self._sizes_of_state)
        self._budgets_4h = budgets.view(4, -1)
        self._sizes: dict[tuple[int, int, int], _Size] = {}
        self._prepared: OrderedDict[int, _Prepared] = OrderedDict()  # chunks of a step, by the identity of their names
        self._now: object = None
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._held: dict[object, object] = {}
        self._pool: Any = None  # of memory that all graphs use in turn
        self._stream: Any = None
        self.failed = ""  # the reason why no more is captured

    @staticmethod
    def takes(layers: Sequence[LayerProgram], device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Returns whether layers of a plan can be captured: alike, without windows, of patterns whose indices Triton
        kernels build from numbers on the device; and gain by it, as some chunk has few enough numbers."""
        alike = {(layer.tile, layer.heads, layer.kv_heads, layer.window) for layer in layers}
        if not builds_by_triton(device) or dtype not in (torch.float16, torch.bfloat16) or len(alike) != 1:
            return False
        from sparsekv.kernels.index.triton.sizes import LARGEST_HEAD, LARGEST_SAMPLE  # it loads Triton

        ((_, heads, _, window),) = alike
        every = {pattern for layer in layers for row in layer.patterns for pattern in row}
        sampled = max((pattern.last_q for pattern in every if isinstance(pattern, VerticalSlash)), default=0)
        is_small = head_dim <= LARGEST_HEAD and sampled <= LARGEST_SAMPLE
        is_small &= heads * head_dim * _SMALLEST <= MOST_NUMBERS
        return is_small and window is None and set(map(type, every)) <= {VerticalSlash, Dense}

    def warm_up(
        self, layer: LayerProgram, pages: Pages, scale: float, softmax: Softmax, scales: Scales | None = None
    ) -> None:
        """Compiles what graphs launch, for every number of sampled queries, by a chunk without tokens."""
        if pages[0].shape[2] * len(self._table_P) < self._most_keys:
            self._stop(f"expected larger pages, found those of {pages[0].shape[2]} tokens")
            return
        rows = min(_SMALLEST, self._rows)
        keys = min(rows + _TILE - 1, self._most_keys)
        patterns = next(row for row in layer.patterns if row)
        for sampled in _rounded_samples(self._budgets.most_sampled):
            try:
                self._compute(patterns, self._any_chunk(rows, keys, sampled), pages, scale, softmax, scales)
            except Exception as error:  # the engine runs without graphs
                self._stop(summary(error))
                return

    def alone(self, layer: LayerProgram) -> CapturedPrefill:
        """Graphs of another layer alone, like those of these layers."""
        size = self._layout.head_dim
        return CapturedPrefill((layer,), self._fallback, self._views, size, *self._made_for, self._dtype, self._device)

    def _stop(self, reason: str) -> None:
        self.failed = reason
        said = f"no further chunk runs as a graph ({reason}): launches take the program longer, results stay"
        warnings.warn(said, BackendWarning, stacklevel=3)

    def attend(
        self, name: object, layer: LayerProgram, q_THD: torch.Tensor, pages: Pages, table_P: torch.Tensor, chunk: Chunk,
        scale: float, softmax: Softmax, meter: Meter, scales: Scales | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """[T, H, D]: attention of a chunk to a request's tokens so far, in memory that the next layer overwrites; None
        where it is not captured.

        Args:
            name: of the chunk; the same object for all of its layers.
            pages: keys and values, the chunk's included, [N, G, S, D] each, of any strides.
        """
        patterns, rows = layer.patterns_at(chunk.longest), q_THD.shape[0]
        if softmax.cap or not _TILE <= rows <= self._rows:
            return None
        prepared = self._prepared.get(id(name))
        if prepared is None or prepared.name is not name:
            prepared = self._prepare(name, chunk, table_P, pages[0].shape[2])
        if prepared.state is None:
            return None
        if name is not self._now:
            self._state.copy_(prepared.state)
            self._now = name
        size = prepared.size
        self._q_1HTD[0, :, :rows].copy_(q_THD.transpose(0, 1))
        key = (layer.layer, id(patterns), id(size), pages[0].data_ptr(), id(softmax), scale)
        graph = self._graphs.get(key)
        if graph is None:
            graph = None if self.failed else self._capture(patterns, size.chunk, pages, scale, softmax, scales)
            if graph is None:
                return None
            self._graphs[key] = graph
        graph.graph.replay()
        meter.add_sparse_prefill(graph.spent_BH.clone(), layer.heads * chunk.causal_tiles(layer.tile))
        return self._out_1HTD[0, :, :rows].transpose(0, 1)

    def _prepare(self, name: object, chunk: Chunk, table_P: torch.Tensor, page: int) -> _Prepared:
        (rows,), length = chunk.rows, chunk.longest
        (sampled,) = chunk.sampled(self._budgets.most_sampled)
        keys = min(_rounded(length) + _TILE - 1, self._most_keys)
        most = next(most for most in _rounded_samples(self._budgets.most_sampled) if sampled <= most)
        sizes = min(_rounded(rows), self._rows), keys, most
        size = self._sizes.get(sizes)
        if size is None:
            size = self._sizes[sizes] = _Size(self._any_chunk(*sizes))
        size.chunks += 1
        state = None
        if size.chunks > 1:
            state = torch.empty_like(self._state)
            known = sum(self._sizes_of_state[:2])
            numbers = torch.zeros(2, _ALIGNED, dtype=torch.int32, device="cpu")
            numbers[0, 0], numbers[1, 0] = chunk.past[0], length
            budgets_4h = self._budgets.in_chunk(replace(self._layout, chunk=chunk, queries=rows))
            state[:known].copy_(torch.cat((numbers.flatten(), budgets_4h.flatten())), non_blocking=True)
            used = -(-length // page)
            state[known : known + used].copy_(table_P[:used])
        prepared = self._prepared[id(name)] = _Prepared(name, size, state)
        while len(self._prepared) > _MOST_PREPARED:
            self._prepared.popitem(last=False)
        return prepared

    def _any_chunk(self, rows: int, keys: int, sampled: int) -> AnyChunk:
        past_1, length_1 = self._numbers[:1], self._numbers[_ALIGNED : _ALIGNED + 1]
        budgets = {heads: self._budgets_4h[:, own] for heads, own in self._budgets.at.items()}
        return AnyChunk((keys - rows,), (keys,), (past_1, length_1), budgets, sampled)

    def _capture(
        self, patterns: tuple[Pattern, ...], chunk: AnyChunk, pages: Pages, scale: float, softmax: Softmax,
        scales: Scales | None,
    ) -> _Graph | None:  # fmt: skip
        if torch.cuda.mem_get_info(self._device)[0] < _SPARE:
            self._stop("no memory is left for graphs")
            return None
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), holding(self._held):
            try:
                self._compute(patterns, chunk, pages, scale, softmax, scales)  # compiles, and sends what graphs read
                self._stream.synchronize()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    spent_BH = self._compute(patterns, chunk, pages, scale, softmax, scales)
                finally:
                    graph.capture_end()
            except Exception as error:  # the launches still work, or fail with an error of their own
                self._stop(summary(error))
                return None
            finally:
                current.wait_stream(self._stream)
        return _Graph(graph, spent_BH, patterns)

    def _compute(
        self, patterns: tuple[Pattern, ...], chunk: AnyChunk, pages: Pages, scale: float, softmax: Softmax,
        scales: Scales | None,
    ) -> torch.Tensor:  # fmt: skip
        from sparsekv.kernels.pages import copy_pages  # it loads Triton

        (rows,), keys = chunk.rows, chunk.longest
        k_GKD, v_GKD = self._views((pages[0].shape[1], keys, self._layout.head_dim), self._dtype)
        by = None
        if scales is not None:
            by, pages = (scales.k_G, scales.v_G), (pages[0].view(FLOAT8), pages[1].view(FLOAT8))
        table_P = self._table_P[: -(-keys // pages[0].shape[2])]
        copy_pages(pages, table_P, (k_GKD, v_GKD), by, chunk.numbers[1])
        q_1HTD, k_1GKD, v_1GKD, backend = self._q_1HTD[:, :, :rows], k_GKD[None], v_GKD[None], self._fallback.backend
        if backend not in _BACKENDS:
            raise BackendError(
                f"expected {' or '.join(_BACKENDS)}, found {backend}, which reads no numbers on the device"
            )
        index = build_index(patterns, q_1HTD, k_1GKD, chunk, self._tile, scale=scale, builder="triton")
        spent_BH = spent_tiles(index, chunk)
        attended = prefill_attention(
            q_1HTD, k_1GKD, v_1GKD, index, chunk, scale=scale, softmax=softmax, backend=backend
        )
        self._out_1HTD[:, :, :rows].copy_(attended.out_BHSD)
        return spent_BH


def _rounded(rows: int) -> int:
    """Up to a power of two."""
    return max(_SMALLEST, 1 << (rows - 1).bit_length())


def _rounded_samples(most: int) -> tuple[int, ...]:
    """Numbers of sampled queries that graphs are captured for: a few, as kernels are compiled for each."""
    return (*(count for count in (LEAST_SAMPLED, 2 * LEAST_SAMPLED) if count < most), most)


def memory_of(longest: int) -> int:
    """Tokens of the keys of a graph for the longest request: its tiles, and one token less than another."""
    return -(-longest // _TILE) * _TILE + _TILE - 1
