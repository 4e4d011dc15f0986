"""What is planted must be where the softmax mass is, by brute force; else the bench times attention to nothing."""

import math

import pytest
import torch

from sparsekv.bench.kernels import families_of
from sparsekv.bench.planted import Planted, check_plantable, plant
from sparsekv.bench.structure import FAMILIES, SINK
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import density
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Dense, TileShape

ALL = "+".join(FAMILIES)
S, TILE = 1024, TileShape(query=64, key=64)


def planted(mix: str, heads: int = 2, kv_heads: int = 1, **options) -> Planted:
    asked = {"length": S, "density": 0.35, "tile": TILE, "head_dim": 128, "seed": 3}
    return plant(
        families_of(mix, heads),
        kv_heads=kv_heads,
        device=torch.device("cpu"),
        **{"dtype": torch.float32} | asked | options,
    )


def weights(p: Planted, head: int) -> torch.Tensor:
    """The whole softmax of one head: [S, S]."""
    group = p.q_BHSD.shape[1] // p.k_BGSD.shape[1]
    q, k = p.q_BHSD[0, head].double(), p.k_BGSD[0, head // group].double()
    length = len(q)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~causal, -torch.inf).softmax(-1)


def promised(p: Planted, head: int) -> torch.Tensor:
    """Where the truth of a head says that attention goes, key by key: bool [S, S]."""
    truth, length = p.heads[head], p.chunk.longest
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (j < SINK).expand(length, length).clone()
    seen |= i - j < truth.sizes.window
    for first, stop in truth.bands:
        seen |= (i - j >= first) & (i - j < stop)
    seen[:, truth.columns_C] = True
    if len(truth.cluster_M):
        looks_at_SZ = truth.looks_at_TZ[torch.arange(length) // p.tile.query]
        hot_SM = (looks_at_SZ[:, :, None] == truth.cluster_M).any(1)
        seen |= hot_SM[:, torch.arange(length) // p.tile.key]
    return seen & (j <= i)


@pytest.mark.parametrize("mix", [*FAMILIES, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planted_places_hold_the_bulk_of_the_softmax_of_every_head(mix, dtype):
    p = planted(mix, heads=4, kv_heads=2, dtype=dtype)
    for head, truth in enumerate(p.heads):
        seen = promised(p, head)
        kept = (weights(p, head) * seen).sum(-1)[S // 2 :].mean()
        share = seen.sum() / (S * (S + 1) / 2)
        assert kept > (0.75 if truth.bands else 0.9), truth.sizes.family
        assert share < 0.35, truth.sizes.family  # few places, not all of them
    assert len(p.heads) == 4


def test_random_queries_and_keys_hold_no_such_mass():
    p = planted("vertical_slash")
    p.q_BHSD.normal_()
    p.k_BGSD.normal_()
    kept = (weights(p, 0) * promised(p, 0)).sum(-1)[S // 2 :].mean()
    assert kept < 0.35


def test_heads_of_a_group_share_keys_and_have_structure_of_their_own():
    p = planted("vertical_slash", heads=4)
    assert p.k_BGSD.shape[1] == 1
    assert len({truth.bands for truth in p.heads}) == 4
    assert len({tuple(truth.columns_C.tolist()) for truth in p.heads}) == 4
    own = (weights(p, 0) * promised(p, 0)).sum(-1)[S // 2 :].mean()
    foreign = (weights(p, 0) * promised(p, 1)).sum(-1)[S // 2 :].mean()
    assert own > foreign + 0.3


def test_columns_and_diagonals_each_get_a_share_of_the_mass():
    p = planted("vertical_slash")
    mass, (first, stop) = weights(p, 0), p.heads[0].bands[0]
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    rows = slice(stop, None)
    on_run = (mass * ((i - j >= first) & (i - j < stop)))[rows].sum(-1).mean()
    on_columns = mass[:, p.heads[0].columns_C][rows].sum(-1).mean()
    assert on_run > 0.05
    assert on_columns > 0.05


@pytest.mark.parametrize("mix", FAMILIES)
def test_the_builders_find_it_at_about_the_stated_density(mix):
    p = planted(mix, heads=2, length=2048, density=0.3)
    index = build_index(p.patterns, p.q_BHSD, p.k_BGSD, p.chunk, p.tile, scale=p.scale)
    assert float(density(index, p.chunk)) == pytest.approx(0.3, rel=0.25)


def test_a_seed_gives_the_same_structure_and_numbers_and_another_one_others():
    first, again, other = planted(ALL, heads=4), planted(ALL, heads=4), planted(ALL, heads=4, seed=4)
    assert torch.equal(first.q_BHSD, again.q_BHSD)
    assert torch.equal(first.k_BGSD, again.k_BGSD)
    assert torch.equal(first.v_BGSD, again.v_BGSD)
    assert first.heads[0].bands == again.heads[0].bands != other.heads[0].bands


def test_blocks_of_rows_do_not_show_in_the_structure():
    whole, pieces = planted("vertical_slash"), planted("vertical_slash", block_rows=300)
    assert whole.heads[0].bands == pieces.heads[0].bands
    assert (weights(pieces, 0) * promised(pieces, 0)).sum(-1)[S // 2 :].mean() > 0.75


def test_tensors_lie_token_by_token_as_models_make_them():
    p = planted(ALL, heads=4, kv_heads=2)
    assert p.q_BHSD.transpose(1, 2).is_contiguous()
    assert p.k_BGSD.transpose(1, 2).is_contiguous()


def test_a_ragged_length_is_planted_to_its_end():
    p = planted(ALL, heads=4, length=S + 37)
    assert p.q_BHSD.shape[2] == p.v_BGSD.shape[2] == p.chunk.longest == S + 37
    assert torch.isfinite(p.q_BHSD).all()
    dense = build_index((Dense(),) * 4, p.q_BHSD, p.k_BGSD, p.chunk, p.tile, scale=p.scale)
    assert float(density(dense, p.chunk)) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple"),
        ({"head_dim": 16}, "head size"),
        ({"length": 100}, "tiles"),
        ({"density": 1.5}, "density"),
        ({"density": 0.0}, "density"),
    ],
)
def test_what_nothing_can_be_planted_in_is_refused(change, word):
    asked = {"heads": 2, "kv_heads": 1, "head_dim": 64, "length": S, "density": 0.3} | change
    with pytest.raises(UsageError, match=word):
        check_plantable(**asked, tile=TILE)
