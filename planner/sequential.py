"""Sequential tests of a mean: prompts are drawn until a gate is shown to be met, or to be missed.

A test bets against the claim that the mean is at least the gate. Its wealth starts at 1 and is multiplied by
`1 + bet * (gate - value)` for every value; where the claim holds, wealth of 1 / level is reached with probability
`level` at most, however often and whenever one looks (Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", JRSS B 86, 2024, sections 4 and B.3). So no number of samples is fixed in advance,
no look costs anything, and the bound holds for every sample size and every distribution within the range.

Values come in rounds, one of each stratum (task, length). A bet is placed on a whole round and depends on earlier
rounds alone: strata of unequal means cannot make wealth either, since their average product is at most that of equal
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

_MOST_BET = 0.85  # of the bet that one value at the far end of the range would ruin
_PRIOR = 3.0  # values that the guess counts as, in the first bets
_GRID = 241  # means that a bound is searched among

Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Range:
    """Values of which a mean is tested, and what they probably are: a guess costs samples where it is wrong, never
    the level.

    Attributes:
        low, high: values outside count as these.
        guess, spread: mean and standard deviation, before anything is seen.
    """

    low: float
    high: float
    guess: float
    spread: float

    def mirrored(self) -> Range:
        """Returns the test of the same values with the other sign."""
        return replace(self, low=-self.high, high=-self.low, guess=-self.guess)


def log_wealth(rounds: Rounds, gates: np.ndarray, span: Range) -> np.ndarray:
    """[G]: the largest log-wealth so far against the claims that the mean is at least each of the gates [G]."""
    weight, total, squares = _PRIOR, _PRIOR * span.guess, _PRIOR * (span.guess**2 + span.spread**2)
    wealth_G, best_G = np.zeros_like(gates), np.zeros_like(gates)
    for values in rounds:
        mean = total / weight
        gap_G = gates - mean
        growth_G = gap_G / (max(squares / weight - mean * mean, 1e-18) + gap_G * gap_G)
        bet_G = np.clip(growth_G, 0.0, _MOST_BET / np.maximum(span.high - gates, 1e-12))
        seen_V = np.clip(np.asarray(values, float), span.low, span.high)
        wealth_G = wealth_G + np.log1p(bet_G[:, None] * (gates[:, None] - seen_V)).sum(1)
        best_G = np.maximum(best_G, wealth_G)
        weight, total, squares = weight + len(seen_V), total + seen_V.sum(), squares + (seen_V**2).sum()
    return best_G


def is_below(rounds: Rounds, gate: float, span: Range, level: float) -> bool:
    """Returns whether the mean is shown to lie below the gate: by mistake with probability `level` at most."""
    return bool(log_wealth(rounds, np.array([gate]), span)[0] >= math.log(1.0 / level))


def is_above(rounds: Rounds, gate: float, span: Range, level: float) -> bool:
    """Returns whether the mean is shown to lie above the gate: by mistake with probability `level` at most.

    The first bets are on values far above it, so that a few prompts show what is broken.
    """
    beyond = (span.high - gate) / 2.0
    adverse = replace(span, guess=gate + beyond, spread=beyond / 2.0)
    return is_below([[-value for value in values] for values in rounds], -gate, adverse.mirrored(), level)


def upper_confidence_bound(rounds: Rounds, span: Range, level: float) -> float:
    """Below what the mean lies, by mistake with probability `level` at most; the end of the range where nothing is
    shown."""
    gates = np.linspace(span.low, span.high, _GRID)[1:]
    shown = log_wealth(rounds, gates, span) >= math.log(1.0 / level)
    above = np.flatnonzero(~shown)  # the bound is the least gate above which every one is shown
    return float(span.high if len(above) and above[-1] == len(gates) - 1 else gates[above[-1] + 1 if len(above) else 0])


def more_needed(rounds: Rounds, gate: float, span: Range, level: float) -> int | None:
    """About how many more values would show that the mean lies below the gate, if they are like those seen; None where
    they would not, or nothing was seen."""
    values = np.clip(np.asarray([value for some in rounds for value in some], float), span.low, span.high)
    if not len(values) or values.mean() >= gate:
        return None
    bets = np.linspace(0.0, _MOST_BET / (span.high - gate), 41)[1:]
    rate = float(np.log1p(bets[:, None] * (gate - values)).mean(1).max())
    missing = math.log(1.0 / level) - float(log_wealth(rounds, np.array([gate]), span)[0])
    return max(1, math.ceil(missing / rate)) if rate > 0.0 else None
