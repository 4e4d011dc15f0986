"""Filter layers by proof: what is proposed, how it is measured, and what a plan takes of it."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_folders import save_model
from planner_models import bare_job, loaded_hybrid, quick_options
from planner_profiles import made_up_model, made_up_profile, made_up_reuse, options_for
from progress import Counting

from sparsekv.planner.decode_candidates import CandidateSpace, anchor_layers
from sparsekv.planner.decode_search import Effort, measure_trials, upper_bound
from sparsekv.planner.decode_trials import decode_trials
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.job import job_of, job_of_profile
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.predict import decode_share
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured
from sparsekv.plans.files import dump_plan
from sparsekv.plans.model import check_fit
from sparsekv.plans.patterns import fraction
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel

LAYERS, LENGTH = 10, 8192
MODEL = made_up_model(layers=LAYERS)
ALWAYS = options_for()
QUICK = quick_options(phases=("decode",), verify="none", decode_kl=100.0)
SETTLED = settle(QUICK, 4096, "cpu")
EFFORT = Effort(prompts=3, steps=4, trials=8)


def segment(filter_: int, layers: tuple[int, ...], share: float = 0.1, length: int = LENGTH) -> Segment:
    at_most = fraction(share).resolve(length)
    return Segment(filter=filter_, layers=layers, budget=DecodeBudget(fraction=share, at_most=at_most), recent=128)


def trial(*segments: Segment, bound: float, prompts: int = 4) -> DecodeTrial:
    return DecodeTrial(segments=segments, kl=bound / 2, kl_bound=bound, prompts=prompts)


def tried(*trials: DecodeTrial, length: int = LENGTH) -> LengthProfile:
    reuse = made_up_reuse(np.ones((LAYERS, LAYERS)))
    return LengthProfile(length=length, prompt_tokens=(length,), reuse=reuse, trials=trials)


def chosen(*entries: LengthProfile, options: PlanOptions = ALWAYS) -> DecodePlan:
    return choose_filter_layers(made_up_profile(*entries, model=MODEL), options)


@pytest.fixture(scope="module")
def space() -> CandidateSpace:
    kept = np.random.default_rng(0).uniform(0.5, 1.0, (LAYERS, LAYERS))
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=made_up_reuse(kept))
    return CandidateSpace(MODEL, entry, PlanOptions())


@pytest.fixture(scope="module")
def weights(space: CandidateSpace) -> np.ndarray:
    return space.weights({layer: 0.001 * layer for layer in range(1, LAYERS)})


@pytest.fixture(scope="module")
def prompt(loaded: LoadedModel) -> CalibrationPrompt:
    (found,) = bare_job(loaded, SETTLED).prompts[1024]
    return found


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> Profile:
    return measure_trials(bare_job(loaded, SETTLED), profile(bare_job(loaded, SETTLED)), effort=EFFORT)


def check_legal(segments: tuple[Segment, ...]) -> None:
    check_fit(MODEL, None, DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),)), ())


def test_candidates_are_legal_and_distinct_and_come_from_the_sparsest_on(
    space: CandidateSpace, weights: np.ndarray
) -> None:
    proposed = space.proposed(weights, 0.002)
    shares = [space.share(one) for one in proposed]
    assert len(proposed) > 5
    assert len(set(proposed)) == len(proposed)
    assert shares == sorted(shares)
    for one in proposed:
        check_legal(one)


def test_every_neighbour_is_legal_and_one_step_away(space: CandidateSpace) -> None:
    start = (segment(0, (2, 3)), segment(4, (5, 7)), segment(8, (9,)))
    found = space.neighbours(start)
    assert len(set(found)) == len(found)
    assert start not in found
    for one in found:
        check_legal(one)
    shapes = {tuple((part.filter, part.layers) for part in one) for one in found}
    assert ((0, (1, 2, 3)), (4, (5, 7)), (8, (9,))) in shapes  # a dense layer joins
    assert ((0, (3,)), (4, (5, 7)), (8, (9,))) in shapes  # a layer leaves
    assert ((0, (2, 3)), (4, (5, 7))) in shapes  # the last one of a segment leaves
    assert ((0, (2, 3)), (4, (5, 7, 8, 9))) in shapes  # a filter layer is dropped
    assert ((0, (2, 3)), (4, (5,)), (6, (7,)), (8, (9,))) not in shapes  # two steps
    assert ((1, (2, 3)), (4, (5, 7)), (8, (9,))) in shapes  # another layer chooses
    assert ((2, (3,)), (4, (5, 7)), (8, (9,))) in shapes  # a layer of the segment chooses for those after it
    budgets = [[part.budget.fraction for part in one] for one in found]
    assert [0.05, 0.1, 0.1] in budgets
    assert [0.1, 0.1, 0.2] in budgets


def test_no_candidate_exceeds_a_budget_that_was_asked_for(space: CandidateSpace) -> None:
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=made_up_reuse(np.ones((LAYERS, LAYERS))))
    asked = CandidateSpace(MODEL, entry, PlanOptions(decode_budget=fraction(0.05)))
    start = (segment(0, (1, 2), 0.05),)
    assert any(one[0].budget.fraction == 0.1 for one in space.neighbours(start))
    assert all(part.budget.fraction <= 0.05 for one in asked.neighbours(start) for part in one)
    assert not list(asked.larger(start))


def test_dense_layers_become_a_segment(space: CandidateSpace) -> None:
    shapes = {tuple((part.filter, part.layers) for part in one) for one in space.neighbours((segment(4, (5, 6)),))}
    assert ((1, (3,)), (4, (5, 6))) in shapes
    assert ((4, (5, 6)), (7, (9,))) in shapes


def test_a_larger_budget_is_expected_to_diverge_less_also_between_and_beyond_the_profiled_ones() -> None:
    reuse = made_up_reuse(np.ones((LAYERS, LAYERS)))
    assert [budget.fraction for budget in reuse.budgets] == [0.05, 0.1, 0.2]
    tables = tuple(tuple((1.0 - lost,) * (j + 1) for j in range(LAYERS)) for lost in (0.16, 0.08, 0.04))
    reuse = reuse.model_copy(update={"kept": tables})
    space = CandidateSpace(MODEL, LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=reuse), PlanOptions())
    expected = [space.expected((segment(0, (3,), share),), np.ones(LAYERS)) for share in (0.025, 0.05, 0.07, 0.1, 0.4)]
    assert expected == pytest.approx([0.32, 0.16, 0.16 * 5 / 7, 0.08, 0.02], rel=0.03)


def test_every_dense_layer_may_choose_for_itself_alone_or_with_all_others(space: CandidateSpace) -> None:
    start = (segment(0, (2, 3)), segment(4, (5, 7)), segment(8, (9,)))
    found = space.alone(start)
    for one in found:
        check_legal(one)
        assert space.share(one) < space.share(start) - 0.03
    shapes = {tuple((part.filter, part.layers) for part in one) for one in found}
    assert ((0, (0, 2, 3)), (4, (5, 7)), (8, (9,))) in shapes  # a filter layer
    assert ((0, (0, 2, 3)), (4, (4, 5, 7)), (8, (8, 9))) in shapes  # all of them
    assert len(shapes) == 4  # layers 1 and 6 lie inside the segments of others
    outside = [[(part.filter, part.layers) for part in one] for one in space.alone((segment(2, (3, 4)),))]
    assert [(1, (1,)), (2, (3, 4))] in outside
    assert [(0, (0,)), (1, (1,)), (2, (2, 3, 4)), *((layer, (layer,)) for layer in range(5, LAYERS))] in outside


def test_what_chooses_for_itself_is_refined_like_the_others(space: CandidateSpace) -> None:
    shapes = {tuple((part.filter, part.layers) for part in one) for one in space.alone((segment(0, (0, 1, 2)),))}
    assert ((0, (1, 2)),) in shapes
    assert ((0, (0, 1)),) in shapes
    assert ((0, (0, 1, 2, 3)),) in shapes


def test_larger_budgets_keep_the_segments(space: CandidateSpace) -> None:
    start = (segment(0, (1, 2)), segment(4, (5, 6)))
    grown = list(space.larger(start))
    assert [[part.budget.fraction for part in one] for one in grown] == [[0.2, 0.2], [0.4, 0.4]]
    assert all([part.layers for part in one] == [(1, 2), (5, 6)] for one in grown)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_anchor_layers_maximise_the_weighted_similarity(count: int) -> None:
    rng = np.random.default_rng(count)
    kept, importance = rng.uniform(0.0, 1.0, (7, 7)), rng.uniform(0.1, 1.0, 7).tolist()

    def similarity(anchors: tuple[int, ...]) -> float:
        served = ((layer, max(a for a in anchors if a <= layer)) for layer in range(1, 7))
        return sum(importance[layer] * kept[layer, anchor] for layer, anchor in served if layer != anchor)

    options = [(1, *rest) for rest in combinations(range(2, 7), count - 1)]
    found = anchor_layers(kept, importance, range(7), count)
    assert found in options
    assert similarity(found) == pytest.approx(max(map(similarity, options)))


def test_the_bound_of_a_mean_is_above_it_and_within_the_values() -> None:
    values = [0.0, 0.001, 0.002, 0.009]
    assert np.mean(values) < upper_bound(values) < max(values)
    assert upper_bound([0.1, 0.3]) == 0.3


def test_dense_steps_do_not_diverge_and_fewer_tokens_do(loaded: LoadedModel, prompt: CalibrationPrompt) -> None:
    everything, few = segment(0, (1, 2), 1.0, 4096), segment(0, (1, 2), 0.02, 1024)
    with decode_trials(loaded) as trials:
        prefix = trials.prefilled(prompt, 4, SETTLED)
        assert prefix.rows_1R.shape == (1, 4)
        assert int(prefix.rows_1R[0, 0]) == prompt.ids[prompt.answer_start - 1]
        assert trials.divergences((), [prefix]) == [0.0]
        assert trials.divergences((everything,), [prefix])[0] < 1e-6
        (kl,) = trials.divergences((few,), [prefix])
        assert kl > 1e-6
        assert trials.divergences((few,), [prefix]) == [kl]  # nothing of the first time is left in the cache
        assert trials.divergences((few,), [prefix] * 3, most=kl / 2) == [kl]  # given up after the first


@pytest.mark.parametrize(
    ("heads", "layers"),
    [
        ("max", (1, 2)),
        ("per_kv_head", (1, 2)),
        ({1: (1, 0), 2: (1, 1)}, (1, 2)),
        ("max", (0, 1, 2)),
        ("per_kv_head", (0, 2)),
    ],
)
def test_steps_in_one_pass_predict_what_single_steps_of_the_plan_predict(
    loaded: LoadedModel, prompt: CalibrationPrompt, heads: Any, layers: tuple[int, ...]
) -> None:
    check_steps(loaded, prompt, segment(0, layers, 0.02, 1024).model_copy(update={"heads": heads}))


def test_steps_in_one_pass_begin_with_the_recurrent_state_of_the_prompt(prompt: CalibrationPrompt) -> None:
    check_steps(loaded_hybrid(), prompt, segment(0, (1, 3), 0.02, 1024))


def check_steps(loaded: LoadedModel, prompt: CalibrationPrompt, sparse: Segment) -> None:
    with decode_trials(loaded) as trials:
        prefix = trials.prefilled(prompt, 4, SETTLED)
        for _ in range(2):
            (kl,) = trials.divergences((sparse,), [prefix])
    assert prefix.rows_1R.shape[1] == 4
    buckets = (DecodeBucket(up_to=None, segments=(sparse,)),)
    plan = Plan(status="unverified", model=loaded.info, decode=DecodePlan(lengths=buckets))
    ids_1S = torch.from_numpy(prompt.ids[: prompt.answer_start - 1].astype(np.int64))[None]
    with apply(loaded.model, plan) as handle, torch.no_grad():
        cache = handle.new_cache(1024)
        loaded.model(input_ids=ids_1S, past_key_values=cache)
        steps = [loaded.model(input_ids=step, past_key_values=cache).logits for step in prefix.rows_1R.split(1, 1)]
    single_1RV = torch.cat(steps, 1).float().log_softmax(-1)
    kl_R = (prefix.dense_1RV.exp() * (prefix.dense_1RV - single_1RV)).sum(-1)
    assert kl > 1e-6
    assert kl == pytest.approx(float(kl_R.mean()), rel=1e-2)


def test_what_was_tried_and_passed_is_in_the_profile_and_the_sparsest_is_planned(
    measured: Profile, loaded: LoadedModel
) -> None:
    (entry,) = measured.lengths
    assert all(one.prompts <= EFFORT.prompts for one in entry.trials)
    plan = choose_filter_layers(measured, SETTLED)
    shares = [decode_share(one.segments, 1024, loaded.info) for one in entry.trials]
    assert decode_share(plan.bucket(1024).segments, 1024, loaded.info) == min(shares) < 0.6


def test_shorter_lengths_are_tried_with_the_segments_that_passed_at_the_longest(loaded: LoadedModel) -> None:
    options = settle(QUICK.but(lengths=(512, 1024), target_density=()), 4096, "cpu")
    progress = Counting()
    short, long = measure_trials(
        bare_job(loaded, options), profile(bare_job(loaded, options)), progress, EFFORT
    ).lengths
    assert progress.done == pytest.approx(progress.total)
    passed = {tuple((part.filter, part.layers) for part in one.segments) for one in long.trials}
    assert short.trials
    assert {tuple((part.filter, part.layers) for part in one.segments) for one in short.trials} <= passed


def test_nothing_is_sparse_inside_a_gate_that_nothing_passes(loaded: LoadedModel, measured: Profile) -> None:
    bare = measured.lengths[0].model_copy(update={"trials": ()})
    options = settle(QUICK.but(decode_kl=0.0), 4096, "cpu")
    found = measure_trials(bare_job(loaded, options), measured.model_copy(update={"lengths": (bare,)}), effort=EFFORT)
    assert found.lengths[0].trials
    assert choose_filter_layers(found, options).bucket(1024).dense


def test_measuring_again_gives_the_same_trials(loaded: LoadedModel, measured: Profile) -> None:
    bare = measured.model_copy(update={"lengths": (measured.lengths[0].model_copy(update={"trials": ()}),)})
    assert measure_trials(bare_job(loaded, SETTLED), bare, effort=EFFORT) == measured
    assert measure_trials(bare_job(loaded, SETTLED), measured, effort=EFFORT) is measured


def test_a_compile_from_files_gives_the_plan_that_was_measured(loaded: LoadedModel, tmp_path: Path) -> None:
    folder = save_model(loaded.model, tmp_path / "tiny")
    first = compile_plan(job_of(loaded, QUICK), profile_out=tmp_path / "p.json")
    assert first.filter_layers
    again = compile_plan(job_of_profile(str(folder), QUICK, read_measured(Profile, tmp_path / "p.json")))
    assert dump_plan(again.plan) == dump_plan(first.plan)


def test_the_sparsest_trial_inside_the_gate_is_planned() -> None:
    outside = trial(segment(0, tuple(range(1, 10))), bound=0.01)
    sparse, denser = trial(segment(0, (1, 2, 3, 4, 5)), bound=0.0019), trial(segment(0, (1, 2)), bound=0.0001)
    plan = chosen(tried(outside, sparse, denser))
    assert plan.bucket(LENGTH).segments == sparse.segments
    stricter = chosen(tried(outside, sparse, denser), options=ALWAYS.but(decode_kl=0.001))
    assert stricter.bucket(LENGTH).segments == denser.segments


def test_a_bound_on_lost_mass_that_was_asked_for_counts_in_place_of_the_trials() -> None:
    entry = tried(trial(segment(0, (1, 2, 3)), bound=0.001))
    plan = chosen(entry, options=ALWAYS.but(decode_loss=0.0))  # all similarities in this profile are 1
    assert [one.layers for one in plan.bucket(LENGTH).segments] == [tuple(range(1, LAYERS))]
    assert chosen(entry).bucket(LENGTH).segments[0].layers == (1, 2, 3)


def test_nothing_is_tried_where_a_bound_on_lost_mass_is_asked_for(loaded: LoadedModel, measured: Profile) -> None:
    bare = measured.model_copy(update={"lengths": (measured.lengths[0].model_copy(update={"trials": ()}),)})
    options = settle(QUICK.but(decode_kl=None, decode_loss=0.02), 4096, "cpu")
    assert measure_trials(bare_job(loaded, options), bare, effort=EFFORT) is bare


def test_a_trial_that_was_given_up_proves_nothing() -> None:
    given_up = trial(segment(0, (1, 2, 3, 4, 5)), bound=0.01, prompts=1)
    whole = trial(segment(0, (1, 2)), bound=0.001)
    plan = chosen(tried(given_up, whole), options=ALWAYS.but(decode_kl=1.0))
    assert plan.bucket(LENGTH).segments == whole.segments


def test_a_shorter_length_takes_the_same_layers_with_the_budget_that_it_needs() -> None:
    layers = (1, 2, 3)
    short = tried(
        trial(segment(0, layers, 0.1), bound=0.01),
        trial(segment(0, layers, 0.2, 4096), bound=0.001),
        trial(segment(0, (1, 2, 3, 4, 5), 0.1), bound=0.001),  # sparser, but no trial of it passed at the longer one
        length=4096,
    )
    plan = chosen(short, tried(trial(segment(0, layers), bound=0.001)))
    assert [(bucket.up_to, bucket.segments[0].budget.fraction) for bucket in plan.lengths] == [(4096, 0.2), (None, 0.1)]


def test_a_length_at_which_no_trial_passed_is_dense() -> None:
    short = tried(trial(segment(0, (1, 2, 3)), bound=0.01), length=4096)
    plan = chosen(short, tried(trial(segment(0, (1, 2, 3)), bound=0.001)))
    assert [bucket.dense for bucket in plan.lengths] == [True, False]


def test_a_layer_chooses_for_itself_where_fewer_tokens_are_read() -> None:
    own, other = trial(segment(0, (0, 1, 2, 3)), bound=0.001), trial(segment(0, (1, 2, 3)), bound=0.001)
    assert chosen(tried(own, other)).bucket(LENGTH).segments == own.segments


def test_a_layer_that_chooses_for_itself_is_not_offloaded() -> None:
    own = trial(segment(0, (0, 1, 2, 3)), bound=0.001)
    assert chosen(tried(own), options=ALWAYS.but(offload=True)).offload.layers == (1, 2, 3)


def test_a_budget_that_was_asked_for_bounds_the_trials() -> None:
    large, small = trial(segment(0, (1, 2, 3, 4, 5)), bound=0.001), trial(segment(0, (1, 2), 0.05), bound=0.001)
    plan = chosen(tried(large, small), options=ALWAYS.but(decode_budget=fraction(0.05)))
    assert plan.bucket(LENGTH).segments == small.segments
