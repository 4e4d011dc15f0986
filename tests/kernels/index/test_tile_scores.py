"""Estimated shares of attention against loops over antidiagonals and means, and what they must find."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, layers, make_layer
from small_blocks import small_blocks
from tile_masses import antidiagonal_scores, pooled_scores

from sparsekv.kernels.index.adaptive import tile_scores
from sparsekv.kernels.index.layout import IndexCall
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import Dense, TileShape

KINDS = ("antidiagonal", "pooled")
often = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
dense_layers = layers(st.just(Dense()))


def call_of(layer: Layer) -> IndexCall:
    return IndexCall.of(layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window)


def scores_of(kind: str, heads: list[int], layer: Layer) -> torch.Tensor:
    """[B, h, T, key tiles]; every row tile must come exactly once."""
    call = call_of(layer)
    layout = call.layout
    found_BhTM = torch.full((layout.batch, len(heads), layout.row_tiles, layout.key_tiles), torch.nan)
    for rows, scores_BhRM in tile_scores(kind, heads, call):
        assert found_BhTM[:, :, rows].isnan().all()
        found_BhTM[:, :, rows] = 0.0
        found_BhTM[:, :, rows, : scores_BhRM.shape[-1]] = scores_BhRM
    return found_BhTM


def brute_scores(kind: str, heads: list[int], layer: Layer) -> torch.Tensor:
    layout, key = call_of(layer).layout, layer.tile.key
    expected_BhTM = np.zeros((layout.batch, len(heads), layout.row_tiles, layout.key_tiles))
    for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
        for place, head in enumerate(heads):
            q = layer.q_BHSD[b, head, : length - past].double().numpy()
            k = layer.k_BGKD[b, head // layout.group_size, :length].double().numpy()
            for t, first in enumerate(range(past, length, layer.tile.query)):
                rows = (past, first, min(first + layer.tile.query, length) - 1)
                if kind == "antidiagonal":
                    shares = antidiagonal_scores(q @ k.T * layer.scale, *rows, length, key, layer.window)
                else:
                    shares = pooled_scores(q, k, layer.scale, *rows, key, layer.window)
                for tile, share in shares.items():
                    expected_BhTM[b, place, t, tile] = share
    return torch.from_numpy(expected_BhTM)


@often
@given(dense_layers, st.sampled_from(KINDS), st.data())
def test_scores_are_what_loops_say_with_poison_all_around(layer: Layer, kind: str, data: st.DataObject) -> None:
    every = range(len(layer.patterns))
    heads = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    found = scores_of(kind, heads, layer)
    torch.testing.assert_close(found.double(), brute_scores(kind, heads, layer), atol=2e-6, rtol=1e-4)
    total = found.sum(-1)
    assert ((total - 1.0).abs().lt(1e-5) | (total == 0.0)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES)
def test_blocks_of_heads_and_rows_join_without_seams(kind: str, tile: TileShape) -> None:
    layer = make_layer([Dense()] * 6, Chunk((7, 64), (700, 500)), tile, kv_heads=3, spare=20)
    for heads in ([0, 1, 2, 3, 4, 5], [0, 1, 3, 5]):
        whole = scores_of(kind, heads, layer)
        with small_blocks():
            torch.testing.assert_close(scores_of(kind, heads, layer), whole, atol=1e-6, rtol=1e-5)
