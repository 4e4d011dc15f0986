"""Density by hand. Density of built indices against brute force stands in index/test_build.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_cases import TILES, make_layer

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.index.triton import spent
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles, density
from sparsekv.plans.patterns import AShape, BlockSparse, TileShape, VerticalSlash, fraction, tokens

TILE = TileShape()


def test_a_column_computed_singly_counts_its_share_of_a_tile() -> None:
    live = torch.tensor([[[[-1, 0], [3, 1]]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)
    index = TileIndex(TILE, nothing, counts, nothing, live, torch.tensor([False]))
    assert computed_tiles(index).tolist() == [[3 + 35 / 128]]


COVERING = (
    AShape(sink=tokens(0), window=fraction(1.0)),
    BlockSparse(keep=fraction(1.0)),
    VerticalSlash(vertical=tokens(0), slash=fraction(1.0), max_tiles=fraction(1.0)),
    VerticalSlash(vertical=tokens(9), slash=tokens(1000), max_tiles=tokens(1000)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 400), st.integers(1, 500), st.sampled_from(TILES), st.booleans())
def test_patterns_of_the_whole_context_compute_every_tile_wherever_a_chunk_begins(
    past: int, rows: int, tile: TileShape, second: bool
) -> None:
    chunk = Chunk((past, 33), (past + rows, 133)) if second else Chunk((past,), (past + rows,))
    layer = make_layer(COVERING, chunk, tile, seed=past)
    index = build_index(layer.patterns, layer.q_BHSD, layer.k_BGKD, chunk, tile, scale=layer.scale)
    assert float(density(index, chunk)) == 1.0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(0, 3), st.sampled_from((64, 128)))
def test_one_launch_counts_as_torch_does(seed: int, tiles: int, words: int, key: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    live = torch.randint(-(2**31), 2**31, (2, 3, 900 * tiles, words), generator=noise).int()
    counts = torch.randint(0, 1 << 20, live.shape[:3], generator=noise).int()
    nothing = torch.empty(0, dtype=torch.int32)
    index = TileIndex(TileShape(query=128, key=key), nothing, counts, nothing, live, torch.zeros(3, dtype=torch.bool))
    torch.testing.assert_close(spent.computed_tiles(index), computed_tiles(index), rtol=0, atol=0)
