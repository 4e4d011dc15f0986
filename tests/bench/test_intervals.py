"""Intervals of paired differences."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from sparsekv.bench.intervals import bootstrap_interval, score_interval


def test_the_interval_of_a_mean_covers_a_known_shift() -> None:
    rng = np.random.default_rng(1)
    low, high = bootstrap_interval(rng.normal(0.1, 0.05, 100).tolist())
    assert low < 0.1 < high
    assert low > 0.0


def test_one_value_has_no_interval_and_equal_ones_none_of_any_width() -> None:
    assert bootstrap_interval([0.1]) is None
    assert bootstrap_interval([0.1, 0.1]) == (0.1, 0.1)


@pytest.mark.parametrize(("right", "of"), [(50, 50), (47, 50), (0, 7), (1, 1), (120, 400)])
def test_what_is_only_won_has_the_wilson_interval(right: int, of: int) -> None:
    expected = binomtest(right, of).proportion_ci(0.95, method="wilson")
    low, high = score_interval([0.0] * of, [1.0] * right + [0.0] * (of - right))
    assert high == pytest.approx(expected.high, abs=1e-9)
    assert low <= expected.low + 1e-9


def test_the_bootstrap_of_a_mean_is_the_same_every_time_and_near_the_normal_one() -> None:
    values = np.random.default_rng(3).gamma(2.0, 0.01, 400).tolist()
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), rel=0.02)
