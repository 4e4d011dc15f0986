"""The adaptive pattern: the fewest tiles that hold a share of a row, against shares computed by loops."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from index_cases import TILES, Layer, adaptive_, layers, make_layer
from masks import brute_heads
from tile_masses import antidiagonal_scores, pooled_scores, visible_tiles

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.cpu import prefill as cpu_prefill
from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.kernels.tiles import NO_TILE, Chunk, TileIndex
from sparsekv.plans.patterns import (
    Adaptive,
    AShape,
    BlockSparse,
    Budget,
    Dense,
    TileShape,
    VerticalSlash,
    fraction,
    tokens,
)

often = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = ("antidiagonal", "pooled")
ALL = fraction(1.0)
CLOSE = 1e-5


def build(layer: Layer) -> TileIndex:
    return build_index(
        layer.patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, scale=layer.scale, window=layer.window
    )


def rows_of(layer: Layer):
    """(batch row, head, row tile, first token, last token) of every row tile that is not padding."""
    for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
        for h in range(len(layer.patterns)):
            for t, first in enumerate(range(past, length, layer.tile.query)):
                yield b, h, t, first, min(first + layer.tile.query, length) - 1


def shares_of(layer: Layer, b: int, h: int, first: int, last: int) -> dict[int, float]:
    past, length = layer.chunk.past[b], layer.chunk.lengths[b]
    group = len(layer.patterns) // layer.k_BGKD.shape[1]
    q = layer.q_BHSD[b, h, : length - past].double().numpy()
    k = layer.k_BGKD[b, h // group, :length].double().numpy()
    if layer.patterns[h].score == "antidiagonal":
        products = q @ k.T * layer.scale
        return antidiagonal_scores(products, past, first, last, length, layer.tile.key, layer.window)
    return pooled_scores(q, k, layer.scale, past, first, last, layer.tile.key, layer.window)


def mandatory_of(layer: Layer, first: int, last: int) -> set[int]:
    key = layer.tile.key
    seen = visible_tiles(first, last, key, layer.window)
    return {0, first // key - 1, *range(first // key, last // key + 1)} & set(seen)


def most_tiles(layer: Layer, b: int, budget: Budget) -> int:
    key, phase = layer.tile.key, layer.chunk.past[b] % layer.tile.key
    whole_row = len({(phase + row) // key for row in range(layer.tile.query)}) + 2
    return max(math.ceil(budget.resolve(layer.chunk.lengths[b]) / key), whole_row)


@often
@given(layers(adaptive_))
def test_rows_hold_their_mass_with_the_fewest_tiles(layer: Layer) -> None:
    index, checked = build(layer), 0
    for b, h, t, first, last in rows_of(layer):
        pattern, listed = layer.patterns[h], index.tiles_BHTW[b, h, t].tolist()
        kept = listed[: index.counts_BHT[b, h, t]]
        assert listed == sorted(set(kept)) + [NO_TILE] * (len(listed) - len(kept))
        shares = shares_of(layer, b, h, first, last)
        mandatory, most = mandatory_of(layer, first, last), most_tiles(layer, b, pattern.max_tiles)
        assert mandatory <= set(kept) <= set(shares)
        assert len(kept) <= most
        need, held = pattern.mass * sum(shares.values()), sum(shares[tile] for tile in kept)
        assert held >= need - CLOSE or len(kept) == most
        if pattern.mass == 1.0:
            assert len(kept) == min(most, len(shares))
        chosen, dropped = set(kept) - mandatory, set(shares) - set(kept)
        if chosen:
            least = min(shares[tile] for tile in chosen)
            assert least >= max((shares[tile] for tile in dropped), default=0.0) - CLOSE
            assert pattern.mass == 1.0 or held - least < need + CLOSE
        checked += 1
    assert checked


@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mass_of_one_keeps_all_that_a_row_sees(kind: str, window: int | None) -> None:
    pattern = Adaptive(score=kind, mass=1.0, max_tiles=ALL)
    layer = make_layer([pattern] * 4, Chunk((0, 130), (700, 600)), TILES[2], kv_heads=2, window=window, spare=5)
    index, checked = build(layer), 0
    for b, h, t, first, last in rows_of(layer):
        seen = visible_tiles(first, last, 64, window)
        assert index.tiles_BHTW[b, h, t, : index.counts_BHT[b, h, t]].tolist() == seen
        checked += 1
    assert checked == 4 * (6 + 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mass", "most"), [(1e-6, ALL), (1.0, tokens(0)), (0.99, tokens(3 * 64))])
def test_a_tiny_mass_and_the_least_room_leave_the_mandatory_tiles(kind: str, mass: float, most: Budget) -> None:
    pattern = Adaptive(score=kind, mass=mass, max_tiles=most)
    layer = make_layer([pattern] * 2, Chunk((0,), (900,)), TILES[0], seed=2)
    index = build(layer)
    for t in range(15):
        assert index.tiles_BHTW[0, 0, t, : index.counts_BHT[0, 0, t]].tolist() == sorted({0, max(0, t - 1), t})
    assert most is ALL or index.tiles_BHTW.shape[3] == 3


def test_more_mass_only_adds_tiles() -> None:
    masses = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.999, 1.0)
    for kind in KINDS:
        layer = make_layer(
            [Adaptive(score=kind, mass=mass, max_tiles=ALL) for mass in masses], Chunk((0,), (1000,)), TILES[0]
        )
        same_q = layer.q_BHSD[:, :1].repeat(1, len(masses), 1, 1)
        index = build(Layer(layer.patterns, same_q, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, None))
        mask = mask_of(index, layer.chunk, 1000)
        assert (mask[:, 1:] | ~mask[:, :-1]).all()
        assert (mask[:, -1] & ~mask[:, 0]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_keep_the_lower_tiles(kind: str) -> None:
    pattern = Adaptive(score=kind, mass=0.5, max_tiles=tokens(6 * 64))
    layer = make_layer([pattern], Chunk((0,), (1024,)), TILES[0])
    index = build(Layer(layer.patterns, 0.0 * layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, 1.0, None))
    for t in range(10, 16):
        assert index.tiles_BHTW[0, 0, t].tolist() == [0, 1, 2, 3, t - 1, t]


def test_heads_of_both_scores_and_of_other_patterns_share_a_layer() -> None:
    patterns = [
        Adaptive(mass=0.5, max_tiles=ALL),
        BlockSparse(keep=tokens(256)),
        Adaptive(score="pooled", mass=0.7, max_tiles=tokens(400)),
        Dense(),
        VerticalSlash(vertical=tokens(9), slash=tokens(9), max_tiles=tokens(400)),
        Adaptive(mass=0.9, max_tiles=tokens(256)),
        AShape(sink=tokens(64), window=tokens(64)),
        Adaptive(score="pooled", mass=0.2, max_tiles=ALL),
    ]
    layer = make_layer(patterns, Chunk((64, 3), (640, 400)), TILES[0], kv_heads=2, seed=5)
    args = (layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile)
    rows, index = brute_heads(patterns, *args, scale=layer.scale), build(layer)
    for b, h, t, *_ in rows_of(layer):
        if not isinstance(patterns[h], Dense):
            listed = index.tiles_BHTW[b, h, t, : index.counts_BHT[b, h, t]].tolist()
            assert listed == sorted(rows[b][h][t].tiles), (b, h, t)
    assert index.tiles_BHTW.shape[3] <= 10


def test_a_hot_tile_that_moves_from_row_to_row_is_followed() -> None:
    code = torch.eye(16)
    k = code.repeat_interleave(64, 0)
    hot = torch.tensor([(5 * t) % max(1, t - 1) for t in range(16)])
    q = 30.0 * code[hot].repeat_interleave(64, 0)
    for kind in KINDS:
        pattern = Adaptive(score=kind, mass=0.9, max_tiles=ALL)
        index = build_index([pattern], q[None, None], k[None, None], Chunk.uniform(1, 0, 1024), TILES[0], scale=1.0)
        for t in range(16):
            listed = index.tiles_BHTW[0, 0, t, : index.counts_BHT[0, 0, t]].tolist()
            assert listed == sorted({0, int(hot[t]), max(0, t - 1), t}), (kind, t)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_numbers_leave_a_list_that_kernels_can_read(bad: float) -> None:
    patterns = [Adaptive(score=kind, mass=0.9, max_tiles=tokens(384)) for kind in KINDS]
    layer = make_layer(patterns, Chunk((0,), (700,)), TILES[0])
    layer.q_BHSD[0, :, 500, 3] = bad
    index = build(layer)
    for b, h, t, first, last in rows_of(layer):
        listed = index.tiles_BHTW[b, h, t].tolist()
        count = int(index.counts_BHT[b, h, t])
        assert listed == sorted(set(listed[:count])) + [NO_TILE] * (len(listed) - count)
        assert mandatory_of(layer, first, last) <= set(listed[:count])


def test_attention_over_the_chosen_tiles_is_the_oracle_s() -> None:
    patterns = [Adaptive(score=kind, mass=mass, max_tiles=ALL) for kind in KINDS for mass in (0.3, 0.8)]
    layer = make_layer(patterns, Chunk((77, 0), (500, 333)), TILES[2], kv_heads=2, spare=30)
    index = build(layer)
    v = torch.randn(layer.k_BGKD.shape, generator=torch.Generator().manual_seed(7))
    mask = mask_of(index, layer.chunk, layer.q_BHSD.shape[2])
    expected = reference_attention(layer.q_BHSD, layer.k_BGKD, v, mask, scale=layer.scale)
    found = cpu_prefill(layer.q_BHSD, layer.k_BGKD, v, index, layer.chunk, scale=layer.scale)
    for b, rows in enumerate((423, 333)):
        torch.testing.assert_close(found.out_BHSD[b, :, :rows], expected.out_BHSD[b, :, :rows], atol=1e-5, rtol=1e-4)


def test_lists_are_no_wider_than_max_tiles() -> None:
    pattern = Adaptive(mass=1.0, max_tiles=fraction(0.1))
    q = torch.empty(1, 2, 16384, 64, device="meta")
    index = build_index([pattern] * 2, q, q, Chunk.uniform(1, 0, 16384), TileShape(), scale=0.125)
    assert index.tiles_BHTW.shape == (1, 2, 128, 13)
