"""Heads with planted attention each get the pattern that fits them: fit, score, collect and allocate together."""

import numpy as np
import pytest
import torch
from planner_models import TILE, blocky_head, local_head, made_up_cost, quick_options, striped_head
from planner_profiles import made_up_model

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.allocate import allocate
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.head_errors import CandidateScore, Layer, Rows, score_candidates
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.resume import LayerRecord, length_means
from sparsekv.planner.profile.search_space import Aim, Prefix, aims, fit_to_target, search_space, vertical_slash_range
from sparsekv.plans.patterns import AShape, BlockSparse, VerticalSlash

LENGTH, SIZE, TARGET = 3072, 64, 0.2
OPTIONS = quick_options(lengths=(LENGTH,), target_density=(TARGET,), levels=(1.0,))


def planted() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of three heads: local, striped, blocky."""
    generator = torch.Generator().manual_seed(3)
    heads = [make(LENGTH, SIZE, generator) for make in (local_head, striped_head, blocky_head)]
    return torch.stack([q for q, _ in heads])[None], torch.stack([k for _, k in heads])[None]


@pytest.fixture(scope="module")
def prefix() -> Prefix:
    return Prefix(*planted(), Chunk.uniform(1, 0, LENGTH), TILE, scale=1.0)


def layer_of(prefix: Prefix, stride: int) -> Layer:
    generator = torch.Generator().manual_seed(4)
    v_BGSD = torch.randn(prefix.k_BGSD.shape, generator=generator)
    projection_WZ = torch.randn(96, 3 * SIZE, generator=generator)
    rows = Rows.of(LENGTH, LENGTH - 70, TILE, stride)
    return Layer(prefix, v_BGSD, projection_WZ, rows, "cpu")


def profile_of(prefix: Prefix, found: tuple[Aim, ...], scores: list[CandidateScore], patterns: list) -> Profile:
    """A profile of one layer with these scores."""

    def table(rows: list[np.ndarray]) -> tuple:
        return tuple(tuple(row.tolist()) for row in rows)

    record = LayerRecord(
        length=LENGTH,
        sample=0,
        layer=0,
        patterns=tuple(patterns),
        error=table([score.error_H for score in scores]),
        tail_error=table([score.tail_error_H for score in scores]),
        mass=table([score.mass_H for score in scores]),
        tiles=table([score.tiles_H for score in scores]),
        columns=table([score.columns_H for score in scores]),
    )
    entry = length_means(LENGTH, [LENGTH], [aim.candidate for aim in found], None, [[record]])
    (group,) = made_up_model(layers=1).attention
    shape = group.model_copy(update={"heads": len(scores[0].error_H), "kv_heads": 1})
    model = made_up_model().model_copy(update={"attention": (shape,)})
    digest = "sha256:" + "0" * 64
    return Profile(
        model=model,
        device="x",
        dtype="float32",
        backend="cpu",
        tile=TILE,
        seed=0,
        samples=1,
        calibration=digest,
        lengths=(entry,),
    )


@pytest.fixture(scope="module", params=[1, 4], ids=["all rows", "sampled rows"])
def searched(prefix: Prefix, request: pytest.FixtureRequest) -> Profile:
    found = aims(OPTIONS, LENGTH)
    patterns = [fit_to_target(prefix, aim.patterns, aim.density * prefix.causal_tiles) for aim in found]
    return profile_of(prefix, found, score_candidates(layer_of(prefix, request.param), patterns), patterns)


def test_each_planted_head_gets_its_own_pattern(searched: Profile) -> None:
    bucket = allocate(searched, made_up_cost(), OPTIONS).bucket(LENGTH)
    assert [type(pattern) for pattern in bucket.patterns(0, 3)] == [AShape, VerticalSlash, BlockSparse]


def test_the_pattern_that_fits_a_head_loses_little_of_it(searched: Profile) -> None:
    scores = searched.lengths[0].layers[0]
    family = [candidate.family for candidate in searched.lengths[0].candidates]
    for head, own in enumerate(("a_shape", "vertical_slash", "block_sparse")):
        best = min(error[head] for error, name in zip(scores.error, family, strict=True) if name == own)
        others = min(error[head] for error, name in zip(scores.error, family, strict=True) if name != own)
        assert best < 0.25 * max(others, 1e-9) or best < 0.02, (own, best, others)


def test_a_search_without_the_family_a_head_needs_loses_it(searched: Profile) -> None:
    scores = searched.lengths[0].layers[0]
    family = [candidate.family for candidate in searched.lengths[0].candidates]
    without = min(error[2] for error, name in zip(scores.error, family, strict=True) if name != "block_sparse")
    assert without > 0.05


@pytest.mark.parametrize("ray", search_space(OPTIONS, LENGTH), ids=lambda ray: ray.name)
def test_no_head_is_fitted_above_the_target_cost(prefix: Prefix, ray) -> None:
    target = 0.4 * prefix.causal_tiles
    patterns = fit_to_target(prefix, ray, target)
    smallest = prefix.cost((ray.pattern(0, LENGTH),) * 3)
    cost = prefix.cost(patterns)
    assert np.all((cost <= target) | np.isclose(cost, smallest))


def test_one_size_more_would_cost_more_than_the_target(prefix: Prefix) -> None:
    ray = vertical_slash_range(30, 2048)
    target = 0.3 * prefix.causal_tiles
    fitted = fit_to_target(prefix, ray, target)
    sizes = [next(n for n in range(ray.sizes(LENGTH)) if ray.pattern(n, 64).slash == p.slash) for p in fitted]
    roomy = tuple(ray.pattern(size, LENGTH) for size in sizes)
    larger = prefix.cost(tuple(ray.pattern(size + 1, LENGTH) for size in sizes))
    limited = prefix.cost(fitted) < prefix.cost(roomy) - 1e-9  # heads that the row bound holds back instead
    assert np.all((larger > target) | limited)


def test_rows_of_another_prompt_cannot_cost_much_more(prefix: Prefix) -> None:
    """Scattered scores elsewhere: the row bound found on the first prompt holds."""
    fitted = fit_to_target(prefix, vertical_slash_range(30, 2048), 0.3 * prefix.causal_tiles)
    generator = torch.Generator().manual_seed(9)
    other = Prefix(
        torch.randn(prefix.q_BHSD.shape, generator=generator),
        torch.randn(prefix.k_BGSD.shape, generator=generator),
        prefix.chunk,
        TILE,
        scale=1.0,
    )
    rows = other.index(fitted).counts_BHT[0].amax(-1).tolist()
    assert all(row <= pattern.max_tiles.tokens // TILE.key for row, pattern in zip(rows, fitted, strict=True))


def test_the_published_search_starts_from_the_published_numbers() -> None:
    rays = search_space(PlanOptions(preset="minference"), 131072)
    names = [ray.name for ray in rays]
    assert names == [
        "a_shape(1024, 4096)",
        "vertical_slash(30, 2048)",
        "vertical_slash(100, 1800)",
        "vertical_slash(500, 1500)",
        "vertical_slash(3000, 200)",
        "block_sparse",
    ]
    reached = {
        (p.vertical.tokens, p.slash.tokens)
        for ray in rays[1:5]
        for p in (ray.pattern(size, 64) for size in range(ray.sizes(131072)))
    }
    assert {(30, 2048), (100, 1800), (500, 1500), (3000, 200)} <= reached
    window = {rays[0].pattern(size, 64).window.tokens for size in range(rays[0].sizes(131072))}
    assert 4096 in window


def test_the_published_target_is_its_a_shape() -> None:
    (aim, *_) = aims(PlanOptions(preset="minference", lengths=(32768,)).settled(32768, "cpu"), 32768)
    rows = [min(t + 1, 16 + 64 + (1 if t >= 80 else 0)) for t in range(512)]
    assert aim.density == pytest.approx(sum(rows) / sum(range(1, 513)), rel=0.01)
