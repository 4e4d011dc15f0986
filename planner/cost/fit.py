"""Lines through timed launches, how well they fit, and what a fit cannot be.

A line is fitted by least squares of relative errors with non-negative prices: short launches count as much as long
ones. Such a fit may give work no price at all where timings do not tell it from what a launch costs; a plan that
follows such a line takes dense heads for free. `free_work` finds that out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost.device_cost import Fit, Line, Timing

Floats = npt.NDArray[np.float64]
_WORK = {"tiles": 2, "columns": 3, "tiles of dense heads": 4}  # features of sparse prefill, both in tiles
_LEAST_SHARE = 0.1  # of a launch, from which on its work must have a price; and of the price that it must have at least
_SPARSE = "sparse prefill"


def fit_line(timings: Sequence[Timing], what: str) -> Line:
    """Returns the line through the timings of that name."""
    features, us = _own(timings, what)
    return Line(prices=tuple(map(float, _prices(features, us))))


def fit_errors(timings: Sequence[Timing], what: str) -> Fit:
    """Returns how far the line is from its timings, and each timing from the line through all others."""
    features, us = _own(timings, what)
    left_out = [_error(_prices(np.delete(features, at, 0), np.delete(us, at)), features[at], us[at]) for at in _all(us)]
    prices = _prices(features, us)
    residuals = [_error(prices, features[at], us[at]) for at in _all(us)]
    return Fit(
        timings=len(us),
        residual=_mean_square(residuals),
        left_out=_mean_square(left_out),
        worst_left_out=max(map(abs, left_out)),
    )


def free_work(timings: Sequence[Timing]) -> tuple[str, ...]:
    """Returns the kinds of work in sparse prefill that the fit gives no price although they take time, a line each.

    How much time: what a launch with much of it takes longer, at the longest length, than the one with the least work.
    Where no launch has more of it than another, what as many tiles cost the dense kernel.
    """
    if not any(timing.what == _SPARSE for timing in timings):
        return ()
    prices = fit_line(timings, _SPARSE).prices
    (_, dense_us), found = fit_line(timings, "dense prefill").prices, []
    launches = _longest(timings)
    least = min(launches, key=lambda work: sum(work[2:]))
    for name, feature in _WORK.items():
        most = max(launches, key=partial(_mostly, feature))
        more = most[feature] - least[feature]
        tile_us = dense_us if more <= most[feature] / 2 else (launches[most] - launches[least]) / more
        share = most[feature] * tile_us / launches[most]
        if prices[feature] < _LEAST_SHARE * tile_us and share > _LEAST_SHARE:
            found.append(
                f"{name} have a price of {prices[feature]:.3g} us, although {most[feature]:.0f} of them in a launch of "
                f"{launches[most]:.0f} us take {tile_us:.3g} us each"
            )
    return tuple(found)


def _mostly(feature: int, work: tuple[float, ...]) -> float:
    """Returns how much of one kind of work is in a launch, the more the less there is of others."""
    return work[feature] ** 2 / max(sum(work[2:]), 1.0)


def _longest(timings: Sequence[Timing]) -> dict[tuple[float, ...], float]:
    """The sparse launches of the longest length, by their features, at their fastest."""
    own = [timing for timing in timings if timing.what == _SPARSE]
    length = max(timing.length for timing in own)
    found: dict[tuple[float, ...], float] = {}
    for timing in own:
        if timing.length == length:
            found[timing.features] = min(timing.us, found.get(timing.features, timing.us))
    return found


def _own(timings: Sequence[Timing], what: str) -> tuple[Floats, Floats]:
    own = [timing for timing in timings if timing.what == what]
    return np.array([timing.features for timing in own]), np.array([timing.us for timing in own])


def _prices(features: Floats, us: Floats) -> Floats:
    from scipy.optimize import nnls

    size = np.maximum(features.max(0), 1e-12)
    prices, _ = nnls(features / size / us[:, None], np.ones(len(us)))
    return np.asarray(prices / size)


def _error(prices: Floats, features: Floats, us: float) -> float:
    return float(features @ prices / us - 1.0)


def _all(us: Floats) -> range:
    return range(len(us))


def _mean_square(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))
