"""Intervals of paired differences."""

import numpy as np
import pytest

from sparsekv.planner.eval_results import accuracy_interval, mean_interval


def test_an_unchanged_sample_still_leaves_room_for_a_difference() -> None:
    low, high = accuracy_interval([True] * 200, [True] * 200)
    assert low < 0.0 < high
    assert high - low < 0.04


def test_newcombes_published_example_comes_out() -> None:
    # Newcombe 1998, table II: 36, 12, 2 and 0 of 50 give 0.2 with [0.0569, 0.3404] by method 10.
    first = [True] * 36 + [True] * 12 + [False] * 2
    second = [True] * 36 + [False] * 12 + [True] * 2
    low, high = accuracy_interval(second, first)
    assert (low, high) == pytest.approx((0.0569, 0.3404), abs=1e-4)


def test_more_samples_narrow_the_interval() -> None:
    dense, sparse = [True, True, True, False], [True, False, True, False]
    few, many = accuracy_interval(dense * 5, sparse * 5), accuracy_interval(dense * 50, sparse * 50)
    assert many[1] - many[0] < few[1] - few[0]
    assert few[0] < -0.25 < few[1]


def test_the_interval_of_a_mean_covers_a_known_shift() -> None:
    rng = np.random.default_rng(1)
    dense = rng.normal(2.0, 1.0, 100)
    low, high = mean_interval(dense, dense + rng.normal(0.1, 0.05, 100))
    assert low < 0.1 < high
    assert low > 0.0


def test_one_sample_has_no_interval_of_its_mean() -> None:
    assert mean_interval([1.0], [1.1]) is None


def test_equal_scores_have_an_interval_of_zero_width() -> None:
    assert mean_interval([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0)
