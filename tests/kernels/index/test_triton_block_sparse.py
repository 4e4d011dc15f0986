"""The Triton builder of block-sparse, in the interpreter, against the torch builder and against brute force."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, brute_rows, budgets, differences, layers, make_layer
from masks import brute_mask
from triton_index import torch_index, triton_index

from sparsekv.kernels.index.triton import block_sparse
from sparsekv.kernels.reference import mask_of
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import BlockSparse, fraction, tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")

SOME, FEW, LEAST, EVERY = (BlockSparse(keep=keep) for keep in (fraction(0.4), tokens(256), tokens(0), fraction(1.0)))


def triton_blocks(layer: Layer) -> TileIndex:
    return triton_index(layer, builder=block_sparse)


@pytest.mark.parametrize(
    ("patterns", "chunk", "tile", "kv_heads", "window"),
    [
        ((SOME, FEW), Chunk((0,), (700,)), TILES[0], 1, None),
        ((SOME, LEAST, EVERY), Chunk((201, 0), (700, 133)), TILES[2], 1, None),
        ((FEW, EVERY), Chunk((100, 0), (600, 200)), TILES[0], 2, 130),
        ((SOME,), Chunk((300, 0, 40), (300, 0, 340)), TILES[1], 1, None),
    ],
    ids=["group", "ragged past", "window", "rows without queries or tokens"],
)
def test_triton_builds_the_index_of_torch_in_poisoned_memory(patterns, chunk, tile, kv_heads, window) -> None:
    layer = make_layer(patterns, chunk, tile, kv_heads=kv_heads, window=window, spare=40, seed=3)
    assert differences(triton_blocks(layer), torch_index(layer)) == []


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(layers(st.builds(BlockSparse, keep=budgets)))
def test_index_of_triton_is_what_brute_force_says(layer: Layer) -> None:
    rows = brute_rows(layer)
    queries = layer.q_BHSD.shape[2]
    assert torch.equal(
        mask_of(triton_blocks(layer), layer.chunk, queries, layer.window),
        brute_mask(rows, layer.chunk, layer.tile, queries, layer.window),
    )


@pytest.mark.parametrize("levels", [1, 5])
def test_the_lower_tile_wins_among_equal_scores(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    level_M = torch.randint(levels, (1, 1, 16, 1), generator=generator) - 2.0
    layer = make_layer((BlockSparse(keep=tokens(7 * 64)), LEAST), Chunk((0,), (1024,)), TILES[0])
    layer.k_BGKD[:] = level_M.repeat_interleave(64, 2)
    layer.q_BHSD[:] = 1.0
    assert differences(triton_blocks(layer), torch_index(layer)) == []


def test_scores_that_are_not_numbers_choose_what_torch_chooses() -> None:
    layer = make_layer((SOME,), Chunk((0,), (600,)), TILES[0])
    layer.q_BHSD[:, :, 300:] = torch.nan
    layer.k_BGKD[:, :, 130:140] = torch.inf
    assert differences(triton_blocks(layer), torch_index(layer)) == []


def test_blocks_of_row_tiles_join_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "MOST_SCORES", 3 * 2 * 8)
    layer = make_layer((SOME, FEW), Chunk((7,), (500,)), TILES[0])
    assert differences(triton_blocks(layer), torch_index(layer)) == []
