"""The ladder of attempts at a plan that missed its gate: stricter options first, then dense, and an end."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_profile, made_up_reuse, options_for
from tiny_plans import segment

from sparsekv.planner.options import Settled
from sparsekv.planner.profile.profile_data import DecodeTrial, Profile
from sparsekv.planner.tighten import tightened
from sparsekv.plans.patterns import fraction
from sparsekv.plans.schema import Agreement, LengthMeasurement, Measurement, Quality

PROFILE = made_up_profile(
    made_up_length(4096, np.random.default_rng(0)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
    made_up_length(8192, np.random.default_rng(1)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
)
BASE = options_for(lengths=(4096, 8192), target_density=(0.2, 0.2))
# Of which nothing is stricter.
TOP = options_for(
    lengths=(4096, 8192), target_density=(0.8, 0.8), filter_layers=(0,), decode_budget=fraction(0.2), crossover=False
)


def measured(*kl: float) -> Measurement:
    by_length = [
        LengthMeasurement(length=length, density=0.5, agreement=Agreement(samples=9, kl=one))
        for length, one in zip((4096, 8192), kl, strict=True)
    ]
    return Measurement(lengths=(4096, 8192), density=0.5, by_length=tuple(by_length))


QUALITY = Quality(prefill=measured(0.3, 0.1), decode=measured(0.2, 0.2))


def after(
    options: Settled, missed: Mapping[str, Sequence[int]], profile: Profile = PROFILE, *, is_last: bool = False
) -> Settled:
    return tightened(options, profile, made_up_prices(), missed, QUALITY, is_last=is_last)


def test_only_the_lengths_that_missed_get_denser() -> None:
    stricter = after(BASE, {"prefill": (8192,), "both": (8192,)})
    assert stricter.target_density == (0.2, 0.26)
    assert stricter.loss_bound == BASE.loss_bound


def test_a_length_at_which_decode_missed_makes_prefill_no_denser_there() -> None:
    assert after(BASE, {"prefill": (4096,), "decode": (8192,)}).target_density == (0.26, 0.2)


def test_decode_loses_less_first_then_spends_more_and_at_last_is_dense() -> None:
    seen, options = [], BASE
    while not options.dense:
        options = after(options, {"decode": (8192,)})
        seen.append((options.decode_loss, options.decode_budget))
    assert seen[:-1] == [(0.01, fraction(0.1)), (0.005, fraction(0.1)), (0.005, fraction(0.2))]
    assert options.dense == {"decode": (8192,)}


def test_decode_that_was_tried_is_tightened_to_a_trial_that_diverged_half_as_much() -> None:
    trials = tuple(
        DecodeTrial(segments=(segment(0, (1, 2), 16),), kl=bound / 2, kl_bound=bound, prompts=4)
        for bound in (0.0004, 0.0016, 0.1)
    )
    longest = PROFILE.lengths[-1].model_copy(update={"trials": trials})
    tried = PROFILE.model_copy(update={"lengths": (PROFILE.lengths[0], longest)})
    seen, options = [], BASE
    while not options.dense:
        options = after(options, {"decode": (8192,)}, tried)
        seen.append(options.decode_kl)
    assert seen == [0.0008, 0.0002, 0.0002]


def test_stricter_decode_that_would_make_a_length_dense_that_met_its_gate_is_not_taken() -> None:
    lengths = [entry.model_copy(update={"reuse": made_up_reuse(np.full((3, 3), 0.98))}) for entry in PROFILE.lengths]
    profile = PROFILE.model_copy(update={"lengths": tuple(lengths)})
    options = BASE.but(crossover=False, decode_loss=0.01)
    assert after(options, {"decode": (8192,)}, profile) == options.but(dense={"decode": (8192,)})
    assert not after(options, {"decode": (4096, 8192)}, profile).dense


def test_both_are_tightened_when_only_together_they_missed() -> None:
    stricter = after(BASE, {"both": (4096,)})
    assert stricter.target_density == (0.26, 0.2)
    assert stricter.loss_bound < BASE.loss_bound
    assert not stricter.dense


@pytest.mark.parametrize(
    ("missed", "before", "dense"),
    [
        ({"prefill": (8192,)}, {}, {"prefill": (8192,)}),
        ({"prefill": (8192,), "both": (4096, 8192)}, {}, {"prefill": (8192,)}),
        ({"prefill": (4096,), "decode": (8192,)}, {}, {"prefill": (4096,), "decode": (8192,)}),
        ({"both": (4096,)}, {}, {"prefill": (4096,)}),
        ({"both": (8192,)}, {}, {"decode": (8192,)}),
        ({"both": (8192,)}, {"decode": (4096, 8192)}, {"decode": (4096, 8192), "prefill": (8192,)}),
        ({"prefill": (8192,)}, {"prefill": (8192,)}, {"prefill": (8192, 4096)}),
        ({"prefill": (8192,), "both": (8192,)}, {"prefill": (4096, 8192)}, None),
        ({"prefill": (8192,)}, {"prefill": (4096, 8192)}, {"prefill": (4096, 8192)}),
    ],
)
@pytest.mark.parametrize(("options", "is_last"), [(TOP, False), (TOP, True), (BASE, True)])
def test_what_has_nothing_stricter_goes_dense_where_it_missed(options, is_last, missed, before, dense) -> None:
    expected = {"prefill": (4096, 8192), "decode": (8192,)} if dense is None else dense
    assert after(options.but(dense=before), missed, is_last=is_last).dense == expected


def test_the_ladder_ends_with_nothing_sparse() -> None:
    everywhere = dict.fromkeys(("prefill", "decode", "both"), (4096, 8192))
    seen, options = [BASE], after(BASE, everywhere)
    while options != seen[-1]:
        assert len(seen) < 20
        seen.append(options)
        options = after(options, everywhere)
    assert {phase: set(lengths) for phase, lengths in options.dense.items()} == {
        "prefill": {4096, 8192},
        "decode": {4096, 8192},
    }
