"""Sequential tests of a mean: prompts are drawn until a gate is shown to be met, or to be missed.

A test bets against the claim that the mean is at least the gate. Its wealth starts at 1 and is multiplied by
`1 + bet * (gate - value)` for every value; where the claim holds, wealth of 1 / level is reached with probability
`level` at most, however often and whenever one looks (Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", JRSS B 86, 2024, section 4; the bet is that of section B.2, GRAPA, among a few).
So no number of samples is fixed in advance, no look costs anything, and the bound holds for every sample size and every
distribution within the range. Of pairs, such as right answers lost (1), found (-1) and neither (0), the discordant ones
decide the bet: as many won as lost call for a small one.

Values come in rounds, one of each stratum (task, length). A bet is placed on a whole round and depends on earlier
rounds alone: strata of unequal means cannot make wealth either, since their average product is at most that of equal
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

_MOST_BET = 0.9  # of the bet that one value at the far end of the range would ruin
_BETS = np.linspace(0.0, 1.0, 25)  # of that
_SOON_GIVEN_UP = 3.0  # values that the guess of a broken plan counts as
_COARSE, _FINE = 61, 129  # gates that a bound is searched among: over the range, and over two steps of those

Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Range:
    """Values of which a mean is tested, and what they probably are: a guess costs samples where it is wrong, never
    the level.

    Attributes:
        low, high: values outside count as these.
        guess, spread: mean and standard deviation, before anything is seen.
        weight: values that the guess counts as, in the first bets.
    """

    low: float
    high: float
    guess: float
    spread: float
    weight: float = 3.0

    def mirrored(self) -> Range:
        """Returns the test of the same values with the other sign."""
        return replace(self, low=-self.high, high=-self.low, guess=-self.guess)

    @property
    def guessed(self) -> tuple[np.ndarray, np.ndarray]:
        """Values that have the guessed mean and spread, and how often they come: both ends, where a bet is won or
        ruined, and the guess itself."""
        ends = np.array([self.low, self.high])
        often = self.spread**2 / np.maximum(2.0 * (ends - self.guess) ** 2, 1e-18)
        often /= max(1.0, often.sum())
        return np.append(ends, self.guess), self.weight * np.append(often, 1.0 - often.sum())


def log_wealth(rounds: Rounds, gates: np.ndarray, span: Range) -> np.ndarray:
    """[G]: the largest log-wealth so far against the claims that the mean is at least each of the gates [G].

    Each round R is bet on with what would have won most on the rounds before it and the guess, of a few bets K.
    """
    seen = [values for values in rounds if len(values)]
    if not seen:
        return np.zeros_like(gates)
    values_V = np.clip(np.concatenate(seen), span.low, span.high)
    first_R = np.cumsum([0, *map(len, seen[:-1])])
    return np.array([_log_wealth(values_V, first_R, float(gate), span) for gate in gates])


def _log_wealth(values_V: np.ndarray, first_R: np.ndarray, gate: float, span: Range) -> float:
    bet_K1 = _BETS[:, None] * (_MOST_BET / max(span.high - gate, 1e-12))
    won_KR = np.add.reduceat(np.log1p(bet_K1 * (gate - values_V)), first_R, axis=1)
    guessed, often = span.guessed
    before_K1 = np.log1p(bet_K1 * (gate - guessed)) @ often[:, None]
    so_far_KR = np.cumsum(np.concatenate([before_K1, won_KR[:, :-1]], 1), 1)
    wealth_R = np.take_along_axis(won_KR, so_far_KR.argmax(0)[None], 0)[0].cumsum()
    return max(0.0, float(wealth_R.max()))


def is_below(rounds: Rounds, gate: float, span: Range, level: float) -> bool:
    """Returns whether the mean is shown to lie below the gate: by mistake with probability `level` at most."""
    return bool(log_wealth(rounds, np.array([gate]), span)[0] >= math.log(1.0 / level))


def is_above(rounds: Rounds, gate: float, span: Range, level: float) -> bool:
    """Returns whether the mean is shown to lie above the gate: by mistake with probability `level` at most.

    The first bets are on values far above it, so that a few prompts show what is broken.
    """
    beyond = (span.high - gate) / 2.0
    adverse = replace(span, guess=gate + beyond, spread=beyond / 2.0, weight=_SOON_GIVEN_UP)
    return is_below([[-value for value in values] for values in rounds], -gate, adverse.mirrored(), level)


def upper_confidence_bound(rounds: Rounds, span: Range, level: float) -> float:
    """Below what the mean lies, by mistake with probability `level` at most; the end of the range where nothing is
    shown.

    It is the least gate searched among above which every one is shown (wealth is not monotone in the gate), but no less
    than the mean of the values. Gates are the same whatever the values are, so that more of them never raise it beyond
    their mean.
    """
    values = np.clip(np.asarray([value for some in rounds for value in some], float), span.low, span.high)
    if not len(values):
        return span.high
    gates = np.linspace(span.low, span.high, _COARSE)
    last = _last_hidden(rounds, gates, span, level)
    if last == len(gates) - 1:
        return span.high
    low, high = gates[last], gates[min(last + 2, len(gates) - 1)]
    near = np.linspace(low, high, _FINE)
    return max(float(values.mean()), float(near[min(_last_hidden(rounds, near, span, level) + 1, _FINE - 1)]))


def _last_hidden(rounds: Rounds, gates: np.ndarray, span: Range, level: float) -> int:
    """The last of these gates that is not shown; the first where all are."""
    shown = log_wealth(rounds, gates, span) >= math.log(1.0 / level)
    return int(np.flatnonzero(~shown).max(initial=0))


def more_needed(rounds: Rounds, gate: float, span: Range, level: float) -> int | None:
    """About how many more values would show that the mean lies below the gate, if they are like those seen; None where
    they would not, where the mean is within its standard error of the gate, or nothing was seen."""
    values = np.clip(np.asarray([value for some in rounds for value in some], float), span.low, span.high)
    if not len(values) or values.mean() + values.std() / math.sqrt(len(values)) >= gate:
        return None
    bets = np.linspace(0.0, _MOST_BET / (span.high - gate), 41)[1:]
    rate = float(np.log1p(bets[:, None] * (gate - values)).mean(1).max())
    missing = math.log(1.0 / level) - float(log_wealth(rounds, np.array([gate]), span)[0])
    return max(1, math.ceil(missing / rate)) if rate > 0.0 else None
