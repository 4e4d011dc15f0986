"""Measuring what attention costs on this device: a few timed launches, and lines fitted to them.

Shapes: H query heads, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch.utils.benchmark import Timer

from sparsekv.kernels.density import computed_tiles
from sparsekv.kernels.dispatch import DecodeRows, choose_backend, decode_attention, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.scores import token_scores, top_tokens
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner.cost_data import DeviceCost, HeadShape, Line, PatternName, Timing
from sparsekv.planner.place import device_name, dtype_name, versions
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.planner.space import last_q_for
from sparsekv.plans.budget import tokens
from sparsekv.plans.patterns import AShape, BlockSparse, Pattern, TileShape, VerticalSlash
from sparsekv.plans.records import BackendName

# Work of the largest dense launch that is timed, in floating-point operations: a fraction of a second either way.
_MOST_WORK = {"cpu": 3e9, "cuda": 2e14}
_SECONDS_A_TIMING = {"cpu": 0.03, "cuda": 0.03}
_SHORTEST = 1024


def measure_cost(
    shape: HeadShape,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: TileShape,
    backend: str = "auto",
    progress: Progress | None = None,
) -> DeviceCost:
    """Times dense and sparse attention, index building and decode on this device, and fits lines to them.

    Queries, keys and values are random: what kernels cost depends on tiles and lengths alone. Lengths too long to time
    quickly are left to the fit.

    Args:
        shape: the heads of one layer.
        lengths: context lengths the plan is for.
        device: where to measure.
        dtype: of queries, keys and values.
        tile: the plan's tile shape.
        backend: of sparse prefill, or "auto".
        progress: where to report.

    Raises:
        BackendError: the backend cannot run here.
    """
    choice = choose_backend(device, dtype, shape.head_dim, backend)
    bench = _Bench(shape, device, dtype, tile, choice.name)
    timed = _timed_lengths(shape, lengths, device.type)
    timings: list[Timing] = []
    with (progress or NoProgress()).stage("cost", total=len(timed)) as step:
        for length in timed:
            timings.extend(bench.run(length))
            step.advance(note=f"{length} tokens")
    return DeviceCost(
        device=device_name(device),
        dtype=dtype_name(dtype),
        backend=cast(BackendName, choice.name),
        shape=shape,
        tile=tile,
        versions=versions(),
        prefill_dense=_fit(timings, "dense prefill"),
        prefill_sparse=_fit(timings, "sparse prefill"),
        index={name: _fit(timings, f"index {name}") for name in _PATTERNS},
        decode_dense=_fit(timings, "dense decode"),
        decode_sparse=_fit(timings, "sparse decode"),
        decode_choose=_fit(timings, "choose"),
        timings=tuple(timings),
    )


def _timed_lengths(shape: HeadShape, lengths: Sequence[int], device_type: str) -> tuple[int, ...]:
    most = math.isqrt(int(_MOST_WORK.get(device_type, _MOST_WORK["cpu"]) / (2 * shape.heads * shape.head_dim)))
    longest = max(_SHORTEST, min(max(lengths), most) // _SHORTEST * _SHORTEST)
    return tuple(sorted({max(_SHORTEST // 2, longest // 4), longest}))


_PATTERNS: tuple[PatternName, ...] = ("a_shape", "vertical_slash", "block_sparse")


def _patterns(length: int) -> Iterator[tuple[PatternName, Pattern]]:
    """A few of each kind, so that tiles and columns vary apart from one another."""
    yield "a_shape", AShape(sink=tokens(128), window=tokens(length // 16))
    yield "a_shape", AShape(sink=tokens(128), window=tokens(length // 4))
    yield "block_sparse", BlockSparse(keep=tokens(max(256, length // 16)))
    yield "block_sparse", BlockSparse(keep=tokens(max(512, length // 4)))
    few, many, last_q = max(256, length // 16), max(512, length // 5), last_q_for(length)
    for vertical, slash in ((few, many), (many, few)):
        yield (
            "vertical_slash",
            VerticalSlash(vertical=tokens(vertical), slash=tokens(slash), last_q=last_q, max_tiles=tokens(few)),
        )


@dataclass(frozen=True, slots=True)
class _Bench:
    shape: HeadShape
    device: torch.device
    dtype: torch.dtype
    tile: TileShape
    backend: str

    def run(self, length: int) -> Iterator[Timing]:
        """Every timing at one length."""
        q_BHSD, k_BGSD, v_BGSD = self._random(length)
        chunk, scale = Chunk.uniform(1, 0, length), self.shape.head_dim**-0.5
        causal = self.shape.heads * chunk.causal_tiles(self.tile)
        dense_us = self._us(lambda: dense_attention(q_BHSD, k_BGSD, v_BGSD, chunk, scale=scale))
        yield _timing("dense prefill", length, (1.0, causal), dense_us)
        for name, pattern in _patterns(length):
            per_head = (pattern,) * self.shape.heads
            build = partial(build_index, per_head, q_BHSD, k_BGSD, chunk, self.tile, scale=scale)
            work = float(self.shape.heads * length)
            yield _timing(f"index {name}", length, (1.0, work, work * length), self._us(build))
            index = build()
            attend = partial(prefill_attention, q_BHSD, k_BGSD, v_BGSD, index, chunk, scale=scale, backend=self.backend)
            yield _timing("sparse prefill", length, (1.0, *_work(index)), self._us(attend))
        yield from self._decode(length, q_BHSD[:, :, -1:], k_BGSD, v_BGSD, scale)

    def _decode(
        self, length: int, q_BH1D: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, scale: float
    ) -> Iterator[Timing]:
        chunk, one = Chunk.uniform(1, length - 1, length), torch.ones(1)
        dense_us = self._us(lambda: dense_attention(q_BH1D, k_BGSD, v_BGSD, chunk, scale=scale))
        yield _timing("dense decode", length, (1.0, float(length)), dense_us)

        def choose(count: int) -> torch.Tensor:
            scores_B1S = token_scores(q_BH1D, k_BGSD, (length - 1,), one, scale=scale)
            return top_tokens(scores_B1S, count, length)

        yield _timing("choose", length, (1.0, float(length)), self._us(lambda: choose(length // 10)))
        for count in (length // 16, length // 4):
            rows = DecodeRows(choose(count), length, length)
            attend = partial(decode_attention, q_BH1D, k_BGSD, v_BGSD, rows, scale=scale, backend=self.backend)
            yield _timing("sparse decode", length, (1.0, float(count)), self._us(attend))

    def _random(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            size = (1, heads, length, self.shape.head_dim)
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        return draw(self.shape.heads), draw(self.shape.kv_heads), draw(self.shape.kv_heads)

    def _us(self, launch: Callable[[], object]) -> float:
        launch()  # compilation and first-touch costs are not the kernel's
        timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=_SECONDS_A_TIMING.get(self.device.type, 0.03)).median) * 1e6


def _timing(what: str, length: int, features: Sequence[float], us: float) -> Timing:
    return Timing(what=what, length=length, features=tuple(float(value) for value in features), us=us)


def _work(index: TileIndex) -> tuple[float, float]:
    tiles = float(index.counts_BHT.sum())
    return tiles, max(0.0, float(computed_tiles(index).sum()) - tiles)


def _fit(timings: Sequence[Timing], what: str) -> Line:
    """Least squares of relative errors with non-negative prices: short launches count as much as long ones."""
    from scipy.optimize import nnls

    own = [timing for timing in timings if timing.what == what]
    features = np.array([timing.features for timing in own])
    us = np.array([timing.us for timing in own])
    size = np.maximum(features.max(0), 1e-12)
    prices, _ = nnls(features / size / us[:, None], np.ones(len(own)))
    return Line(prices=tuple(float(price) for price in prices / size))
