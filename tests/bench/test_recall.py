"""Recall and mass of an index: held to indices whose answer is known."""

from dataclasses import replace

import pytest
import torch

from sparsekv.bench.kernels import families_of
from sparsekv.bench.planted import check_rows, find_planted, plant, sample_rows
from sparsekv.bench.structure import FAMILIES
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.plans.patterns import AShape, Dense, TileShape, tokens

S, TILE = 1024, TileShape(query=64, key=64)


def planted(mix, heads, kv_heads):
    return plant(
        families_of(mix, heads),
        kv_heads=kv_heads,
        head_dim=64,
        length=S,
        density=0.35,
        tile=TILE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def p():
    return planted("+".join(FAMILIES), 4, 2)


def index_of(p, patterns):
    return build_index(patterns, p.q_BHSD, p.k_BGSD, p.chunk, p.tile, scale=p.scale)


def test_a_dense_index_finds_everything_and_keeps_all_mass(p):
    index = index_of(p, (Dense(),) * 4)
    found = find_planted(p, index)
    assert (found.columns, found.diagonals, found.tiles) == (1, 1, 1)
    assert check_rows(p, index, sample_rows(S)).mass == pytest.approx(1)


def test_an_index_that_looks_elsewhere_finds_next_to_nothing(p):
    index = index_of(p, (AShape(sink=tokens(1), window=tokens(1)),) * 4)  # the first tile, the diagonal, one more
    found = find_planted(p, index)
    assert found.diagonals == 0
    assert 0 < found.columns < 0.4
    assert 0 < found.tiles < 0.5
    assert check_rows(p, index, sample_rows(S)).least < 0.6


def test_the_shipped_builders_find_what_was_planted(p):
    index = index_of(p, p.patterns)
    found = find_planted(p, index)
    assert found.columns > 0.9
    assert found.diagonals > 0.9
    assert found.tiles > 0.9
    assert check_rows(p, index, sample_rows(S)).least > 0.9


def test_what_no_head_has_is_none_and_not_zero(p):
    only = planted("a_shape", 1, 1)
    found = find_planted(only, index_of(only, only.patterns))
    assert (found.columns, found.diagonals, found.tiles) == (None, None, None)


def test_mass_and_error_are_those_of_the_oracle(p):
    index, rows = index_of(p, p.patterns), list(sample_rows(S, 7))
    mask = mask_of(index, p.chunk, S)
    oracle = reference_attention(p.q_BHSD, p.k_BGSD, p.v_BGSD, mask, scale=p.scale)
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(1, 4, S, S)
    whole = reference_attention(p.q_BHSD, p.k_BGSD, p.v_BGSD, causal, scale=p.scale)
    mass = (oracle.lse_BHS - whole.lse_BHS).exp()[:, :, rows].mean()
    checked = check_rows(p, index, rows, oracle.out_BHSD, block_elements=3 * S)  # three rows at a time
    assert checked.mass == pytest.approx(float(mass), rel=1e-4)
    assert checked.error < 1e-4
    wrong = oracle.out_BHSD.clone()
    wrong[0, 2, rows[3], 5] += 0.5
    assert check_rows(p, index, rows, wrong).error == pytest.approx(0.5, abs=1e-3)


def test_a_backend_that_computes_the_index_has_no_error(p):
    index = index_of(p, p.patterns)
    out = prefill_attention(p.q_BHSD, p.k_BGSD, p.v_BGSD, index, p.chunk, scale=p.scale, backend="cpu").out_BHSD
    assert check_rows(p, index, sample_rows(S, 9), out).error < 1e-4


def test_rows_are_spread_to_the_last_one_also_where_there_are_few():
    assert sample_rows(3, 8) == (0, 1, 2)
    for length in (100, 1000, 131072):
        rows = sample_rows(length)
        assert rows[-1] == length - 1
        assert all(place * length // 32 <= row < (place + 1) * length // 32 for place, row in enumerate(rows))


@pytest.mark.parametrize("tile", [64, 128])
def test_rows_lie_at_different_places_of_their_tiles(tile):
    assert len({row % tile for row in sample_rows(131072)}) > 16


def test_a_listed_column_that_the_row_does_not_compute_is_not_found(p):
    index = index_of(p, p.patterns)
    tiles = index_of(p, (AShape(sink=tokens(1), window=tokens(1)),) * 4)
    listed = replace(tiles, columns_BHC=index.columns_BHC, live_BHTN=torch.zeros_like(index.live_BHTN))
    assert index.columns_BHC.shape[2] > 0
    assert find_planted(p, listed).columns == find_planted(p, tiles).columns < 0.4


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_output_that_is_no_number_is_as_wrong_as_can_be(p, value):
    index = index_of(p, p.patterns)
    out = prefill_attention(p.q_BHSD, p.k_BGSD, p.v_BGSD, index, p.chunk, scale=p.scale, backend="cpu").out_BHSD
    out[0, 1, 511] = value
    assert check_rows(p, index, (255, 511, 1023), out).error == torch.inf
