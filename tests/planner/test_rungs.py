"""The plans that follow one that missed its test: denser where it missed, then dense, and an end."""

import numpy as np
import pytest
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_profile, made_up_reuse, options_for
from tiny_plans import segment

from sparsekv.planner.allocate import allocate
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.options import Settled
from sparsekv.planner.plan import dense_remarks, denser_remarks
from sparsekv.planner.predict import ScoreTables, choice_of
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile
from sparsekv.plans.types import format_length


def trials(length: int) -> tuple[DecodeTrial, ...]:
    """The fewer layers are sparse, the less is lost."""
    bounds = {(1, 2): 2.0, (2,): 0.9, (1,): 0.3}
    return tuple(
        DecodeTrial(segments=(segment(0, layers, 16),), kl=bound / 2, kl_bound=bound, prompts=4)
        for layers, bound in bounds.items()
    )


LENGTHS = (4096, 8192)
LEVELS = (0.1, 0.2, 0.4, 0.8)
PROFILE = made_up_profile(
    *(
        made_up_length(length, np.random.default_rng(length), levels=LEVELS).model_copy(
            update={"reuse": made_up_reuse(np.eye(3)), "trials": trials(length)}
        )
        for length in LENGTHS
    )
)
BASE = options_for(lengths=LENGTHS, loss=4.0)  # half of it for each phase


def damage_and_density(options: Settled, entry: LengthProfile) -> tuple[float, float]:
    tables = ScoreTables.of(entry)
    choice = choice_of(allocate(PROFILE, made_up_prices(), options).bucket(entry.length), tables)
    return float(tables.take(tables.damage_LCH, choice, 0.0).sum()), tables.density(choice)


def damage(options: Settled, entry: LengthProfile) -> float:
    return damage_and_density(options, entry)[0]


def followers(options: Settled, length: int) -> list[tuple[int, ...]]:
    return [one.layers for one in choose_filter_layers(PROFILE, options).bucket(length).segments]


def test_each_rung_halves_what_prefill_loses_where_the_plan_missed_and_nowhere_else() -> None:
    short, long = PROFILE.lengths
    lost, options = [damage(BASE, long)], BASE
    assert 1.0 < lost[0] <= BASE.phase_loss
    for _ in range(3):
        options = options.denser([8192])
        lost.append(damage(options, long))
        assert lost[-1] <= lost[-2] / 2
        assert damage(options, short) == damage(BASE, short)


def test_each_rung_takes_decode_that_lost_at_most_half_as_much() -> None:
    seen, options = [], BASE
    for _ in range(4):
        seen.append(followers(options, 8192))
        options = options.denser([4096, 8192])
    assert seen == [[(1, 2)], [(2,)], [(1,)], []]


def test_a_density_that_was_asked_for_grows() -> None:
    options = BASE.but(target_density=(0.2, 0.2)).denser([8192])
    short, long = (damage_and_density(options, entry)[1] for entry in PROFILE.lengths)
    assert short < 0.2001 < long < 0.2601


def test_filter_layers_that_were_given_choose_twice_as_many_tokens() -> None:
    given = BASE.but(filter_layers=(0,), phases=("decode",))
    plan = choose_filter_layers(PROFILE, given.denser([4096]).denser([4096]))
    assert [plan.bucket(length).segments[0].budget.fraction for length in LENGTHS] == [0.4, 0.1]


def test_lengths_become_dense_in_both_phases_and_stay_so() -> None:
    options = BASE.dense_at([8192]).dense_at([4096])
    assert options.dense == LENGTHS
    assert options.dense_at(LENGTHS) == options
    assert all(bucket.dense for bucket in allocate(PROFILE, made_up_prices(), options).lengths)
    assert all(bucket.dense for bucket in choose_filter_layers(PROFILE, options).lengths)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_that_is_denser_is_told_in_a_line_unless_it_is_dense(length: int) -> None:
    options = BASE.denser([length]).denser([length])
    (line,) = denser_remarks(options)
    assert line.startswith(f"{format_length(length)} is planned for a smaller loss: 2 plans")
    assert not [*denser_remarks(BASE), *denser_remarks(options.dense_at([length]))]


def test_a_length_that_is_dense_is_told_with_the_losses_of_each_plan_there() -> None:
    options = BASE.but(dense=(8192,))
    (line,) = dense_remarks(options, {8192: ("qa lost 0.2", "qa lost 0.1"), 4096: ("nothing",)})
    assert line.startswith("8k is dense: 2 plans")
    assert line.endswith("(qa lost 0.2, then qa lost 0.1)")
