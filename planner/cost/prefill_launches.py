"""Launches of a chunk's attention that tell the prices of prefill apart, at one length.

What sparse attention costs depends on query tiles, whole tiles and single columns. So launches with few and with many
of each are timed beside one another, and one in which half of the heads are dense: that is what a plan's layer looks
like, and its dense heads have the price of its tiles. All have exactly the heads of the layer that is priced.

Shapes: H query heads, G KV heads, S tokens, T tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex, count_bits
from sparsekv.planner.cost.device_cost import HeadShape, LayerWork, Timing
from sparsekv.planner.cost.stopwatch import Launch, Stopwatch
from sparsekv.planner.cost.timed_host import Host
from sparsekv.planner.options import Family
from sparsekv.plans.patterns import PATTERNS, AShape, Dense, Pattern, TileShape, VerticalSlash, tokens

_PASSES = {"cuda": 2}  # over all launches of a length; what varies in between is in the fit


@dataclass(frozen=True, slots=True)
class NamedLaunch:
    """A launch, by the name of the line that it is a timing of, and the features of its work."""

    what: str
    features: tuple[float, ...]
    run: Launch


@dataclass(frozen=True, slots=True, eq=False)
class PrefillLaunches:
    """The last chunk of a prompt, over one layer's heads.

    Args:
        q_BHSD, k_BGSD, v_BGSD: of the whole prompt.
    """

    shape: HeadShape
    tile: TileShape
    families: tuple[Family, ...]
    backend: str
    host: Host
    watch: Stopwatch
    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.k_BGSD.shape[2]

    @property
    def chunk(self) -> Chunk:
        """Returns where the rows that attend lie."""
        return Chunk.uniform(1, self.length - min(self.length, self.host.chunk or self.length), self.length)

    def timed(self) -> Iterator[Timing]:
        """Yields the timings, all launches in turn."""
        launches = tuple(self._all())
        for _ in range(_PASSES.get(self.watch.device.type, 1)):
            for one, us in zip(launches, self.watch.in_turn([one.run for one in launches]), strict=True):
                yield Timing(what=one.what, length=self.length, features=one.features, us=us)

    def issue_us(self) -> dict[str, float]:
        """Returns what the program needs to issue a launch of each name."""
        return {one.what: self.watch.issue(one.run) for one in self._all()}

    def _all(self) -> Iterator[NamedLaunch]:
        q_BHTD, k_BGSD, v_BGSD, chunk = self._queries, self.k_BGSD, self.v_BGSD, self.chunk
        heads, scale = self.shape.heads, self.shape.head_dim**-0.5
        dense = self.host.dense(q_BHTD, k_BGSD, v_BGSD, chunk, scale, self.backend)
        tiles = float(heads * chunk.causal_tiles(self.tile))
        work = LayerWork(0.0, 0.0, tiles, self.tile.key_tiles(self.length), {})
        yield NamedLaunch("dense prefill", (1.0, tiles * work.idle(self.watch.processors)), dense)
        if (copy := self.host.copy(k_BGSD, v_BGSD)) is not None:
            yield NamedLaunch("copy", (1.0, float(self.length)), copy)
        scored = float(heads * self.length)
        for pattern in (one for name in self.families for one in PATTERNS[name].timed(self.length)):
            scores = (1.0, scored, scored * q_BHTD.shape[2])
            yield NamedLaunch(f"index {pattern.pattern}", scores, self._build((pattern,) * heads))
        for even, odd in layers_to_time(self.length):
            index = self._build(tuple((even, odd)[head % 2] for head in range(heads)))()
            attend = partial(prefill_attention, q_BHTD, k_BGSD, v_BGSD, index, chunk, scale=scale, backend=self.backend)
            yield NamedLaunch("sparse prefill", features_of(index, self.watch.processors), partial(self._taken, attend))

    @property
    def _queries(self) -> torch.Tensor:
        return self.q_BHSD[:, :, self.chunk.past[0] :]

    def _build(self, patterns: tuple[Pattern, ...]) -> Callable[[], TileIndex]:
        scale = self.shape.head_dim**-0.5
        return partial(build_index, patterns, self._queries, self.k_BGSD, self.chunk, self.tile, scale=scale)

    def _taken(self, attend: Callable[[], AttentionOutput]) -> None:
        self.host.take(attend().out_BHSD)


def layers_to_time(length: int) -> tuple[tuple[Pattern, Pattern], ...]:
    """Returns the layers that are timed at a length: what even heads follow, and what odd ones do.

    Few tiles; many; many columns beside few tiles, and beside many; half of the heads dense.
    """
    few, third, columns = max(64, length // 16), max(64, length // 3), max(64, length // 5)
    narrow, wide = (AShape(sink=tokens(1), window=tokens(size)) for size in (few, third))
    lines, both = (
        VerticalSlash(vertical=tokens(columns), slash=tokens(size), last_q=64, max_tiles=tokens(size))
        for size in (few, third)
    )
    return ((narrow, narrow), (wide, wide), (lines, lines), (both, both), (Dense(), narrow))


def features_of(index: TileIndex, processors: int) -> tuple[float, float, float, float, float]:
    """Returns the features of a sparse launch: itself; query tiles, whole tiles and single columns, in tiles, of sparse
    heads; causal tiles of dense ones."""
    columns_BHT = count_bits(index.live_BHTN).sum(3).double() / index.tile.key
    is_dense_H, tiles_H, columns_H = index.dense_H, index.counts_BHT.sum((0, 2)), columns_BHT.sum((0, 2))
    sparse = int((~is_dense_H).sum())
    whole, columns, dense = (
        float(x.sum()) for x in (tiles_H[~is_dense_H], columns_H[~is_dense_H], tiles_H[is_dense_H])
    )
    work = LayerWork(whole, columns, dense, float((index.counts_BHT + columns_BHT).max()), {})
    idle = work.idle(processors)
    return 1.0, float(sparse * index.counts_BHT[:, 0].numel()), idle * whole, idle * columns, idle * dense
