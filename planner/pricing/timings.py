"""What is timed at one length on one device: dense and sparse prefill, index building, and decode.

Queries, keys and values are random: what kernels cost depends on tiles and lengths alone.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size, N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.benchmark import Timer

from sparsekv.kernels.density import computed_tiles
from sparsekv.kernels.dispatch import DecodeRows, decode_attention, dense_prefill, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.scores import token_scores, top_tokens
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner.cost_data import HeadShape, PatternName, Timing
from sparsekv.planner.search.space import last_q_for
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Pattern, TileShape, VerticalSlash, tokens
from sparsekv.runtime.stores.bank import HostStore

SECONDS_A_TIMING = 0.03
PATTERNS: tuple[PatternName, ...] = ("a_shape", "vertical_slash", "block_sparse", "adaptive")


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
    for most in (few, many):  # antidiagonal scores, the dearer of the two, stand for both
        yield "adaptive", Adaptive(score="antidiagonal", mass=0.9, max_tiles=tokens(most))


@dataclass(frozen=True, slots=True)
class Bench:
    """One device, one layer's heads, one tile shape."""

    shape: HeadShape
    device: torch.device
    dtype: torch.dtype
    tile: TileShape
    backend: str
    offload: bool  # whether steps over rows in host memory are timed too

    def run(self, length: int) -> Iterator[Timing]:
        """Every timing at one length."""
        q_BHSD, k_BGSD, v_BGSD = self._random(length)
        scale = self.shape.head_dim**-0.5
        yield from self._prefill(length, q_BHSD, k_BGSD, v_BGSD, scale)
        yield from self._decode(length, q_BHSD[:, :, -1:], k_BGSD, v_BGSD, scale)

    def _prefill(
        self, length: int, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, scale: float
    ) -> Iterator[Timing]:
        chunk, heads = Chunk.uniform(1, 0, length), self.shape.heads
        dense_us = self._us(lambda: dense_prefill(q_BHSD, k_BGSD, v_BGSD, chunk, scale=scale, backend=self.backend))
        yield _timing("dense prefill", length, (1.0, heads * chunk.causal_tiles(self.tile)), dense_us)
        for name, pattern in _patterns(length):
            build = partial(build_index, (pattern,) * heads, q_BHSD, k_BGSD, chunk, self.tile, scale=scale)
            work = float(heads * length)
            yield _timing(f"index {name}", length, (1.0, work, work * length), self._us(build))
            index = build()
            attend = partial(prefill_attention, q_BHSD, k_BGSD, v_BGSD, index, chunk, scale=scale, backend=self.backend)
            rows = float(index.counts_BHT.numel())
            yield _timing("sparse prefill", length, (1.0, rows, *_work(index)), self._us(attend))

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
            chosen_B1N = choose(count)
            rows = DecodeRows(chosen_B1N, length, length)
            attend = partial(decode_attention, q_BH1D, k_BGSD, v_BGSD, rows, scale=scale, backend=self.backend)
            yield _timing("sparse decode", length, (1.0, float(count)), self._us(attend))
            if self.offload:
                yield from self._host(rows, q_BH1D, k_BGSD, v_BGSD, scale)

    def _host(
        self, rows: DecodeRows, q_BH1D: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, scale: float
    ) -> Iterator[Timing]:
        """The same step over rows in host memory, as an offloaded layer takes it, most and some of them there."""
        length, count = k_BGSD.shape[2], rows.tokens_BGN.shape[2]
        for hot in (length // 8, length // 2):
            store = HostStore(tokens(hot))
            store.append(k_BGSD, v_BGSD)

            def step(store: HostStore = store) -> torch.Tensor:
                found = store.gather(rows)
                return decode_attention(
                    q_BH1D, found.k_BGSD, found.v_BGSD, found.rows, scale=scale, backend=self.backend
                ).out_BHSD

            cold = float((rows.tokens_BGN < length - hot).sum())
            yield _timing("host decode", length, (1.0, float(count), cold), self._us(step))

    def _random(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            size = (1, heads, length, self.shape.head_dim)
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        return draw(self.shape.heads), draw(self.shape.kv_heads), draw(self.shape.kv_heads)

    def _us(self, launch: Callable[[], object]) -> float:
        launch()  # compilation and first-touch costs are not the kernel's
        timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=SECONDS_A_TIMING).median) * 1e6


def _timing(what: str, length: int, features: Sequence[float], us: float) -> Timing:
    return Timing(what=what, length=length, features=tuple(float(value) for value in features), us=us)


def _work(index: TileIndex) -> tuple[float, float]:
    tiles = float(index.counts_BHT.sum())
    return tiles, max(0.0, float(computed_tiles(index).sum()) - tiles)
