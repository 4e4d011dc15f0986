"""One candidate a head: the least error at the target cost, within the target density, never slower than dense."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import made_up_cost
from planner_profiles import made_up_length, made_up_model, made_up_profile

from sparsekv.planner.allocate import TAIL_WEIGHT, allocate
from sparsekv.planner.cost.device_cost import Line
from sparsekv.planner.cost.predict import predict
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import LayerScores, Profile
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.patterns import Dense

SCORES = ("error", "tail_error", "mass", "tiles", "columns", "patterns")
ALWAYS = PlanOptions(target_density=(0.3,), crossover=False)


def profile_with(seed: int = 0, length: int = 8192, **options) -> Profile:
    return made_up_profile(made_up_length(length, np.random.default_rng(seed), **options))


def density_of(profile: Profile, options: PlanOptions, **cost) -> float:
    plan = allocate(profile, made_up_cost(**cost), options)
    return predict(profile, made_up_cost(**cost), plan, None).lengths[-1].prefill.density


def test_each_head_takes_the_least_error_at_the_target() -> None:
    profile = profile_with()
    entry = profile.lengths[0]
    bucket = allocate(profile, made_up_cost(), ALWAYS).bucket(8192)
    at_target = [place for place, candidate in enumerate(entry.candidates) if candidate.density == 0.3]
    for scores in entry.layers:
        for head, pattern in enumerate(bucket.patterns(scores.layer, 4)):
            error = {
                place: (1 - TAIL_WEIGHT) * scores.error[place][head] + TAIL_WEIGHT * scores.tail_error[place][head]
                for place in at_target
            }
            assert pattern == entry.patterns[min(error, key=error.get)]


def test_an_error_in_the_tail_alone_counts() -> None:
    profile = profile_with()
    scores = profile.lengths[0].layers[0]
    tail = [list(row) for row in scores.tail_error]
    before = allocate(profile, made_up_cost(), ALWAYS).bucket(8192).patterns(0, 4)[0]
    chosen = profile.lengths[0].patterns.index(before)
    tail[chosen][0] = 50.0
    worse = scores.model_copy(update={"tail_error": tuple(map(tuple, tail))})
    entry = profile.lengths[0].model_copy(update={"layers": (worse, *profile.lengths[0].layers[1:])})
    after = allocate(made_up_profile(entry), made_up_cost(), ALWAYS).bucket(8192).patterns(0, 4)[0]
    assert after != before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.19, 0.6), st.floats(0.0, 0.09))
def test_the_predicted_density_is_within_the_target(seed: int, target: float, drift: float) -> None:
    profile = profile_with(seed, drift=drift, levels=(0.15, 0.25, 0.35, 0.5))
    options = PlanOptions(target_density=(target,), crossover=False)
    assert density_of(profile, options) <= target * 1.0002


def test_another_target_takes_another_level_of_the_ladder() -> None:
    profile = profile_with()
    low, high = (density_of(profile, PlanOptions(target_density=(t,), crossover=False)) for t in (0.2, 0.4))
    assert low == pytest.approx(0.2)
    assert high == pytest.approx(0.4)


@pytest.mark.parametrize("family", ["a_shape", "vertical_slash", "block_sparse"])
def test_one_family_alone_is_allocated_from_a_profile_of_all(family: str) -> None:
    options = PlanOptions(target_density=(0.3,), crossover=False, families=(family,))
    bucket = allocate(profile_with(drift=0.05), made_up_cost(), options).bucket(8192)
    assert {pattern.pattern for layer in range(3) for pattern in bucket.patterns(layer, 4)} == {family}


def test_a_target_below_the_ladder_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at least 0\.2 at 8192"):
        allocate(profile_with(), made_up_cost(), PlanOptions(target_density=(0.1,), crossover=False))


@pytest.mark.parametrize(
    ("length", "said"),
    [(512, "tiles every pattern computes.*up to 0.9;"), (8192, "candidates of .* come to a density of 0.3.*found 0.9")],
)
def test_a_target_that_nothing_comes_down_to_is_refused_with_the_reason(length: int, said: str) -> None:
    entry = made_up_length(length, np.random.default_rng(0), levels=(0.3,))
    scores = [
        s.model_copy(update={"tiles": ((0.9,) * 4,) * len(s.tiles), "columns": ((0.0,) * 4,) * len(s.tiles)})
        for s in entry.layers
    ]
    entry = entry.model_copy(update={"layers": tuple(scores)})
    with pytest.raises(UsageError, match=said):
        allocate(made_up_profile(entry), made_up_cost(), ALWAYS)


@pytest.mark.parametrize("heads", [4, 2])
def test_what_other_families_come_down_to_is_not_named(heads: int) -> None:
    """A layer may have fewer heads than the widest; that is no reason to fail otherwise."""
    entry = profile_with(levels=(0.3,)).lengths[0]

    def dear(scores: LayerScores, heads: int) -> LayerScores:
        tables = {name: [row[:heads] for row in getattr(scores, name)] for name in SCORES}
        for place, candidate in enumerate(entry.candidates):
            if candidate.family == "vertical_slash":
                tables["tiles"][place] = (0.5,) * heads
                tables["columns"][place] = (0.0,) * heads
        return scores.model_copy(update={name: tuple(rows) for name, rows in tables.items()})

    layers = tuple(dear(scores, heads if place == 1 else 4) for place, scores in enumerate(entry.layers))
    (wide,) = made_up_model().attention
    groups = (wide.model_copy(update={"layers": (0, 2)}), wide.model_copy(update={"layers": (1,), "heads": heads}))
    model = made_up_model().model_copy(update={"attention": groups})
    profile = made_up_profile(entry.model_copy(update={"layers": layers}), model=model)
    only = PlanOptions(target_density=(0.3,), families=("vertical_slash",))
    with pytest.raises(UsageError, match=r"candidates of vertical_slash .*found 0\.5 with"):
        allocate(profile, made_up_cost(), only)


def test_a_ray_that_cannot_come_down_to_the_target_is_not_chosen() -> None:
    profile = profile_with()
    scores = profile.lengths[0].layers[0]
    tiles, error = ([list(row) for row in table] for table in (scores.tiles, scores.error))
    for place, candidate in enumerate(profile.lengths[0].candidates):
        if candidate.ray == "a":
            tiles[place], error[place] = [0.9] * 4, [0.0] * 4
    better = scores.model_copy(update={"tiles": tuple(map(tuple, tiles)), "error": tuple(map(tuple, error))})
    entry = profile.lengths[0].model_copy(update={"layers": (better, *profile.lengths[0].layers[1:])})
    bucket = allocate(made_up_profile(entry), made_up_cost(), ALWAYS).bucket(8192)
    assert all(pattern.pattern != "a_shape" for pattern in bucket.patterns(0, 4))


def test_the_last_bucket_is_open_and_says_that_it_is_extrapolated() -> None:
    rng = np.random.default_rng(0)
    profile = made_up_profile(made_up_length(4096, rng), made_up_length(8192, rng))
    plan = allocate(profile, made_up_cost(), PlanOptions(target_density=(0.3, 0.3), crossover=False))
    assert [bucket.up_to for bucket in plan.lengths] == [4096, 8192, None]
    assert plan.lengths[-1].extrapolated
    assert plan.bucket(100_000) == plan.bucket(8192)


def test_a_length_at_which_dense_is_faster_goes_dense() -> None:
    slow = {"prefill_sparse": Line(prices=(0.0, 0.0, 10.0, 10.0))}
    options = PlanOptions(target_density=(0.3,))
    assert allocate(profile_with(), made_up_cost(**slow), options).bucket(8192).dense
    always = allocate(profile_with(), made_up_cost(**slow), ALWAYS).bucket(8192)
    assert not always.dense


def test_lengths_too_short_to_pay_go_dense_below_the_first_bucket() -> None:
    # An index of each kind costs 1000 us whatever the length. At 4096 tokens a layer takes 8320 us dense and 4280 at a
    # density of 0.51 there, with up to three kinds more than 7000; below, dense is soon faster.
    index = {name: Line(prices=(1000.0, 0.0, 0.0)) for name in ("a_shape", "vertical_slash", "block_sparse")}
    plan = allocate(profile_with(), made_up_cost(index=index), PlanOptions(target_density=(0.3,)))
    assert plan.lengths[0].dense
    assert 2048 < plan.lengths[0].up_to < 4096
    assert not plan.bucket(8192).dense


def test_a_pattern_whose_index_costs_more_than_it_saves_is_not_used() -> None:
    free, dear = Line(prices=(0.0, 0.0, 0.0)), Line(prices=(0.0, 10.0, 0.0))
    index = {"a_shape": free, "vertical_slash": dear, "block_sparse": dear}
    bucket = allocate(profile_with(), made_up_cost(index=index), PlanOptions(target_density=(0.3,))).bucket(8192)
    assert {pattern.pattern for layer in range(3) for pattern in bucket.patterns(layer, 4)} == {"a_shape"}


def test_heads_that_only_dense_serves_cheaply_are_dense() -> None:
    dear = Line(prices=(0.0, 10.0, 0.0))
    index = {name: dear for name in ("a_shape", "vertical_slash", "block_sparse")}
    bucket = allocate(profile_with(), made_up_cost(index=index), PlanOptions(target_density=(0.3,))).bucket(8192)
    assert bucket.dense or all(isinstance(pattern, Dense) for pattern in bucket.patterns(0, 4))


def test_a_target_speedup_takes_the_densest_level_that_reaches_it() -> None:
    options = PlanOptions(target_speedup=3.0)
    assert density_of(profile_with(), options) == pytest.approx(0.3)


def test_a_speedup_out_of_reach_is_an_error_that_says_what_can_be_reached() -> None:
    with pytest.raises(GateError, match=r"20 times as fast as dense at 8192 tokens, found 5\.00"):
        allocate(profile_with(), made_up_cost(), PlanOptions(target_speedup=20.0))


def test_a_speedup_is_reached_above_levels_that_mandatory_tiles_leave_no_room_for() -> None:
    profile = profile_with(levels=(0.2, 0.4))
    scores = [
        s.model_copy(update={"tiles": tuple((max(row[0], 0.35),) * 4 for row in s.tiles), "columns": ((0.0,) * 4,) * 8})
        for s in profile.lengths[0].layers
    ]
    profile = made_up_profile(profile.lengths[0].model_copy(update={"layers": tuple(scores)}))
    assert density_of(profile, PlanOptions(target_speedup=2.0)) == pytest.approx(0.4, rel=0.15)
    with pytest.raises(GateError, match=r"4 times as fast as dense at 8192 tokens, found 2\.\d+"):
        allocate(profile, made_up_cost(), PlanOptions(target_speedup=4.0))


def test_candidates_that_cost_more_on_other_prompts_than_fitted_are_told_from_too_low_a_target() -> None:
    profile = profile_with(levels=(0.3,))
    scores = [
        s.model_copy(update={"tiles": ((0.31,) * 4,) * 4, "columns": ((0.0,) * 4,) * 4})
        for s in profile.lengths[0].layers
    ]
    scores[0] = scores[0].model_copy(update={"tiles": ((0.31,) * 4, (0.29,) * 4, *((0.31,) * 4,) * 2)})
    drifted = made_up_profile(profile.lengths[0].model_copy(update={"layers": tuple(scores)}))
    with pytest.raises(UsageError, match=r"density of 0\.3 over all calibration prompts at 8192 tokens, found 0\.30"):
        allocate(drifted, made_up_cost(), ALWAYS)
    assert density_of(drifted, PlanOptions(target_density=(0.31,), crossover=False)) <= 0.31
