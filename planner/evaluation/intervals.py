"""Intervals of paired differences: the same samples, dense and sparse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95


def accuracy_interval(dense: Sequence[bool], sparse: Sequence[bool]) -> tuple[float, float]:
    """The 95% interval of the difference of two paired proportions, sparse - dense.

    Newcombe's hybrid score interval for paired data (Statistics in Medicine 17, 1998, method 10), from the Wilson
    intervals of scipy. Unlike a bootstrap, it does not collapse to zero when no sample changed.
    """
    from scipy.stats import binomtest

    before, after = np.asarray(dense, bool), np.asarray(sparse, bool)
    count = len(before)
    p_after, p_before = float(after.mean()), float(before.mean())
    low_a, high_a = binomtest(int(after.sum()), count).proportion_ci(LEVEL, method="wilson")
    low_b, high_b = binomtest(int(before.sum()), count).proportion_ci(LEVEL, method="wilson")
    phi = _correlation(before, after)
    difference = p_after - p_before
    down = _hybrid(p_after - low_a, high_b - p_before, phi)
    up = _hybrid(high_a - p_after, p_before - low_b, phi)
    return max(-1.0, difference - down), min(1.0, difference + up)


def mean_interval(dense: Sequence[float], sparse: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of paired differences, sparse - dense (Student's t)."""
    from scipy.stats import ttest_rel

    differences = np.asarray(sparse, float) - np.asarray(dense, float)
    mean = float(differences.mean())
    if len(differences) < 2 or float(np.ptp(differences)) == 0.0:
        return mean, mean
    interval = ttest_rel(sparse, dense).confidence_interval(LEVEL)
    return float(interval.low), float(interval.high)


def _hybrid(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(0.0, a * a - 2.0 * phi * a * b + b * b))


def _correlation(before: np.ndarray, after: np.ndarray) -> float:
    both = float((before & after).sum())
    neither = float((~before & ~after).sum())
    lost, won = float((before & ~after).sum()), float((~before & after).sum())
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    if margins == 0.0:
        return 0.0
    agreement = both * neither - lost * won
    if agreement > 0.0:
        agreement = max(agreement - len(before) / 2.0, 0.0)  # Newcombe's continuity correction
    return agreement / math.sqrt(margins)
