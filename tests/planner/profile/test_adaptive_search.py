"""Adaptive patterns in the search: their ray, the heads that need them, and a plan made of nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from planner_models import TILE, dense_of, made_up_cost, quick_options, uneven_head, unit_rows
from torch_threads import torch_threads

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.allocate import allocate
from sparsekv.planner.options import FAMILIES, KNOWN_FAMILIES, PlanOptions
from sparsekv.planner.profile.head_errors import CandidateScore, Layer, Rows, score_candidates
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.profile.search_space import (
    PatternRange,
    Patterns,
    Prefix,
    adaptive_range,
    fit_to_target,
    search_space,
)
from sparsekv.planner.settled import settle
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Adaptive, Dense
from sparsekv.runtime.hf.load import LoadedModel

LENGTH, SIZE = 2048, 64
RAYS = (adaptive_range("antidiagonal"), adaptive_range("pooled"))


def prefix_of(*heads: tuple[torch.Tensor, torch.Tensor]) -> Prefix:
    q_BHSD, k_BHSD = (torch.stack(rows)[None] for rows in zip(*heads, strict=True))
    return Prefix(q_BHSD, k_BHSD, Chunk.uniform(1, 0, LENGTH), TILE, scale=1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def prefix() -> Prefix:
    """Two heads whose row tiles need unequally many tiles, and one without any structure."""
    generator = torch.Generator().manual_seed(3)
    noise = (2.0 * unit_rows(LENGTH, SIZE, generator), unit_rows(LENGTH, SIZE, generator))
    return prefix_of(*(uneven_head(LENGTH, SIZE, generator) for _ in range(2)), noise)


def scores_at(prefix: Prefix, target: float, stride: int) -> dict[str, CandidateScore]:
    generator = torch.Generator().manual_seed(4)
    v_BGSD, gradient_BHSD = (torch.randn(prefix.k_BGSD.shape, generator=generator) for _ in range(2))
    rays = search_space(quick_options(families=("a_shape", "block_sparse", "adaptive")), LENGTH)
    fitted = [fit_all(prefix, ray, target * prefix.causal_tiles) for ray in rays]
    rows = Rows.of(LENGTH, LENGTH - 70, TILE, stride)
    scores = score_candidates(Layer(prefix, v_BGSD, dense_of(prefix, v_BGSD), gradient_BHSD, rows, "cpu"), fitted)
    return {ray.name: score for ray, score in zip(rays, scores, strict=True)}


def fit_all(prefix: Prefix, ray: PatternRange, target: float) -> Patterns:
    return fit_to_target(prefix, [ray] * prefix.heads, [target] * prefix.heads)


@pytest.mark.parametrize("ray", RAYS, ids=lambda ray: ray.name)
def test_a_larger_size_never_computes_less(prefix: Prefix, ray: PatternRange) -> None:
    masses = [ray.pattern(size, LENGTH).mass for size in range(ray.sizes(LENGTH))]
    assert masses == sorted(masses)
    assert masses[0] < 0.05
    assert masses[-1] == 1.0
    sizes = (*range(0, len(masses), 40), len(masses) - 1)
    costs = [prefix.cost((ray.pattern(size, 1024),) * 3) for size in sizes]
    assert (np.diff(np.array(costs), axis=0) >= 0).all()
    assert costs[-1].min() > costs[0].max()


@pytest.mark.parametrize("ray", RAYS, ids=lambda ray: ray.name)
@pytest.mark.parametrize("target", [0.3, 0.6])
def test_every_head_is_fitted_within_its_target_with_a_mass_of_its_own(
    prefix: Prefix, ray: PatternRange, target: float
) -> None:
    fitted = fit_all(prefix, ray, target * prefix.causal_tiles)
    assert (prefix.cost(fitted) <= target * prefix.causal_tiles).all()
    assert fitted[0].mass > fitted[2].mass  # the same tiles hold less of noise
    assert all(pattern.max_tiles.tokens < LENGTH for pattern in fitted)


def test_rows_that_need_unequally_many_tiles_are_won_by_adaptive(prefix: Prefix) -> None:
    for stride in (1, 4):
        scores = scores_at(prefix, 0.35, stride)
        for head in (0, 1):
            best = min(scores[ray.name].damage_H[head] for ray in RAYS)
            others = [score.damage_H[head] for name, score in scores.items() if not name.startswith("adaptive")]
            assert len(others) == 2
            assert best < 0.1 * min(others), (stride, head)


def test_adaptive_is_searched_when_asked_for_and_not_in_the_published_search() -> None:
    def families(**asked: object) -> set[str]:
        options = settle(PlanOptions(lengths=(4096,), **asked), 4096, "cpu")
        return {ray.family for ray in search_space(options, 4096)}

    assert families() == set(FAMILIES)
    assert families(families=("adaptive",)) == {"adaptive"}
    assert families(families=KNOWN_FAMILIES) == set(KNOWN_FAMILIES)
    with pytest.raises(UsageError, match="families"):
        PlanOptions(preset="minference", families=("adaptive",))


def test_a_profile_of_adaptive_alone_is_allocated_to_every_head(loaded: LoadedModel) -> None:
    options = quick_options(families=("adaptive",), phases=("prefill",), target_density=(0.75,))
    options = settle(options, loaded.info.context_length, "cpu")
    found = profile(loaded, options)
    bucket = allocate(found, made_up_cost(), options).bucket(options.lengths[0])
    patterns = [pattern for layer in range(loaded.info.layers) for pattern in bucket.patterns(layer, 4)]
    assert len(patterns) == 12
    assert {type(pattern) for pattern in patterns} <= {Adaptive, Dense}
    assert Adaptive in map(type, patterns)
