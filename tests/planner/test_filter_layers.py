"""From similarities to segments: given layers, budgets, offload."""

import numpy as np
import pytest
from planner_profiles import made_up_model, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import DecodeBudget, DecodePlan

ALWAYS = options_for()


def profile_of(*kept: np.ndarray, importance: tuple[float, ...] | None = None) -> Profile:
    """A profile at 8192, 16384, ... with these similarities [layer j, filter i]."""
    lengths = [
        LengthProfile(length=8192 << place, prompt_tokens=(8192 << place,), reuse=made_up_reuse(table, importance))
        for place, table in enumerate(kept)
    ]
    return made_up_profile(*lengths, model=made_up_model(layers=len(kept[0])))


def segments(plan: DecodePlan, length: int = 8192) -> list[tuple[int, tuple[int, ...]]]:
    return [(segment.filter, segment.layers) for segment in plan.bucket(length).segments]


def good(layers: int, *pairs: tuple[int, range]) -> np.ndarray:
    """Similarity 0 but 1 for these filters over these layers."""
    kept = np.zeros((layers, layers))
    for filter_, span in pairs:
        kept[list(span), filter_] = 1.0
    return kept


def test_the_number_of_filter_layers_comes_out_of_the_similarities() -> None:
    one = choose_filter_layers(profile_of(np.ones((8, 8))), ALWAYS)
    assert segments(one) == [(0, tuple(range(1, 8)))]
    two = good(8, (0, range(1, 4)), (4, range(5, 8)))
    assert segments(choose_filter_layers(profile_of(two), ALWAYS)) == [(0, (1, 2, 3)), (4, (5, 6, 7))]


def test_layers_that_no_choice_serves_stay_dense() -> None:
    kept = good(8, (2, range(4, 7)))
    assert segments(choose_filter_layers(profile_of(kept), ALWAYS)) == [(2, (4, 5, 6))]


def test_an_unimportant_layer_may_lose_what_an_important_one_may_not() -> None:
    kept = np.full((3, 3), 0.9)
    options = options_for(decode_loss=0.01)
    plan = choose_filter_layers(profile_of(kept, importance=(1.0, 0.05, 1.0)), options)
    assert segments(plan) == [(0, (1,))]


def test_a_higher_loss_makes_no_fewer_layers_sparse() -> None:
    rng = np.random.default_rng(0)
    profile = profile_of(rng.uniform(0.7, 1.0, (12, 12)))
    sparse = [
        sum(len(layers) for _, layers in segments(choose_filter_layers(profile, options)))
        for options in (options_for(decode_loss=loss) for loss in (0.01, 0.03, 0.1, 1.0))
    ]
    assert sparse == sorted(sparse)
    assert sparse[-1] == 11


def test_fixed_layers_are_taken_as_they_are() -> None:
    options = options_for(filter_layers=(5, 2))
    assert segments(choose_filter_layers(profile_of(np.zeros((8, 8))), options)) == [
        (2, (3, 4)),
        (5, (6, 7)),
    ]


def sliding(profile: Profile, *layers: int) -> Profile:
    """The same profile of a model in which these layers see a window only."""
    (group,) = profile.model.attention
    full = tuple(layer for layer in group.layers if layer not in layers)
    groups = [group.model_copy(update={"layers": layers, "kind": "sliding", "window": 1024})]
    groups += [group.model_copy(update={"layers": full})] if full else []
    groups.sort(key=lambda one: one.layers[0])
    return profile.model_copy(update={"model": profile.model.model_copy(update={"attention": tuple(groups)})})


def test_layers_with_a_window_of_their_own_neither_choose_nor_follow() -> None:
    plan = choose_filter_layers(sliding(profile_of(np.ones((6, 6))), 0, 3), ALWAYS)
    assert segments(plan) == [(1, (2, 4, 5))]


def test_a_model_of_windows_alone_decodes_densely() -> None:
    profile = sliding(profile_of(np.ones((4, 4))), *range(4))
    plan = choose_filter_layers(profile, ALWAYS)
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(None, True)]


def test_fixed_layers_of_a_model_of_windows_alone_are_refused() -> None:
    options = options_for(filter_layers=(2,))
    with pytest.raises(UsageError, match="without such layers"):
        choose_filter_layers(sliding(profile_of(np.ones((4, 4))), *range(4)), options)


def test_lengths_that_are_sparse_alike_are_one_open_ended_bucket() -> None:
    plan = choose_filter_layers(profile_of(np.ones((4, 4)), np.ones((4, 4))), ALWAYS)
    assert [bucket.up_to for bucket in plan.lengths] == [None]


def test_the_loss_of_shared_segments_is_bounded_at_every_sparse_length() -> None:
    first, second = good(6, (0, range(1, 6)), (2, range(3, 6))), good(6, (2, range(3, 6)))
    plan = choose_filter_layers(profile_of(first, second), ALWAYS)
    assert segments(plan, 8192) == segments(plan, 16384) == [(2, (3, 4, 5))]


def test_a_short_length_that_no_shared_choice_serves_goes_dense_and_costs_the_longer_ones_nothing() -> None:
    plan = choose_filter_layers(profile_of(np.zeros((6, 6)), np.ones((6, 6))), ALWAYS)
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(8192, True), (None, False)]
    assert segments(plan, 16384) == [(0, (1, 2, 3, 4, 5))]


@pytest.mark.parametrize(
    ("dense", "found"),
    [
        ((8192,), [(8192, True), (None, False)]),
        ((16384,), [(8192, False), (16384, True), (None, False)]),
        ((32768,), [(16384, False), (None, True)]),
        ((8192, 16384, 32768), [(None, True)]),
    ],
)
@pytest.mark.parametrize("rule", [{}, {"filter_layers": (0,)}, {"offload": True}], ids=str)
def test_lengths_that_are_to_be_dense_are_and_the_others_stay_as_they_are(rule, dense, found) -> None:
    profile, options = profile_of(*[np.ones((4, 4))] * 3), options_for(**rule)
    before, plan = (choose_filter_layers(profile, one) for one in (options, options.but(dense={"decode": dense})))
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == found
    sparse = {8192, 16384, 32768} - {*dense}
    assert all(segments(plan, length) == segments(before, length) for length in sparse)
    assert (plan.offload is not None) == bool(rule.get("offload") and sparse)


def test_a_fraction_says_how_many_tokens_it_comes_to_at_most() -> None:
    options, profile = options_for(), profile_of(np.ones((3, 3)), np.ones((3, 3)))
    (segment,) = choose_filter_layers(profile, options).bucket(8192).segments
    assert segment.budget == DecodeBudget(fraction=0.1, at_most=1639)
    assert (segment.sink, segment.recent) == (profile.lengths[0].reuse.sink, profile.lengths[0].reuse.recent)


def test_the_budget_asked_for_is_written_and_its_loss_not_underestimated() -> None:
    kept = np.ones((4, 4))  # the smallest budget of the made-up profile keeps half of everything
    between = options_for(decode_budget=fraction(0.08))
    assert choose_filter_layers(profile_of(kept), between).bucket(8192).dense
    larger = options_for(decode_budget=tokens(1000))
    plan = choose_filter_layers(profile_of(kept), larger)
    assert plan.bucket(8192).segments[0].budget == DecodeBudget(tokens=1000)
