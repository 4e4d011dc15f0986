"""Indices of whole layers against brute force, and what must hold for every index."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from index_cases import TILES, Layer, brute_rows, build, differences, layers, make_layer
from masks import Row, brute_computed_tiles, brute_mask
from torch_state import small_blocks

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.reference import mask_of
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, Chunk, TileIndex, computed_tiles, density
from sparsekv.plans.errors import ShapeError, UnsupportedError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

often = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MIXED = (
    AShape(sink=tokens(64), window=tokens(128)),
    VerticalSlash(vertical=tokens(20), slash=tokens(30), max_tiles=fraction(0.6)),
    Dense(),
    VerticalSlash(vertical=tokens(45), slash=tokens(2), last_q=16, max_tiles=fraction(0.5)),
    BlockSparse(keep=fraction(0.4)),
    VerticalSlash(vertical=tokens(3), slash=tokens(9), max_tiles=tokens(512)),
    BlockSparse(keep=tokens(256)),
    AShape(sink=tokens(1), window=tokens(0)),
)


def check_rows(index: TileIndex, rows: list[list[list[Row]]], patterns) -> None:
    """Lists, counts and live bits say exactly what brute force says, and padding rows say nothing."""
    columns, live = index.columns_BHC.tolist(), index.live_BHTN.tolist()
    for b, heads in enumerate(rows):
        for h, head_rows in enumerate(heads):
            for t in range(index.counts_BHT.shape[2]):
                listed, count = index.tiles_BHTW[b, h, t].tolist(), int(index.counts_BHT[b, h, t])
                row = head_rows[t] if t < len(head_rows) else Row(0, 0, frozenset(), frozenset())
                assert count == len(row.tiles), (b, h, t)
                if not isinstance(patterns[h], Dense):
                    assert listed == sorted(row.tiles) + [NO_TILE] * (len(listed) - count), (b, h, t)
                alive = {
                    c
                    for n, word in enumerate(live[b][h][t])
                    for bit in range(32)
                    if word >> bit & 1
                    for c in [32 * n + bit]
                }
                assert {columns[b][h][c] for c in alive} == row.columns, (b, h, t)
                assert len(alive) == len(row.columns)


@often
@given(layers())
def test_index_is_well_formed_and_what_brute_force_says_with_poison_all_around(layer: Layer) -> None:
    rows = brute_rows(layer)
    index = build(layer)
    check_rows(index, rows, layer.patterns)
    assert torch.equal(
        mask_of(index, layer.chunk, layer.q_BHSD.shape[2], layer.window),
        brute_mask(rows, layer.chunk, layer.tile, layer.q_BHSD.shape[2], layer.window),
    )
    expected = torch.tensor(brute_computed_tiles(rows, layer.tile), dtype=torch.float64)
    torch.testing.assert_close(computed_tiles(index), expected)
    causal = len(layer.patterns) * layer.chunk.causal_tiles(layer.tile)
    torch.testing.assert_close(density(index, layer.chunk), expected.sum() / causal)
    assert index.tiles_BHTW.shape[3] <= max(1, layer.chunk.key_tiles(layer.tile))
    assert {x.dtype for x in (index.tiles_BHTW, index.counts_BHT, index.columns_BHC, index.live_BHTN)} == {torch.int32}
    columns = index.columns_BHC
    assert ((columns[..., 1:] > columns[..., :-1]) | (columns[..., 1:] == NO_COLUMN)).all()
    assert index.live_BHTN.shape[3] == -(-columns.shape[2] // 32)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("past", [0, 192, 201])
def test_mixed_patterns_of_one_layer_do_not_disturb_each_other(tile: TileShape, past: int) -> None:
    layer = make_layer(MIXED, Chunk((past, 0), (past + 500, 333)), tile, kv_heads=2, spare=60, seed=3)
    check_rows(build(layer), brute_rows(layer), layer.patterns)


def test_blocks_of_rows_join_without_seams() -> None:
    layer = make_layer(MIXED, Chunk((7, 64), (700, 500)), TILES[0], kv_heads=2)
    whole = build(layer)
    with small_blocks():
        pieces = build(layer)
    assert differences(whole, pieces) == []


def test_batch_rows_without_queries_or_without_tokens_hold_nothing() -> None:
    layer = make_layer(MIXED, Chunk((300, 0, 40), (300, 0, 140)), TILES[1], kv_heads=2)
    index = build(layer)
    assert not index.counts_BHT[:2].any()
    assert not index.live_BHTN[:2].any()
    assert index.counts_BHT[2].any()
    empty = build(make_layer(MIXED, Chunk((0,), (0,)), TILES[1], spare=70))
    assert not empty.counts_BHT.any()
    assert float(density(empty, Chunk((0,), (0,)))) == 0.0


def test_bad_calls_say_what_was_expected() -> None:
    layer = make_layer(MIXED[:2], Chunk((0,), (100,)), TILES[1])
    q, k, chunk, tile = layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile
    with pytest.raises(UnsupportedError, match="found 64 x 128"):
        build_index(MIXED[:2], q, k, chunk, TileShape(query=64, key=128), scale=1.0)
    with pytest.raises(ShapeError, match="2 heads, found 3 patterns"):
        build_index(MIXED[:3], q, k, chunk, tile, scale=1.0)
    with pytest.raises(ShapeError, match="100 query rows"):
        build_index(MIXED[:2], q[:, :, :50], k, chunk, tile, scale=1.0)
    with pytest.raises(ShapeError, match=r"1, 3, 100, 16"):
        build_index(MIXED[:2], q, k.expand(-1, 3, -1, -1), chunk, tile, scale=1.0)
    with pytest.raises(ShapeError, match="at least 1 token"):
        build_index(MIXED[:2], q, k, chunk, tile, scale=1.0, window=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_builds_the_same_index_without_waiting(dtype: torch.dtype) -> None:
    layer = make_layer(MIXED, Chunk((192, 0), (900, 633)), TILES[1], kv_heads=2, spare=60, seed=3, dtype=dtype, size=64)
    layer = layer.to("cuda")
    build(layer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        index = build(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_rows(index, brute_rows(layer), layer.patterns)
