"""The adaptive pattern: the fewest tiles that hold a share of a row, against shares computed by loops."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from index_cases import TILES, Layer, adaptive_, build, layers, make_layer
from tile_masses import antidiagonal_scores, pooled_scores, visible_tiles

from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.patterns import (
    Adaptive,
    Budget,
    tokens,
)

often = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = ("antidiagonal", "pooled")
CLOSE = 1e-5


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


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_keep_the_lower_tiles(kind: str) -> None:
    pattern = Adaptive(score=kind, mass=0.5, max_tiles=tokens(6 * 64))
    layer = make_layer([pattern], Chunk((0,), (1024,)), TILES[0])
    index = build(Layer(layer.patterns, 0.0 * layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, 1.0, None))
    for t in range(10, 16):
        assert index.tiles_BHTW[0, 0, t].tolist() == [0, 1, 2, 3, t - 1, t]


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
