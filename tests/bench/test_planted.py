"""What is planted must be where the softmax mass is, by brute force, and what is said of an index must be so: else the
bench times attention to nothing."""

import math

import pytest
import torch

from sparsekv.bench.kernels import families_of
from sparsekv.bench.planted import Planted, check_rows, plant, sample_rows
from sparsekv.bench.structure import FAMILIES, SINK, diffuse_pattern
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.patterns import TileShape

ALL = "+".join(FAMILIES)
S, TILE = 1024, TileShape(query=64, key=64)


def planted(mix: str, heads: int = 2, kv_heads: int = 1, **options) -> Planted:
    asked = {"length": S, "density": 0.35, "tile": TILE, "head_dim": 128, "seed": 3, "dtype": torch.float32} | options
    return plant(families_of(mix, heads), kv_heads=kv_heads, device=torch.device("cpu"), **asked)


def weights(p: Planted, head: int) -> torch.Tensor:
    """The whole softmax of one head: [S, S]."""
    group = p.q_BHSD.shape[1] // p.k_BGSD.shape[1]
    q, k = p.q_BHSD[0, head].double(), p.k_BGSD[0, head // group].double()
    causal = torch.ones(len(q), len(q), dtype=torch.bool).tril()
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


def kept(p: Planted, head: int, of: int | None = None) -> float:
    """Mass of a head on what was promised of it, or of another one."""
    seen = promised(p, head if of is None else of)
    return float((weights(p, head) * seen).sum(-1)[S // 2 :].mean())


def index_of(p: Planted, patterns):
    return build_index(patterns, p.q_BHSD, p.k_BGSD, p.chunk, p.tile, scale=p.scale)


@pytest.mark.parametrize("mix", [*FAMILIES, ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planted_places_hold_the_bulk_of_the_softmax_of_every_head(mix, dtype):
    p = planted(mix, heads=4, kv_heads=2, dtype=dtype)
    for head, truth in enumerate(p.heads):
        assert kept(p, head) > (0.75 if truth.bands else 0.9), truth.sizes.family
        assert promised(p, head).sum() / (S * (S + 1) / 2) < 0.35, truth.sizes.family  # few places, not all of them
    assert len(p.heads) == 4


def test_heads_of_a_group_share_keys_and_have_structure_of_their_own_in_columns_and_diagonals():
    p = planted("vertical_slash", heads=4)
    assert p.k_BGSD.shape[1] == 1
    assert len({truth.bands for truth in p.heads}) == len({tuple(truth.columns_C.tolist()) for truth in p.heads}) == 4
    assert kept(p, 0) > kept(p, 0, of=1) + 0.3
    mass, (first, stop) = weights(p, 0), p.heads[0].bands[0]
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    assert (mass * ((i - j >= first) & (i - j < stop)))[stop:].sum(-1).mean() > 0.05
    assert mass[:, p.heads[0].columns_C][stop:].sum(-1).mean() > 0.05


@pytest.mark.parametrize("mix", FAMILIES)
def test_the_builders_find_it_at_about_the_stated_density(mix):
    p = planted(mix, heads=2, length=2048, density=0.3)
    assert float(density(index_of(p, p.patterns), p.chunk)) == pytest.approx(0.3, rel=0.25)


# --- mass of an index -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def p():
    return planted(ALL, 4, 2, head_dim=64, seed=0)


def test_mass_and_error_are_those_of_the_oracle(p):
    index, rows = index_of(p, p.patterns), list(sample_rows(S, 7))
    oracle = reference_attention(*p.tensors, mask_of(index, p.chunk, S), scale=p.scale)
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(1, 4, S, S)
    whole = reference_attention(*p.tensors, causal, scale=p.scale)
    mass = (oracle.lse_BHS - whole.lse_BHS).exp()[:, :, rows].mean()
    checked = check_rows(p, index, rows, oracle.out_BHSD, block_elements=3 * S)  # three rows at a time
    assert checked.mass == pytest.approx(float(mass), rel=1e-4)
    out = prefill_attention(*p.tensors, index, p.chunk, scale=p.scale, backend="cpu").out_BHSD
    assert max(checked.error, check_rows(p, index, rows, out).error) < 1e-4
    for value, error in ((out[0, 2, rows[3], 5] + 0.5, 0.5), (torch.nan, math.inf), (torch.inf, math.inf)):
        wrong = out.clone()
        wrong[0, 2, rows[3], 5] = value
        assert check_rows(p, index, rows, wrong).error == pytest.approx(error, abs=1e-3)


# --- budgets and structure for a density ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pattern_of_a_density_computes_about_that_share_where_attention_is_diffuse(family):
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 4096, 32, generator=random) for _ in range(2))
    chunk, pattern = Chunk.uniform(1, 0, 4096), diffuse_pattern(family, 4096, 0.3, TILE)
    index = build_index([pattern], q, k, chunk, TILE, scale=32**-0.5, builder="torch")
    assert float(density(index, chunk)) == pytest.approx(0.3, rel=0.2)
