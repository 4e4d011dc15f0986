"""Density by hand. Density of built indices against brute force stands in index/test_build.py."""

import pytest
import torch

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles, density
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

TILE = TileShape()


def test_a_column_computed_singly_counts_its_share_of_a_tile() -> None:
    live = torch.tensor([[[[-1, 0], [3, 1]]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)
    index = TileIndex(TILE, nothing, counts, nothing, live, torch.tensor([False]))
    assert computed_tiles(index).tolist() == [[3 + 35 / 128]]


def test_dense_heads_have_density_one_in_ragged_chunks_too() -> None:
    q, k = torch.randn(2, 2, 300, 16), torch.randn(2, 1, 700, 16)
    chunk = Chunk((400, 3), (700, 200))
    for tile in (TILE, TileShape(query=128, key=64)):
        index = build_index([Dense(), Dense()], q, k, chunk, tile, scale=1.0)
        assert float(density(index, chunk)) == 1.0


@pytest.mark.parametrize(
    "pattern",
    [
        AShape(sink=tokens(0), window=fraction(1.0)),
        BlockSparse(keep=fraction(1.0)),
        VerticalSlash(vertical=tokens(0), slash=fraction(1.0), max_tiles=fraction(1.0)),
    ],
)
def test_a_pattern_of_the_whole_context_computes_every_tile(pattern) -> None:
    q, k = torch.randn(1, 2, 1000, 16), torch.randn(1, 1, 1000, 16)
    chunk = Chunk.uniform(1, 0, 1000)
    assert float(density(build_index([pattern] * 2, q, k, chunk, TILE, scale=1.0), chunk)) == 1.0
