"""Intervals of paired differences."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from sparsekv.planner.evaluation.results import (
    Outcome,
    TaskResult,
    agreement_of,
    bootstrap_interval,
    share_interval,
)


def test_the_interval_of_a_mean_covers_a_known_shift() -> None:
    rng = np.random.default_rng(1)
    low, high = bootstrap_interval(rng.normal(0.1, 0.05, 100).tolist())
    assert low < 0.1 < high
    assert low > 0.0


def test_one_value_has_no_interval_and_equal_ones_none_of_any_width() -> None:
    assert bootstrap_interval([0.1]) is None
    assert bootstrap_interval([0.1, 0.1]) == (0.1, 0.1)


def test_a_perplexity_has_the_interval_of_its_difference() -> None:
    dense, sparse = (tuple(Outcome(None, value) for value in side) for side in ((1.0, 1.2, 1.4), (1.08, 1.33, 1.49)))
    score = TaskResult(dense, sparse).score
    assert (score.dense, score.sparse) == pytest.approx((math.exp(1.2), math.exp(1.3)))
    assert score.interval[0] < score.sparse - score.dense < score.interval[1]


@pytest.mark.parametrize(("right", "of"), [(50, 50), (47, 50), (0, 7), (1, 1), (120, 400)])
def test_a_share_of_single_positions_has_the_wilson_interval(right: int, of: int) -> None:
    expected = binomtest(right, of).proportion_ci(0.95, method="wilson")
    agreed = [1] * right + [0] * (of - right)
    assert share_interval(agreed, [1] * of) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_positions_of_a_sample_count_as_one() -> None:
    """Forty samples of ten positions, all of them alike, or all or none of each."""
    for agreed in ([9] * 40, [10] * 36 + [0] * 4):
        expected = binomtest(36, 40).proportion_ci(0.95, method="wilson")
        assert share_interval(agreed, [10] * 40) == pytest.approx((expected.low, expected.high))


def test_the_bootstrap_of_a_mean_is_the_same_every_time_and_near_the_normal_one() -> None:
    values = np.random.default_rng(3).gamma(2.0, 0.01, 400).tolist()
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), rel=0.02)


def test_agreement_pools_positions_and_counts_texts() -> None:
    found = agreement_of([Outcome(None, 1.0, 0.1, 4, 4, True), Outcome(None, 1.0, 0.3, 2, 8, False)])
    assert (found.samples, found.kl, found.top1, found.exact) == (2, pytest.approx(0.2), 0.5, 0.5)
    assert found.exact_interval == pytest.approx(binomtest(1, 2).proportion_ci(0.95, method="wilson"), abs=1e-6)


def test_what_was_not_measured_is_left_out() -> None:
    found = agreement_of([Outcome(None, 1.0, 0.1, 4, 4), Outcome(None, 1.0, 0.3, 4, 4)])
    assert found.exact is found.exact_interval is None
