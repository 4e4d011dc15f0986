"""Rules over tiles: shares against loops over antidiagonals and means, and the tiles that are taken by them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, layers, make_layer
from tile_masses import antidiagonal_scores, pooled_scores, visible_tiles

from sparsekv.bench.tile_rules import FlashPrefill, XAttention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.index.layout import IndexCall
from sparsekv.kernels.methods import Layer as Facts
from sparsekv.kernels.methods import PrefillRule, register
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.patterns import Dense, Registered, fraction

RULES = {"antidiagonal": XAttention, "pooled": FlashPrefill}
CLOSE = 1e-5
often = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
dense_layers = layers(st.just(Dense()))


def facts_of(layer: Layer) -> Facts:
    return Facts(0, layer.chunk, layer.tile, layer.scale, layer.window)


def call_of(layer: Layer) -> IndexCall:
    return IndexCall.of(layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window)


def scores_of(kind: str, heads: list[int], layer: Layer) -> torch.Tensor:
    """[B, h, T, key tiles]: the shares by which a rule takes tiles; 0 in padding."""
    rule, layout = RULES[kind](), call_of(layer).layout
    found_BHTM = torch.zeros(layout.batch, layout.heads, layout.row_tiles, layout.key_tiles)
    seen: list[torch.Tensor] = []
    rule.taken = lambda part, budget: seen.append(rule.shares(part)) or part.must_TM  # type: ignore[method-assign]
    rule.tiles(layer.q_BHSD, layer.k_BGKD, facts_of(layer), 1.0)
    parts = iter(seen)
    for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
        for group in range(layout.kv_heads if length > past else 0):
            shares_NTM = next(parts)
            first = group * layout.group_size
            found_BHTM[b, first : first + layout.group_size, : shares_NTM.shape[1], : shares_NTM.shape[2]] = shares_NTM
    return found_BHTM[:, heads]


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
@given(dense_layers, st.sampled_from([*RULES]), st.data())
def test_scores_are_what_loops_say_with_poison_all_around(layer: Layer, kind: str, data: st.DataObject) -> None:
    every = range(len(layer.patterns))
    heads = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    found = scores_of(kind, heads, layer)
    torch.testing.assert_close(found.double(), brute_scores(kind, heads, layer), atol=2e-6, rtol=1e-4)
    total = found.sum(-1)
    assert ((total - 1.0).abs().lt(1e-5) | (total == 0.0)).all()


def mandatory_of(layer: Layer, first: int, last: int) -> set[int]:
    key = layer.tile.key
    seen = visible_tiles(first, last, key, layer.window)
    return {0, first // key - 1, *range(first // key, last // key + 1)} & set(seen)


def taken(rule: type[PrefillRule], budget: float, layer: Layer):
    """Of every row tile that is not padding: tiles taken, estimated shares, tiles that must be, seen."""
    register([rule])
    patterns = [Registered(name=rule.name, budget=fraction(budget))] * len(layer.patterns)
    index = build_index(
        patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, scale=layer.scale, window=layer.window
    )
    kind = next(kind for kind, own in RULES.items() if own is rule)
    shares_BHTM = scores_of(kind, list(range(len(layer.patterns))), layer)
    for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
        for t, first in enumerate(range(past, length, layer.tile.query)):
            last = min(first + layer.tile.query, length) - 1
            for h in range(len(layer.patterns)):
                listed, count = index.tiles_BHTW[b, h, t].tolist(), int(index.counts_BHT[b, h, t])
                assert listed == sorted(set(listed[:count])) + [NO_TILE] * (len(listed) - count)
                seen = set(visible_tiles(first, last, layer.tile.key, layer.window))
                yield set(listed[:count]), shares_BHTM[b, h, t].tolist(), mandatory_of(layer, first, last), seen


@often
@given(dense_layers, st.one_of(st.just(1.0), st.floats(0.001, 0.999)))
def test_rows_hold_their_mass_with_the_fewest_tiles(layer: Layer, budget: float) -> None:
    budget = round(budget, 6)  # as plans have it
    mass = XAttention.mass(budget)
    assert XAttention().setting(budget) == f"tau {mass:.4g}"
    for kept, shares, mandatory, seen in taken(XAttention, budget, layer):
        assert mandatory <= kept <= seen
        need, held = mass * sum(shares[tile] for tile in seen), sum(shares[tile] for tile in kept)
        assert held >= need - CLOSE
        if mass == 1.0:
            assert kept == seen
        if chosen := kept - mandatory:
            least = min(shares[tile] for tile in chosen)
            assert least >= max((shares[tile] for tile in seen - kept), default=0.0)
            assert mass == 1.0 or held - least < need + CLOSE


@often
@given(dense_layers, st.floats(0.001, 1.0))
def test_rows_take_the_tiles_with_a_share_of_the_best_ones(layer: Layer, budget: float) -> None:
    budget = round(budget, 6)
    alpha = FlashPrefill.alpha(budget)
    for kept, shares, mandatory, seen in taken(FlashPrefill, budget, layer):
        above = {tile for tile in seen if shares[tile] >= torch.tensor(alpha) * torch.tensor(max(shares))}
        assert kept == above | mandatory


@pytest.mark.parametrize("kind", RULES.values())
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_numbers_leave_a_list_that_kernels_can_read(kind: type[PrefillRule], bad: float) -> None:
    layer = make_layer([Dense()], Chunk((0,), (700,)), TILES[0])
    layer.q_BHSD[0, :, 500, 3] = bad
    for kept, _, mandatory, seen in taken(kind, 0.4, layer):
        assert mandatory <= kept <= seen
