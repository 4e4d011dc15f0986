"""Lines through timed launches, how well they fit, and what a fit cannot be.

A line is fitted by least squares of relative errors with non-negative prices: short launches count as much as long
ones. Such a fit may give work no price at all where timings do not tell it from what a launch costs; a plan that
follows such a line takes dense heads for free. `free_work` finds that out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost.device_cost import Fit, Line, Timing

Floats = npt.NDArray[np.float64]
_WORK = {"tiles": 2, "columns": 3, "tiles of dense heads": 4}  # features of sparse prefill, both in tiles
_LEAST_SHARE = 0.1  # of a launch, from which on its work must have a price
_NOTHING = 0.01  # of the price of the same work by the dense kernel


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
    """Returns the kinds of work in sparse prefill that the fit gives no price, a line each.

    What a tile costs the dense kernel says how much of a launch it is at least.
    """
    if not any(timing.what == "sparse prefill" for timing in timings):
        return ()
    sparse, (_, tile_us) = fit_line(timings, "sparse prefill"), fit_line(timings, "dense prefill").prices
    features, us = _own(timings, "sparse prefill")
    found = []
    for name, feature in _WORK.items():
        shares = features[:, feature] * tile_us / us
        if sparse.prices[feature] < _NOTHING * tile_us and shares.max() > _LEAST_SHARE:
            at = int(shares.argmax())
            found.append(
                f"{name} have no price, although {features[at, feature]:.0f} tiles of them were in a launch of "
                f"{us[at]:.0f} us, at {tile_us:.3g} us a tile of the dense kernel"
            )
    return tuple(found)


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
