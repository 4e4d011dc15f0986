"""One budget for all heads: the least damage within the target density, never slower than dense."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_profile, options_for, rows

from sparsekv.planner.allocate import TOLERANCE, Allocation, allocate, at_loss, least_cost, solve
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_once
from sparsekv.planner.predict import ABSENT, DENSE, WORST_WEIGHT, ScoreTables, choice_of, predict
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.search_space import ROUNDING
from sparsekv.planner.verify_cells import untouched
from sparsekv.plans.patterns import Dense, Pattern, VerticalSlash
from sparsekv.plans.quality import LengthScore

ALWAYS = options_for(target_density=(0.3,))


def profile_with(seed: int = 0, length: int = 8192, **options) -> Profile:
    return made_up_profile(made_up_length(length, np.random.default_rng(seed), **options))


def density_of(profile: Profile, options: PlanOptions, **cost) -> float:
    plan = allocate(profile, made_up_prices(**cost), options)
    return predict(profile, made_up_prices(**cost), plan, None).lengths[-1].prefill.density


def damage_of(profile: Profile, options: PlanOptions, **cost) -> float:
    (entry,) = profile.lengths
    tables = ScoreTables.of(entry)
    choice_LH = choice_of(allocate(profile, made_up_prices(**cost), options).bucket(8192), tables)
    return float(tables.take(tables.damage_LCH, choice_LH, 0.0).sum())


def chosen(profile: Profile, options: PlanOptions = ALWAYS, layer: int = 0) -> tuple[Pattern, ...]:
    return allocate(profile, made_up_prices(), options).bucket(8192).patterns(layer, 4)


def changed(profile: Profile, layer: int, **tables: np.ndarray) -> Profile:
    """The profile with other scores in one layer."""
    (entry,) = profile.lengths
    scores = entry.layers[layer].model_copy(update={name: rows(table) for name, table in tables.items()})
    layers = (*entry.layers[:layer], scores, *entry.layers[layer + 1 :])
    return made_up_profile(entry.model_copy(update={"layers": layers}))


@pytest.mark.parametrize("turned", [False, True])
def test_a_plan_does_no_more_damage_than_any_that_gives_all_heads_one_density(turned: bool) -> None:
    profile = profile_with(turned=turned)
    (entry,) = profile.lengths
    tables = ScoreTables.of(entry)
    total = damage_of(profile, ALWAYS)
    alike_LCH = np.array([entry.candidates[n].density == 0.3 for n in range(12)])[tables.candidate_LCH]
    assert total < 0.95 * np.where(alike_LCH, tables.damage_LCH, np.inf).min(1).sum()


def test_a_head_that_every_candidate_ruins_stays_dense() -> None:
    profile = profile_with()
    ruined = np.where(np.arange(4) == 2, 1e6, np.array(profile.lengths[0].layers[1].damage))
    found = chosen(changed(profile, 1, damage=ruined, worst=ruined), layer=1)
    assert [isinstance(pattern, Dense) for pattern in found] == [False, False, True, False]


def test_mean_and_worst_damage_are_weighed_and_a_layer_may_count_more() -> None:
    (entry,) = profile_with().lengths
    scores = entry.layers[1].model_copy(update={"weight": 3.0})
    tables = ScoreTables.of(entry.model_copy(update={"layers": (entry.layers[0], scores, entry.layers[2])}))
    mean, worst = np.array(scores.damage), np.array(scores.worst)
    np.testing.assert_allclose(tables.damage_LCH[1], 3.0 * ((1 - WORST_WEIGHT) * mean + WORST_WEIGHT * worst))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 8.0), st.sampled_from((("prefill",), ("prefill", "decode"))))
def test_the_share_that_a_loss_gives_is_the_least_inside_it(seed: int, loss: float, phases: tuple) -> None:
    profile = profile_with(seed, levels=(0.15, 0.25, 0.35, 0.5))
    options = options_for(loss=loss, phases=phases)
    most, tables = loss / len(phases), ScoreTables.of(profile.lengths[0])
    assert damage_of(profile, options) <= most + 1e-9
    least, _ = at_loss(tables, options.families, most)
    share = tables.density(least)
    assert share - 1e-5 <= density_of(profile, options) <= TOLERANCE * share + 1e-5
    assert density_of(profile, options.but(loss=loss / 2)) >= share - 1e-5


def test_a_loss_of_nothing_is_dense_where_every_candidate_does_damage() -> None:
    assert allocate(profile_with(), made_up_prices(), options_for(loss=0.0)).bucket(8192).dense


def brute_force(cost_CH: np.ndarray, damage_CH: np.ndarray, allowed_CH: np.ndarray, budget: float) -> float | None:
    """The least damage of all choices within the budget, with a dense head at cost 1 and damage 0."""
    slots, heads = cost_CH.shape
    options = [
        [(1.0, 0.0), *((cost_CH[c, h], damage_CH[c, h]) for c in range(slots) if allowed_CH[c, h])]
        for h in range(heads)
    ]
    within = [sum(d for _, d in one) for one in product(*options) if sum(c for c, _ in one) <= budget + 1e-9]
    return min(within) if within else None


def solved(cost_CH: np.ndarray, damage_CH: np.ndarray, allowed_CH: np.ndarray, budget: float) -> Allocation | None:
    present_LH = np.ones((1, cost_CH.shape[1]), bool)
    return solve(cost_CH[None], damage_CH[None], allowed_CH[None], present_LH, budget)


# Few values, so that equal costs, equal damages, and no damage at all are common.
COSTS = st.sampled_from((0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0))
DAMAGES = st.sampled_from((0.0, 0.0, 1e-6, 0.01, 0.1, 0.5, 0.5, 1.0, 7.0)) | st.floats(0.0, 10.0).map(
    lambda nats: round(nats, 6)
)


@st.composite
def instances(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    slots, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def table(of: st.SearchStrategy, kind: type) -> np.ndarray:
        size = slots * heads
        return np.array(draw(st.lists(of, min_size=size, max_size=size)), kind).reshape(slots, heads)

    allowed = table(st.sampled_from((True, True, True, False)), bool)
    return table(COSTS, float), table(DAMAGES, float), allowed, draw(st.floats(0.01, 1.0)) * heads


@settings(max_examples=200, deadline=None)
@given(instances())
def test_the_least_cost_for_a_damage_is_within_one_step_of_the_best(instance: tuple) -> None:
    cost_CH, damage_CH, allowed_CH, _ = instance
    heads = cost_CH.shape[1]
    most = float(damage_CH.mean())
    choice, damage = least_cost(cost_CH[None], damage_CH[None], allowed_CH[None], np.ones((1, heads), bool), most)
    pairs = np.stack([np.vstack([cost_CH, np.ones(heads)]), np.vstack([damage_CH, np.zeros(heads)])], -1)
    taken = [pairs[slot, head] for head, slot in enumerate(choice[0])]  # DENSE is the last
    assert damage == pytest.approx(sum(one for _, one in taken), abs=1e-9)
    assert damage <= most + 1e-9
    allowed_CH = np.vstack([allowed_CH, np.ones(heads, bool)])
    options = [pairs[allowed_CH[:, head], head] for head in range(heads)]
    best = min(sum(c for c, _ in one) for one in product(*options) if sum(d for _, d in one) <= most + 1e-12)
    assert sum(cost for cost, _ in taken) < best + 1.0


@settings(max_examples=300, deadline=None)
@given(instances())
@example((np.array([[0.05]]), np.array([[0.0]]), np.array([[False]]), 0.99999))
def test_a_solution_is_within_its_budget_and_within_one_step_of_the_best(instance: tuple) -> None:
    cost_CH, damage_CH, allowed_CH, budget = instance
    best, found = brute_force(*instance), solved(*instance)
    if found is None:
        assert best is None
        return
    choice_H = found.choice[0]
    cost = damage = 0.0
    for head, slot in enumerate(choice_H):
        assert slot == DENSE or allowed_CH[slot, head]
        cost += 1.0 if slot == DENSE else cost_CH[slot, head]
        damage += 0.0 if slot == DENSE else damage_CH[slot, head]
    assert found.damage == pytest.approx(damage, abs=1e-9)
    assert found.bound <= found.damage
    if best is None:  # the cheapest choice alone is above the budget, by rounding
        assert budget < cost <= budget * (1.0 + ROUNDING) + 1e-9
        return
    assert cost <= budget + 1e-9
    assert found.bound <= best + 1e-9
    assert best <= damage + 1e-9
    # The relaxation leaves one head between two of its candidates: what that step saves is the most that is lost.
    assert found.damage - found.bound <= np.where(allowed_CH, damage_CH, 0.0).max() + 1e-9
    again = solved(*instance)
    assert np.array_equal(again.choice, found.choice)


def test_candidates_without_damage_are_taken_at_their_cheapest() -> None:
    cost, damage = np.array([[0.5], [0.2], [0.2]]), np.zeros((3, 1))
    found = solved(cost, damage, np.ones((3, 1), bool), 1.0)
    assert found.choice.tolist() == [[1]]
    assert (found.damage, found.bound) == (0.0, 0.0)


def test_absent_heads_take_no_part() -> None:
    cost, damage = np.full((1, 2, 2), 0.5), np.full((1, 2, 2), 1.0)
    cost[0, :, 1] = damage[0, :, 1] = np.nan
    found = solve(cost, damage, np.ones((1, 2, 2), bool), np.array([[True, False]]), 0.5)
    assert found.choice.tolist() == [[0, ABSENT]]
    assert (found.damage, found.bound) == (1.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.19, 0.6), st.floats(0.0, 0.09))
def test_the_predicted_density_is_within_the_target(seed: int, target: float, drift: float) -> None:
    profile = profile_with(seed, drift=drift, levels=(0.15, 0.25, 0.35, 0.5))
    options = options_for(target_density=(target,))
    assert density_of(profile, options) <= target * 1.0002


@pytest.mark.parametrize("family", ["a_shape", "vertical_slash", "block_sparse"])
def test_one_family_alone_is_allocated_from_a_profile_of_all(family: str) -> None:
    options = options_for(target_density=(0.3,), families=(family,))
    bucket = allocate(profile_with(drift=0.05), made_up_prices(), options).bucket(8192)
    assert {pattern.pattern for layer in range(3) for pattern in bucket.patterns(layer, 4)} == {family}


def test_under_the_preset_each_head_takes_the_least_damage_at_the_target_cost() -> None:
    profile = profile_with(levels=(0.3,))
    tiles = np.array(profile.lengths[0].layers[0].tiles)
    damage = np.array(profile.lengths[0].layers[0].damage)
    tiles[0], damage[0] = 0.9, 0.0  # a range that does not come down to the target
    profile = changed(profile, 0, tiles=tiles, damage=damage, worst=damage).model_copy(update={"preset": "minference"})
    bucket = allocate(profile, made_up_prices(), options_for()).bucket(8192)
    (entry,) = profile.lengths
    for row, damage_CH in enumerate(ScoreTables.of(entry).damage_LCH):
        least = damage_CH[1:].argmin(0) + 1 if row == 0 else damage_CH.argmin(0)
        assert bucket.patterns(row, 4) == tuple(entry.patterns[slot].of_context(8192) for slot in least)


@pytest.mark.parametrize(
    ("dense", "found"),
    [
        ((4096,), [(4096, True), (8192, False), (16384, False), (None, False)]),
        ((8192,), [(2048, True), (4096, False), (8192, True), (16384, False), (None, False)]),
        ((16384,), [(2048, True), (4096, False), (8192, False), (None, True)]),
        ((4096, 8192, 16384), [(None, True)]),
    ],
)
def test_lengths_that_are_to_be_dense_are_and_the_others_stay_as_they_are(dense, found) -> None:
    profile = made_up_profile(*(made_up_length(n, np.random.default_rng(0)) for n in (4096, 8192, 16384)))
    options = options_for(lengths=(4096, 8192, 16384), target_density=(0.3,) * 3)
    before, plan = (allocate(profile, made_up_prices(), one) for one in (options, options.but(dense=dense)))
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == found
    for length in (4096, 8192, 16384):
        assert plan.bucket(length).dense == (length in dense)
        assert plan.bucket(length).dense or plan.bucket(length) == before.bucket(length)


def test_the_sparsest_candidates_are_taken_where_all_cost_more_on_other_prompts_than_fitted() -> None:
    profile = profile_with(levels=(0.3,))
    scores = [
        s.model_copy(update={"tiles": ((0.31,) * 4,) * 4, "columns": ((0.0,) * 4,) * 4})
        for s in profile.lengths[0].layers
    ]
    scores[0] = scores[0].model_copy(update={"tiles": ((0.31,) * 4, (0.29,) * 4, *((0.31,) * 4,) * 2)})
    drifted = made_up_profile(profile.lengths[0].model_copy(update={"layers": tuple(scores)}))
    assert 0.3 < density_of(drifted, ALWAYS) < 0.31
    assert density_of(drifted, options_for(target_density=(0.31,))) <= 0.31


def test_budgets_are_shares_of_the_context_and_nothing_is_sparse_up_to_half_of_the_shortest_length() -> None:
    profile = made_up_profile(*(made_up_length(n, np.random.default_rng(0), levels=(0.3,)) for n in (4096, 8192)))
    options = options_for(lengths=(4096, 8192), target_density=(0.3, 0.3))
    plan = allocate(profile, made_up_prices(), options)
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths][:2] == [(2048, True), (4096, False)]
    for entry in profile.lengths:
        for row in range(3):
            patterns = plan.bucket(entry.length).patterns(row, 4)
            assert {one.in_tokens(entry.length) for one in patterns} <= {*entry.patterns}
            assert all(one.vertical.fraction for one in patterns if isinstance(one, VerticalSlash))


def test_beyond_the_longest_length_heads_have_the_tokens_of_that_length_so_that_density_falls() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0), levels=(0.3,)))
    plan = allocate(profile, made_up_prices(), options_for(target_density=(0.3,)))
    assert plan.lengths[-1].extrapolated
    for row in range(3):
        far, own = plan.bucket(131072).patterns(row, 4), plan.bucket(8192).patterns(row, 4)
        assert far == tuple(one.in_tokens(8192) for one in own)
        assert [one.most_columns(131072) for one in far] == [one.most_columns(8192) for one in own]


def test_a_test_at_the_longest_length_holds_for_the_tokens_beyond_it_and_for_no_others() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0), levels=(0.3,)))
    options = options_for(target_density=(0.3,), phases=("prefill",))
    plan = compile_once(profile.model, options, profile, made_up_prices())
    score = LengthScore(length=8192, density=0.3, read=1.0, kl=0.0, floor=0.0, upper=0.0, worst=0.0)
    assert list(untouched(plan, [score])) == []
    *before, last = plan.prefill.lengths
    fewer = last.model_copy(update={"heads": last.heads[1:]})
    other = plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": (*before, fewer)})})
    assert len(list(untouched(other, [score]))) == 1
