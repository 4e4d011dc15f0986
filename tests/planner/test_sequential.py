"""Sequential tests of means: how often they are wrong, whenever one stops, and how much they need."""

import numpy as np
import pytest

from sparsekv.planner.sequential import Range, is_above, is_below, more_needed, upper_confidence_bound

NATS, SHARE = Range(-1.0, 5.0, 0.5, 0.5), Range(0.0, 1.0, 0.01, 0.1)
ANSWERS = Range(-1.0, 1.0, 0.0, 0.14, weight=100.0)  # lost and found
LEVEL = 0.05
RUNS, ROUNDS = 150, 40


def skewed(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Log-normal: most values are far below the mean."""
    return mean * np.exp(rng.standard_normal(shape) - 0.5)


def rare(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Nothing but for one value in twenty."""
    return np.where(rng.random(shape) < 0.2 * mean, 5.0, 0.0)


def unequal(rng: np.random.Generator, mean: float, shape: tuple[int, ...]) -> np.ndarray:
    """Strata of a round far apart, the worst one last."""
    return np.broadcast_to(mean * np.linspace(0.0, 2.0, shape[-1]), shape)


@pytest.mark.parametrize("draw", [skewed, rare, unequal])
@pytest.mark.parametrize("claim", [is_below, is_above])
def test_a_mean_at_the_gate_is_rarely_shown_to_be_elsewhere_however_often_one_looks(draw, claim) -> None:
    """What was shown at any of the looks stays shown, so that one call at the end counts all of them."""
    rng = np.random.default_rng(0)
    values = draw(rng, 1.0, (RUNS, ROUNDS, 5)).clip(NATS.low, NATS.high)
    gate = 1.0 if draw is unequal else float(values.mean())  # capped, skewed values have a smaller mean
    wrong = sum(claim(rounds, gate, NATS, LEVEL) for rounds in values)
    assert wrong <= RUNS * LEVEL + 2.0 * np.sqrt(RUNS * LEVEL)


def test_what_is_shown_stays_shown_with_more_samples() -> None:
    good = [[0.1] * 5] * 10
    assert is_below(good, 1.0, NATS, LEVEL)
    assert is_below([*good, *[[5.0] * 5] * 10], 1.0, NATS, LEVEL)


def test_no_failure_in_ninety_prompts_shows_that_fewer_than_one_in_twenty_fail() -> None:
    """The exact binomial bound takes 72 at this level."""
    found = [is_below([[0.0]] * prompts, 0.05, SHARE, 0.025) for prompts in (70, 90)]
    assert found == [False, True]


def test_values_beyond_the_range_count_as_its_ends() -> None:
    rounds, capped = [[100.0, -100.0, 0.3]] * 20, [[5.0, -1.0, 0.3]] * 20
    assert upper_confidence_bound(rounds, NATS, LEVEL) == upper_confidence_bound(capped, NATS, LEVEL)


def test_the_upper_bound_narrows_and_is_the_gate_that_is_just_shown() -> None:
    rng = np.random.default_rng(1)
    rounds = skewed(rng, 0.5, (60, 5))
    bounds = [upper_confidence_bound(rounds[:count], NATS, LEVEL) for count in (0, 2, 10, 60)]
    assert bounds[0] == NATS.high
    assert bounds == sorted(bounds, reverse=True)
    assert is_below(rounds, bounds[-1] + 0.005, NATS, LEVEL)
    assert not is_below(rounds, bounds[-1] - 0.005, NATS, LEVEL)


@pytest.mark.parametrize("seed", [3, 17, 18, 24])
def test_more_samples_never_raise_a_bound_beyond_their_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rounds = rng.choice([0.0, 1.0, -1.0], p=[0.96, 0.03, 0.01], size=(300, 12))
    bounds = {count: upper_confidence_bound(rounds[:count], ANSWERS, LEVEL) for count in range(100, 301, 10)}
    assert all(bounds[at + 10] <= max(bounds[at], rounds[: at + 10].mean()) for at in range(100, 300, 10))
    assert bounds[300] < 0.04


@pytest.mark.parametrize("seed", range(6))
def test_every_gate_above_a_bound_is_shown_and_none_much_below_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rounds = rng.choice([0.0, 1.0, -1.0], p=[0.95, 0.035, 0.015], size=(200, 12))
    bound = upper_confidence_bound(rounds, ANSWERS, LEVEL)
    assert all(is_below(rounds, gate, ANSWERS, LEVEL) for gate in bound + np.linspace(0.0, 0.02, 41))
    assert not is_below(rounds, bound - 1e-3, ANSWERS, LEVEL)


def test_about_as_many_more_samples_are_told_as_it_takes() -> None:
    rng = np.random.default_rng(2)
    values = skewed(rng, 0.4, (400, 1))
    taken = next(count for count in range(400) if is_below(values[:count], 1.0, NATS, LEVEL))
    told = more_needed(values[: taken // 2], 1.0, NATS, LEVEL)
    assert told == pytest.approx(taken - taken // 2, rel=0.6)
    assert more_needed([[1.5]] * 9, 1.0, NATS, LEVEL) is None
    assert more_needed([[0.5], [1.4], [0.9]], 1.0, NATS, LEVEL) is None
    assert more_needed([[0.5], [1.4], [0.9]] * 40, 1.0, NATS, LEVEL) is not None
    assert more_needed([], 1.0, NATS, LEVEL) is None
