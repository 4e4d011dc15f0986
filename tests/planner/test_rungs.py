"""The plans that follow one that missed its test: denser where it missed, then dense, and an end."""

from collections.abc import Sequence

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_profile, made_up_reuse, options_for
from tiny_plans import segment

from sparsekv.planner.options import Settled
from sparsekv.planner.profile.profile_data import DecodeTrial, Profile
from sparsekv.planner.rungs import dense_at, dense_remarks, denser
from sparsekv.plans.patterns import fraction

PROFILE = made_up_profile(
    made_up_length(4096, np.random.default_rng(0)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
    made_up_length(8192, np.random.default_rng(1)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
)
BASE = options_for(lengths=(4096, 8192), target_density=(0.2, 0.2))
PREFILL = BASE.but(phases=("prefill",))
DECODE = BASE.but(phases=("decode",))
# Of which nothing is stricter.
TOP = options_for(lengths=(4096, 8192), target_density=(0.8, 0.8), filter_layers=(0,), decode_budget=fraction(0.2))


def after(options: Settled, missed: Sequence[int], profile: Profile = PROFILE) -> Settled:
    return denser(options, profile, missed)


def test_only_the_lengths_that_missed_get_denser_and_decode_with_prefill() -> None:
    assert after(PREFILL, [8192]) == PREFILL.but(target_density=(0.2, 0.26))
    stricter = after(BASE, [4096])
    assert stricter.target_density == (0.26, 0.2)
    assert stricter.loss_bound < BASE.loss_bound
    assert not stricter.dense


def test_decode_loses_less_first_then_spends_more_and_at_last_is_dense() -> None:
    seen, options = [], DECODE
    while not options.dense:
        options = after(options, [8192])
        seen.append((options.decode_loss, options.decode_budget))
    assert seen[:-1] == [(0.01, fraction(0.1)), (0.005, fraction(0.1)), (0.005, fraction(0.2))]
    assert options.dense == {"decode": (8192,)}


def test_decode_that_was_tried_goes_on_to_a_trial_that_diverged_half_as_much() -> None:
    trials = tuple(
        DecodeTrial(segments=(segment(0, (1, 2), 16),), kl=bound / 2, kl_bound=bound, prompts=4)
        for bound in (0.0004, 0.0016, 0.1)
    )
    longest = PROFILE.lengths[-1].model_copy(update={"trials": trials})
    tried = PROFILE.model_copy(update={"lengths": (PROFILE.lengths[0], longest)})
    seen, options = [], DECODE
    while not options.dense:
        options = after(options, [8192], tried)
        seen.append(options.decode_kl)
    assert seen == [0.0008, 0.0002, 0.0002]


def test_stricter_decode_that_would_make_a_length_dense_that_passed_is_not_taken() -> None:
    lengths = [entry.model_copy(update={"reuse": made_up_reuse(np.full((3, 3), 0.98))}) for entry in PROFILE.lengths]
    profile = PROFILE.model_copy(update={"lengths": tuple(lengths)})
    options = DECODE.but(decode_loss=0.01)
    assert after(options, [8192], profile) == options.but(dense={"decode": (8192,)})
    assert not after(options, [4096, 8192], profile).dense


@pytest.mark.parametrize(
    ("missed", "before", "dense"),
    [
        ([8192], {}, {"prefill": (8192,), "decode": (8192,)}),
        ([8192], {"decode": (4096, 8192)}, {"decode": (4096, 8192), "prefill": (8192,)}),
        ([4096, 8192], {"prefill": (8192,)}, {"prefill": (8192, 4096), "decode": (4096, 8192)}),
        ([8192], {"prefill": (8192,), "decode": (8192,)}, {"prefill": (8192,), "decode": (8192,)}),
    ],
)
def test_a_length_with_nothing_denser_is_dense_in_both_phases(missed, before, dense) -> None:
    options = TOP.but(dense=before)
    assert after(options, missed) == dense_at(options, PROFILE, missed)
    assert after(options, missed).dense == dense


def test_denser_plans_end_with_nothing_sparse() -> None:
    seen, options = [BASE], after(BASE, [4096, 8192])
    while options != seen[-1]:
        assert len(seen) < 20
        seen.append(options)
        options = after(options, [4096, 8192])
    everywhere = {4096, 8192}
    assert {phase: {*lengths} for phase, lengths in options.dense.items()} == dict.fromkeys(BASE.phases, everywhere)


def test_a_length_that_is_dense_is_told_with_the_losses_of_each_plan_there() -> None:
    options = BASE.but(dense={"prefill": (8192,), "decode": (8192,)})
    (line,) = dense_remarks(options, {8192: ("qa lost 0.2", "qa lost 0.1"), 4096: ("nothing",)})
    assert line.startswith("8k is dense")
    assert line.endswith("(qa lost 0.2, then qa lost 0.1)")
