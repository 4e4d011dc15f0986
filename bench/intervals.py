"""95% intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsekv.plans.types import Real

_LEVEL = 0.95
_RESAMPLES = 9999  # of a bootstrap; its generator is the same every time

Interval = tuple[Real, Real]


def _hybrid(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(0.0, a * a - 2.0 * phi * a * b + b * b))


def score_interval(dense: Sequence[float], sparse: Sequence[float]) -> Interval:
    """The 95% interval of the mean of paired differences, sparse - dense, of scores from 0 to 1.

    Newcombe's hybrid (Statistics in Medicine 17, 1998) of what was won and what was lost, each from Wilson's interval,
    too wide where samples win or lose a part of the score. It does not collapse to zero when no sample changed.
    """
    moved = np.asarray(sparse, float) - np.asarray(dense, float)
    won, lost = float(moved.clip(min=0.0).mean()), float((-moved).clip(min=0.0).mean())
    (low_won, high_won), (low_lost, high_lost) = (_wilson(share, len(moved)) for share in (won, lost))
    phi = -math.sqrt(won * lost / ((1.0 - won) * (1.0 - lost))) if won * lost else 0.0  # no sample does both
    down, up = _hybrid(won - low_won, high_lost - lost, phi), _hybrid(high_won - won, lost - low_lost, phi)
    return max(-1.0, won - lost - down), min(1.0, won - lost + up)


def _wilson(share: float, count: float) -> Interval:
    """Wilson's score interval of a share of so many independent positions."""
    from scipy.stats import norm

    z2 = float(norm.ppf(0.5 + _LEVEL / 2.0)) ** 2
    centre = (share + z2 / (2.0 * count)) / (1.0 + z2 / count)
    spread = math.sqrt(z2 * (share * (1.0 - share) / count + z2 / (4.0 * count**2))) / (1.0 + z2 / count)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """The 95% interval of a mean of skewed values (percentile bootstrap over samples); None of fewer than two."""
    from scipy.stats import bootstrap

    if len(values) < 2:
        return None
    if float(np.ptp(values)) == 0.0:
        return (mean := float(np.mean(values))), mean
    how: dict[str, Any] = {"n_resamples": _RESAMPLES, "batch": 256, "method": "percentile"}
    bounds = bootstrap((values,), np.mean, random_state=np.random.default_rng(0), **how).confidence_interval
    return float(bounds.low), float(bounds.high)
