"""Layers to build indices for: drawn by hypothesis, with poison in all memory that must not be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from masks import AmbiguousScoresError, Row, brute_heads

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import (
    AShape,
    BlockSparse,
    Budget,
    Dense,
    Pattern,
    TileShape,
    VerticalSlash,
    fraction,
    tokens,
)

PARTS = ("tiles_BHTW", "counts_BHT", "columns_BHC", "live_BHTN", "dense_H")
TILES = (TileShape(query=64, key=64), TileShape(query=128, key=128), TileShape(query=128, key=64))


@dataclass(frozen=True)
class Layer:
    patterns: tuple[Pattern, ...]
    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    scale: float
    window: int | None

    def to(self, device: str) -> Layer:
        q, k = self.q_BHSD.to(device), self.k_BGKD.to(device)
        return Layer(self.patterns, q, k, self.chunk, self.tile, self.scale, self.window)


def build(layer: Layer, **how: Any) -> TileIndex:
    """All heads by the public call."""
    place = {"scale": layer.scale, "window": layer.window}
    return build_index(layer.patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, **place, **how)


def differences(found: TileIndex, expected: TileIndex) -> list[str]:
    """Names of the parts of two indices that are not the same to the last number."""
    return [name for name in PARTS if not _equal(getattr(found, name), getattr(expected, name))]


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def poisoned(batch: int, tokens_: int, heads: int, size: int, valid: list[int], dtype, seed: int) -> torch.Tensor:
    """Random [B, heads, tokens, D] in token-major memory; NaN and infinities from valid[b] on."""
    generator = torch.Generator().manual_seed(seed)
    x_BSHD = torch.randn(batch, tokens_, heads, size, generator=generator)
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for b, rows in enumerate(valid):
        x_BSHD[b, rows:] = poison[torch.arange(size) % 3]
    return x_BSHD.to(dtype).transpose(1, 2)


def make_layer(
    patterns, chunk, tile, *, kv_heads=1, window=None, dtype=torch.float32, seed=0, spare=0, size=16
) -> Layer:
    """A layer with `spare` rows of poison behind queries and keys."""
    rows = [n - p for p, n in zip(chunk.past, chunk.lengths, strict=True)]
    batch, heads = len(rows), len(patterns)
    q = poisoned(batch, max(rows) + spare, heads, size, rows, dtype, seed)
    k = poisoned(batch, chunk.longest + spare, kv_heads, size, list(chunk.lengths), dtype, seed + 1)
    return Layer(tuple(patterns), q, k, chunk, tile, size**-0.5, window)


budgets: st.SearchStrategy[Budget] = st.one_of(
    st.integers(0, 700).map(tokens),
    st.floats(0.01, 1.0).map(lambda x: fraction(round(x, 2))),
)
patterns_: st.SearchStrategy[Pattern] = st.one_of(
    st.just(Dense()),
    st.builds(AShape, sink=budgets, window=budgets),
    st.builds(BlockSparse, keep=budgets),
    st.builds(
        VerticalSlash,
        vertical=st.one_of(st.integers(0, 60).map(tokens), budgets),
        slash=st.one_of(st.integers(0, 12).map(tokens), budgets),
        last_q=st.sampled_from([1, 7, 64]),
        max_tiles=budgets,
    ),
)


@st.composite
def layers(draw, kinds: st.SearchStrategy[Pattern] = patterns_) -> Layer:
    """Ragged batches, any past, all tile shapes, GQA groups of 1, 2 and 4, three dtypes."""
    places = [(draw(st.integers(0, 300)), draw(st.integers(1, 300))) for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        places = [(past // 128 * 128, rows) for past, rows in places]
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return make_layer(
        [draw(kinds) for _ in range(heads)],
        Chunk(tuple(p for p, _ in places), tuple(p + n for p, n in places)),
        draw(st.sampled_from(TILES)),
        kv_heads=kv_heads,
        window=draw(st.one_of(st.none(), st.none(), st.integers(1, 400))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 1 << 20)),
        spare=draw(st.integers(0, 150)),
    )


def brute_rows(layer: Layer) -> list[list[list[Row]]]:
    """What brute force lists; hypothesis draws another layer where scores are too near to one another."""
    try:
        return brute_heads(
            layer.patterns,
            layer.q_BHSD,
            layer.k_BGKD,
            layer.chunk,
            layer.tile,
            scale=layer.scale,
            window=layer.window,
        )
    except AmbiguousScoresError:
        assume(False)
        raise
