"""From trials to segments: what stays inside the loss and reads least; given layers, budgets, offload."""

import numpy as np
import pytest
from planner_profiles import RECENT, SINK, made_up_model, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.decode_search import candidates
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import DecodeBudget, DecodePlan, Segment

LAYERS, LENGTH = 10, 8192
DECODE = options_for(phases=("decode",), loss=0.003)


def segment(filter_: int, layers: tuple[int, ...], share: float = 0.1, length: int = LENGTH) -> Segment:
    at_most = fraction(share).resolve(length)
    return Segment(filter=filter_, layers=layers, budget=DecodeBudget(fraction=share, at_most=at_most), recent=RECENT)


def trial(*segments: Segment, bound: float) -> DecodeTrial:
    return DecodeTrial(segments=segments, kl=bound / 2, kl_bound=bound, prompts=4)


def tried(*trials: DecodeTrial, length: int = LENGTH) -> LengthProfile:
    reuse = made_up_reuse(np.ones((LAYERS, LAYERS)))
    return LengthProfile(length=length, prompt_tokens=(length,), reuse=reuse, trials=trials)


def profile_of(*entries: LengthProfile) -> Profile:
    return made_up_profile(*entries, model=made_up_model(layers=LAYERS))


def chosen(*entries: LengthProfile, options: PlanOptions = DECODE) -> DecodePlan:
    return choose_filter_layers(profile_of(*entries), options)


def shapes(plan: DecodePlan, length: int = LENGTH) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.filter, one.layers) for one in plan.bucket(length).segments]


def test_the_sparsest_trial_inside_the_loss_is_planned() -> None:
    outside = trial(segment(0, tuple(range(1, 10))), bound=0.01)
    sparse, denser = trial(segment(0, (1, 2, 3, 4, 5)), bound=0.0019), trial(segment(0, (1, 2)), bound=0.0001)
    assert chosen(tried(outside, sparse, denser)).bucket(LENGTH).segments == sparse.segments
    stricter = chosen(tried(outside, sparse, denser), options=DECODE.but(loss=0.001))
    assert stricter.bucket(LENGTH).segments == denser.segments
    beside_prefill = chosen(tried(sparse, denser), options=DECODE.but(phases=("prefill", "decode")))
    assert beside_prefill.bucket(LENGTH).segments == denser.segments  # half of the loss is for prefill


def test_without_a_trial_inside_the_loss_decode_is_dense() -> None:
    assert all(bucket.dense for bucket in chosen(tried()).lengths)
    assert all(bucket.dense for bucket in chosen(tried(trial(segment(0, (1,)), bound=0.1))).lengths)


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
    assert chosen(tried(own), options=DECODE.but(offload=True)).offload.layers == (1, 2, 3)


def test_a_budget_that_was_asked_for_bounds_the_trials() -> None:
    large, small = trial(segment(0, (1, 2, 3, 4, 5)), bound=0.001), trial(segment(0, (1, 2), 0.05), bound=0.001)
    plan = chosen(tried(large, small), options=DECODE.but(decode_budget=fraction(0.05)))
    assert plan.bucket(LENGTH).segments == small.segments


def test_fixed_layers_are_taken_as_they_are() -> None:
    plan = chosen(tried(), options=options_for(filter_layers=(5, 2)))
    assert shapes(plan) == [(2, (3, 4)), (5, (6, 7, 8, 9))]


def sliding(*layers: int) -> Profile:
    """A profile of a model in which these layers see a window only."""
    profile = profile_of(tried())
    (group,) = profile.model.attention
    full = tuple(layer for layer in group.layers if layer not in layers)
    groups = [group.model_copy(update={"layers": layers, "kind": "sliding", "window": 1024})]
    groups += [group.model_copy(update={"layers": full})] if full else []
    groups.sort(key=lambda one: one.layers[0])
    return profile.model_copy(update={"model": profile.model.model_copy(update={"attention": tuple(groups)})})


def test_layers_with_a_window_of_their_own_neither_choose_nor_follow() -> None:
    profile, full = sliding(0, 3), {1, 2, *range(4, LAYERS)}
    plan = choose_filter_layers(profile, options_for(filter_layers=(1,)))
    assert shapes(plan) == [(1, (2, *range(4, LAYERS)))]
    for segments in candidates(profile.model, profile.lengths[0], fraction(0.1)):
        assert all({one.filter, *one.layers} <= full for one in segments)


def test_a_model_of_windows_alone_decodes_densely() -> None:
    plan = choose_filter_layers(sliding(*range(LAYERS)), DECODE)
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(None, True)]


def test_fixed_layers_of_a_model_of_windows_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="without such layers"):
        choose_filter_layers(sliding(*range(LAYERS)), options_for(filter_layers=(2,)))


@pytest.mark.parametrize(
    ("dense", "found"),
    [
        ((), [(None, False)]),
        ((8192,), [(8192, True), (None, False)]),
        ((16384,), [(8192, False), (16384, True), (None, False)]),
        ((32768,), [(16384, False), (None, True)]),
        ((8192, 16384, 32768), [(None, True)]),
    ],
)
@pytest.mark.parametrize("rule", [{}, {"filter_layers": (0,)}, {"offload": True}], ids=str)
def test_lengths_that_are_to_be_dense_are_and_the_others_stay_as_they_are(rule, dense, found) -> None:
    own = trial(segment(0, (1, 2, 3), length=32768), bound=0.001)
    entries = [tried(own, length=length) for length in (8192, 16384, 32768)]
    before, plan = (chosen(*entries, options=DECODE.but(dense=lengths, **rule)) for lengths in ((), dense))
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == found
    sparse = {8192, 16384, 32768} - {*dense}
    assert all(shapes(plan, length) == shapes(before, length) for length in sparse)
    assert (plan.offload is not None) == bool(rule.get("offload") and sparse)


def test_a_fraction_says_how_many_tokens_it_comes_to_at_most() -> None:
    given = options_for(filter_layers=(0,))
    (one,) = chosen(tried(), tried(length=16384), options=given).bucket(8192).segments
    assert one.budget == DecodeBudget(fraction=0.1, at_most=1639)
    assert (one.sink, one.recent) == (SINK, RECENT)


def test_the_budget_asked_for_is_written() -> None:
    plan = chosen(tried(), options=options_for(filter_layers=(0,), decode_budget=tokens(1000)))
    assert plan.bucket(8192).segments[0].budget == DecodeBudget(tokens=1000)
