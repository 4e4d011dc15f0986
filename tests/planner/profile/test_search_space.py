"""Heads with planted attention each get the pattern that fits them: fit, score, collect and allocate together."""

import numpy as np
import pytest
import torch
from planner_models import TILE, blocky_head, dense_of, local_head, made_up_prices, quick_options, striped_head
from planner_profiles import as_settled, made_up_model, made_up_profile

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.planner.allocate import allocate
from sparsekv.planner.options import KNOWN_FAMILIES, PRESET_FAMILIES, PlanOptions, settle
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.planner.profile.head_errors import CandidateScore, Layer, SampledRows, score_candidates
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.resume import LayerRecord, length_means
from sparsekv.planner.profile.search_space import (
    Aim,
    CommonPrefix,
    Patterns,
    aims,
    fit_to_target,
    screened,
    search_space,
    slots,
)
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import AShape, BlockSparse, PatternRange, TileShape, VerticalSlash, mandatory_density

(TILES_KEPT,) = BlockSparse.ranges(TILE, 0)
LENGTH, SIZE, TARGET = 3072, 64, 0.2
OPTIONS = as_settled(
    quick_options(lengths=(LENGTH,), target_density=(TARGET,), levels=(1.0,), families=PRESET_FAMILIES)
)


def planted() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of three heads: local, striped, blocky."""
    generator = torch.Generator().manual_seed(3)
    heads = [make(LENGTH, SIZE, generator) for make in (local_head, striped_head, blocky_head)]
    return torch.stack([q for q, _ in heads])[None], torch.stack([k for _, k in heads])[None]


@pytest.fixture(scope="module")
def prefix() -> CommonPrefix:
    return CommonPrefix(*planted(), Chunk.uniform(1, 0, LENGTH), TILE, scale=1.0)


def layer_of(prefix: CommonPrefix, stride: int) -> Layer:
    generator = torch.Generator().manual_seed(4)
    v_BGSD, gradient_BHSD = (torch.randn(prefix.k_BGSD.shape, generator=generator) for _ in range(2))
    rows = SampledRows.of(Chunk.uniform(1, 0, LENGTH), LENGTH - 70, TILE, stride)
    return Layer(prefix, v_BGSD, dense_of(prefix, v_BGSD), gradient_BHSD, rows, "cpu")


def fit_all(prefix: CommonPrefix, patterns: PatternRange, target: float) -> Patterns:
    """The patterns of one range for all heads, at one target."""
    return fit_to_target(prefix, [patterns] * prefix.heads, [target] * prefix.heads)


def profile_of(found: tuple[Aim, ...], scores: list[CandidateScore], patterns: list[Patterns]) -> Profile:
    """A profile of one layer with these scores."""

    def table(rows: list[np.ndarray]) -> tuple:
        return tuple(tuple(row.tolist()) for row in rows)

    record = LayerRecord(
        length=LENGTH,
        sample=0,
        layer=0,
        candidates=tuple((number,) * 3 for number in range(len(found))),
        patterns=tuple(patterns),
        damage=table([score.damage_H for score in scores]),
        tiles=table([score.tiles_H for score in scores]),
        columns=table([score.columns_H for score in scores]),
    )
    prompt = CalibrationPrompt(np.zeros(LENGTH, np.int32), LENGTH - 8)
    entry = length_means(LENGTH, [prompt], [aim.candidate for aim in found], None, [[record]])
    (group,) = made_up_model(layers=1).attention
    shape = group.model_copy(update={"heads": 3, "kv_heads": 1})
    return made_up_profile(entry, model=made_up_model().model_copy(update={"attention": (shape,)}))


@pytest.fixture(scope="module", params=[1, 4], ids=["all rows", "sampled rows"])
def searched(prefix: CommonPrefix, request: pytest.FixtureRequest) -> Profile:
    found = aims(OPTIONS, LENGTH)
    patterns = [fit_all(prefix, aim.patterns, aim.density * prefix.causal_tiles) for aim in found]
    return profile_of(found, score_candidates(layer_of(prefix, request.param), patterns), patterns)


def test_each_planted_head_gets_its_own_pattern(searched: Profile) -> None:
    bucket = allocate(searched, made_up_prices(), OPTIONS).bucket(LENGTH)
    assert [type(pattern) for pattern in bucket.patterns(0, 3)] == [AShape, VerticalSlash, BlockSparse]


@pytest.mark.parametrize("ray", search_space(OPTIONS, LENGTH), ids=lambda ray: ray.name)
def test_no_head_is_fitted_above_the_target_cost(prefix: CommonPrefix, ray) -> None:
    target = 0.4 * prefix.causal_tiles
    patterns = fit_all(prefix, ray, target)
    smallest = prefix.cost((ray.pattern(0, LENGTH),) * 3)
    cost = prefix.cost(patterns)
    assert np.all((cost <= target) | np.isclose(cost, smallest))


def test_one_size_more_would_cost_more_than_the_target(prefix: CommonPrefix) -> None:
    ray = VerticalSlash.in_ratio(30, 2048)
    target = 0.3 * prefix.causal_tiles
    fitted = fit_all(prefix, ray, target)
    sizes = [next(n for n in range(ray.sizes(LENGTH)) if ray.pattern(n, 64).slash == p.slash) for p in fitted]
    roomy = tuple(ray.pattern(size, LENGTH) for size in sizes)
    larger = prefix.cost(tuple(ray.pattern(size + 1, LENGTH) for size in sizes))
    limited = prefix.cost(fitted) < prefix.cost(roomy) - 1e-9  # heads that the row bound holds back instead
    assert np.all((larger > target) | limited)


def test_rows_of_another_prompt_cannot_cost_much_more(prefix: CommonPrefix) -> None:
    """Scattered scores elsewhere: the row bound found on the first prompt holds."""
    fitted = fit_all(prefix, VerticalSlash.in_ratio(30, 2048), 0.3 * prefix.causal_tiles)
    generator = torch.Generator().manual_seed(9)
    other = CommonPrefix(
        torch.randn(prefix.q_BHSD.shape, generator=generator),
        torch.randn(prefix.k_BGSD.shape, generator=generator),
        prefix.chunk,
        TILE,
        scale=1.0,
    )
    rows = other.index(fitted).counts_BHT[0].amax(-1).tolist()
    assert all(row <= pattern.max_tiles.tokens // TILE.key for row, pattern in zip(rows, fitted, strict=True))


def test_the_published_search_starts_from_the_published_numbers() -> None:
    rays = search_space(settle(PlanOptions(preset="minference"), 131072, "cpu"), 131072)
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
    (aim, *_) = aims(settle(PlanOptions(preset="minference", lengths=(32768,)), 32768, "cpu"), 32768)
    rows = [min(t + 1, 16 + 64 + (1 if t >= 80 else 0)) for t in range(512)]
    assert aim.density == pytest.approx(sum(rows) / sum(range(1, 513)), rel=0.01)


def test_heads_fitted_together_get_what_each_gets_alone(prefix: CommonPrefix) -> None:
    ranges = (AShape.widening(64, 4096), VerticalSlash.in_ratio(30, 2048), TILES_KEPT)
    targets = [share * prefix.causal_tiles for share in (0.15, 0.3, 0.6)]
    alone = [fit_all(prefix, one, target)[head] for head, (one, target) in enumerate(zip(ranges, targets, strict=True))]
    assert fit_to_target(prefix, ranges, targets) == tuple(alone)
    mixed = (TILES_KEPT, TILES_KEPT, VerticalSlash.in_ratio(4096, 0))
    alone = [fit_all(prefix, one, target)[head] for head, (one, target) in enumerate(zip(mixed, targets, strict=True))]
    assert fit_to_target(prefix, mixed, targets) == tuple(alone)


LADDER = aims(
    OPTIONS.but(target_density=(0.4,), levels=(0.5, 0.7, 1.0, 1.4, 2.0)),
    LENGTH,
)
NAMES = list(dict.fromkeys(aim.patterns.name for aim in LADDER))


def test_the_first_prompt_compares_every_range_at_the_same_densities_within_the_ladder() -> None:
    densities = sorted({aim.density for aim in LADDER})
    assert len(densities) == 5
    of_range = {
        name: [LADDER[n].density for n in screened(LADDER) if LADDER[n].patterns.name == name] for name in NAMES
    }
    assert len(set(map(tuple, of_range.values()))) == 1
    compared = of_range[NAMES[0]]
    assert len(compared) == 2
    assert densities[0] < min(compared) < max(compared) < densities[-1]


def test_each_head_goes_on_with_every_density_of_its_two_best_ranges() -> None:
    compared = screened(LADDER)
    names = [LADDER[number].patterns.name for number in compared]
    best = [(NAMES[1], NAMES[4]), (NAMES[5], NAMES[0]), (NAMES[2], NAMES[3])]
    damage_CH = np.ones((len(compared), 3))
    for head, (first, second) in enumerate(best):
        for row, name in enumerate(names):
            damage_CH[row, head] = {first: 0.1, second: 0.2}.get(name, 1.0)
    # One density at which another range does much better does not outweigh the other, at which it does much worse.
    rows = [row for row, name in enumerate(names) if name == NAMES[2]]
    damage_CH[rows, 0] = 1e-3, 1e3
    found_KH = slots(LADDER, compared, damage_CH)
    assert found_KH.shape == (10, 3)
    for head, pair in enumerate(best):
        wanted = {n for n, aim in enumerate(LADDER) if aim.patterns.name in pair}
        assert set(found_KH[:, head].tolist()) == wanted


def test_ranges_that_do_the_same_damage_are_taken_in_the_order_of_the_search() -> None:
    compared = screened(LADDER)
    for damage in (0.0, 0.5):
        found_KH = slots(LADDER, compared, np.full((len(compared), 2), damage))
        assert {LADDER[n].patterns.name for n in found_KH.reshape(-1).tolist()} == set(NAMES[:2])
        assert np.array_equal(found_KH[:, 0], found_KH[:, 1])


def test_a_search_of_one_range_or_one_density_goes_on_with_all_of_it() -> None:
    for changes in ({"families": ("block_sparse",)}, {"levels": (1.0,)}):
        options = OPTIONS.but(target_density=(0.7,), levels=(0.8, 1.0), families=("a_shape", "block_sparse"))
        options = options.but(**changes)
        found = aims(options, LENGTH)
        compared = screened(found)
        found_KH = slots(found, compared, np.ones((len(compared), 2)))
        assert sorted(found_KH[:, 0].tolist()) == list(range(len(found)))


# --- mandatory tiles --------------------------------------------------------------------------------------------------


ALL = KNOWN_FAMILIES
TILES = (TileShape(query=64, key=64), TileShape(query=128, key=128), TileShape(query=128, key=64))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 200, 700, 1024, 1091])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_smallest_pattern_of_each_ray_computes_the_mandatory_tiles(length: int, tile: TileShape) -> None:
    q_11LD = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(0))
    chunk = Chunk.uniform(1, 0, length)
    options = PlanOptions(families=ALL).but(tile=tile)
    for ray in search_space(options, length):
        smallest = ray.pattern(0, tile.mandatory * tile.key)
        index = build_index((smallest,), q_11LD, q_11LD, chunk, tile, scale=1.0)
        assert mandatory_density(length, tile, ray.family) == pytest.approx(float(density(index, chunk))), ray.name


def test_the_triangle_is_all_mandatory_up_to_three_tiles_and_hardly_any_of_it_in_long_contexts() -> None:
    tile = TileShape()
    for family in ALL:
        assert mandatory_density(384, tile, family) == 1.0
        assert 0.005 < mandatory_density(131072, tile, family) < 0.006


def test_a_target_is_refused_below_the_tiles_of_every_pattern_and_not_above() -> None:
    least = mandatory_density(1024, TileShape(), "a_shape")
    assert least == pytest.approx(21 / 36)
    settle(PlanOptions(lengths=(1024,), target_density=(least,)), 1024, "cpu")
    for targets, length in (((0.5, 0.3), 1024), ((least, 0.01), 32768)):
        with pytest.raises(UsageError, match=f"at {length} tokens"):
            settle(PlanOptions(lengths=(1024, 32768), target_density=targets), 32768, "cpu")
