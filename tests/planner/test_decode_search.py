"""Filter layers by proof: what is proposed, how it is measured, and what a plan takes of it."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from planner_models import bare_job, loaded_hybrid, loaded_tiny, quick_options
from planner_profiles import made_up_model, made_up_reuse
from progress import Counting

from sparsekv.planner.decode_search import (
    alone,
    anchor_layers,
    candidates,
    halved,
    joined,
    lowered,
    measure_trials,
    merged,
    moves,
    upper_bound,
)
from sparsekv.planner.decode_trials import DecodeTrials
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.options import settle
from sparsekv.planner.predict import decode_share
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.plans.model import check_fit
from sparsekv.plans.patterns import fraction
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel

LAYERS, LENGTH = 10, 8192
MODEL = made_up_model(layers=LAYERS)
QUICK = quick_options(phases=("decode",), verify="none", loss=100.0)
SETTLED = settle(QUICK, 4096, "cpu")
PROMPTS, STEPS = 3, 4


def segment(filter_: int, layers: tuple[int, ...], share: float = 0.1, length: int = LENGTH) -> Segment:
    at_most = fraction(share).resolve(length)
    return Segment(filter=filter_, layers=layers, budget=DecodeBudget(fraction=share, at_most=at_most), recent=128)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsekv.planner.decode_search.effort_on", lambda device, samples: (PROMPTS, STEPS))
        yield


@pytest.fixture(scope="module")
def prompt(loaded: LoadedModel) -> CalibrationPrompt:
    (found,) = bare_job(loaded, SETTLED).prompts[1024]
    return found


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> Profile:
    return measure_trials(bare_job(loaded, SETTLED), profile(bare_job(loaded, SETTLED)))


def check_legal(segments: tuple[Segment, ...]) -> None:
    check_fit(MODEL, None, DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),)), ())


def test_candidates_are_legal_and_distinct_and_follow_the_rules() -> None:
    kept = np.random.default_rng(0).uniform(0.5, 1.0, (LAYERS, LAYERS))
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=made_up_reuse(kept))
    found = candidates(MODEL, entry, fraction(0.1))
    filters = [tuple(one.filter for one in segments) for segments in found]
    assert len(set(found)) == len(found) <= 8
    assert {(0,), (0, 5), (0, 3, 6), (0, 2, 5, 7)} <= set(filters)
    assert {first for first, *_ in filters} == {0, 1}
    for segments in found:
        check_legal(segments)
        assert all(one.budget == DecodeBudget(fraction=0.1, at_most=820) for one in segments)


START = (segment(1, (2, 3)), segment(5, (6, 8)))


@pytest.mark.parametrize(
    ("move", "layer", "found"),
    [
        (joined, 4, [(1, (2, 3, 4)), (5, (6, 8))]),
        (joined, 9, [(1, (2, 3)), (5, (6, 8, 9))]),
        (joined, 0, []),  # no filter before it
        (joined, 5, []),  # a filter
        (joined, 3, []),  # sparse already
        (alone, 5, [(1, (2, 3)), (5, (5, 6, 8))]),
        (alone, 0, [(0, (0,)), (1, (2, 3)), (5, (6, 8))]),
        (alone, 7, []),  # between layers of a segment
        (lowered, 0, [(0, (1, 2, 3)), (5, (6, 8))]),
        (lowered, 4, [(1, (2, 3)), (4, (5, 6, 8))]),
        (lowered, 9, []),
        (merged, 5, [(1, (2, 3, 5, 6, 8))]),
        (merged, 1, []),
        (merged, 4, []),
        (halved, 4, []),
    ],
)
def test_a_move_changes_one_layer(move: Any, layer: int, found: list) -> None:
    segments = move(START, layer)
    assert [(one.filter, one.layers) for one in segments] == found
    if segments:
        check_legal(segments)


def test_a_budget_is_halved_in_its_segment_alone_and_grows_where_segments_merge() -> None:
    shares = [
        [one.budget.fraction for one in segments] for segments in (halved(START, 5), merged(START, 5, growth=2.0))
    ]
    assert shares == [[0.1, 0.05], [0.2]]


def test_a_round_of_moves_leaves_no_segments_to_nothing() -> None:
    assert not any(move(()) for move in moves(range(LAYERS)))


@pytest.mark.parametrize(
    ("need", "segments"),
    [
        ({0: 0.05, 4: 0.05}, [(0, (1, 2, 3), 0.05), (4, (5, 6, 7), 0.05)]),
        ({0: 0.05, 4: 0.2}, [(0, (1, 2, 3), 0.05), (4, (4, 5, 6, 7), 0.2)]),
        ({0: 0.3, 4: 0.3}, [(0, (1, 2, 3), 0.4), (4, (5, 6, 7), 0.4)]),
    ],
    ids=["small budgets", "half a budget saves more than an own choice", "none of the usual budgets"],
)
def test_the_search_finds_which_layers_need_everything_and_which_choices_serve(
    monkeypatch: pytest.MonkeyPatch, need: dict[int, float], segments: list
) -> None:
    """Layers 1 to 3 may follow layer 0 and layers 5 to 7 layer 4, with a share of the context; an own choice needs 0.2
    of it; nothing else."""
    served = {layer: first for first in (0, 4) for layer in range(first + 1, first + 4)}

    def divergences(
        self: DecodeTrials, segments: tuple[Segment, ...], prefixes: list, most: float = 1.0
    ) -> list[float]:
        def is_served(layer: int, one: Segment) -> bool:
            least = 0.2 if layer in need else need[one.filter] if served[layer] == one.filter else 1.0
            return one.budget.fraction >= least

        lost = sum(0.0002 if is_served(layer, one) else 1.0 for one in segments for layer in one.layers)
        return [lost] if lost > most else [lost] * len(prefixes)

    monkeypatch.setattr(DecodeTrials, "divergences", divergences)
    loaded, options = loaded_tiny(layers=8), settle(QUICK.but(loss=0.0021), 4096, "cpu")
    job = bare_job(loaded, options)
    (entry,) = (found := measure_trials(job, profile(job))).lengths
    assert all(one.kl <= 0.0021 for one in entry.trials)
    chosen = choose_filter_layers(found, options).bucket(1024).segments
    assert [(one.filter, one.layers, one.budget.fraction) for one in chosen] == segments


@pytest.mark.parametrize("count", [1, 2, 3])
def test_anchor_layers_maximise_the_weighted_similarity(count: int) -> None:
    rng = np.random.default_rng(count)
    kept, importance = rng.uniform(0.0, 1.0, (7, 7)), rng.uniform(0.1, 1.0, 7).tolist()

    def similarity(anchors: tuple[int, ...]) -> float:
        served = ((layer, max(a for a in anchors if a <= layer)) for layer in range(1, 7))
        return sum(importance[layer] * kept[layer, anchor] for layer, anchor in served if layer != anchor)

    options = [(1, *rest) for rest in combinations(range(2, 7), count - 1)]
    found = anchor_layers(kept, importance, range(1, 7), count)
    assert found in options
    assert similarity(found) == pytest.approx(max(map(similarity, options)))


def test_the_bound_of_a_mean_is_above_it_and_within_the_values() -> None:
    values = [0.0, 0.001, 0.002, 0.009]
    assert np.mean(values) < upper_bound(values) < max(values)
    assert upper_bound([0.1, 0.3]) == 0.3


def test_dense_steps_do_not_diverge_and_fewer_tokens_do(loaded: LoadedModel, prompt: CalibrationPrompt) -> None:
    everything, few = segment(0, (1, 2), 1.0, 4096), segment(0, (1, 2), 0.02, 1024)
    with DecodeTrials.on(loaded) as trials:
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
    with DecodeTrials.on(loaded) as trials:
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
    assert all(one.prompts <= PROMPTS for one in entry.trials)
    plan = choose_filter_layers(measured, SETTLED)
    shares = [decode_share(one.segments, 1024, loaded.info) for one in entry.trials]
    assert decode_share(plan.bucket(1024).segments, 1024, loaded.info) == min(shares) < 0.6


def test_shorter_lengths_are_tried_with_the_segments_that_passed_at_the_longest(loaded: LoadedModel) -> None:
    options = settle(QUICK.but(lengths=(512, 1024), target_density=()), 4096, "cpu")
    progress = Counting()
    short, long = measure_trials(bare_job(loaded, options), profile(bare_job(loaded, options)), progress).lengths
    assert progress.done == pytest.approx(progress.total)
    passed = {tuple((part.filter, part.layers) for part in one.segments) for one in long.trials}
    assert short.trials
    assert {tuple((part.filter, part.layers) for part in one.segments) for one in short.trials} <= passed


def test_nothing_is_sparse_inside_a_gate_that_nothing_passes(loaded: LoadedModel, measured: Profile) -> None:
    bare = measured.lengths[0].model_copy(update={"trials": ()})
    options = settle(QUICK.but(loss=0.0), 4096, "cpu")
    found = measure_trials(bare_job(loaded, options), measured.model_copy(update={"lengths": (bare,)}))
    assert not found.lengths[0].trials
    assert choose_filter_layers(found, options).bucket(1024).dense


def test_measuring_again_gives_the_same_trials(loaded: LoadedModel, measured: Profile) -> None:
    bare = measured.model_copy(update={"lengths": (measured.lengths[0].model_copy(update={"trials": ()}),)})
    assert measure_trials(bare_job(loaded, SETTLED), bare) == measured
    assert measure_trials(bare_job(loaded, SETTLED), measured) is measured
