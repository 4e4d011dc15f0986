"""The test that a plan is verified by: fixed before it runs, without a look in between.

A cell is a task at a length. Its bound is of losses alone, among prompts that dense answers: wins elsewhere cannot hide
a task that collapses. Over all judged cells the net loss is bounded, at each length the divergence. Every bound has to
lie below its limit, so that each has the whole level of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np
from scipy.stats import beta
from scipy.stats import t as student

from sparsekv.plans.types import format_length

ERROR = 0.05  # of calling a plan verified by mistake, over the rungs of one `plan`
RUNGS = (ERROR / 2, ERROR / 4, ERROR / 4)  # levels of the first plan that is tried, and of the denser ones behind it
LONG = 65536  # tokens; a longer prompt takes minutes, so that one length is tested, with few prompts
TURNS = "turns"  # a task of one length alone
LEAST_TASKS = 3  # others that are judged at each sparse length
MEAN_NATS, WORST_NATS = 0.02, 0.2  # divergence beyond rounding at a length: its mean, and the mean of its worst tenth
_NET_LOSS = "net loss of right answers"
_WORST = 0.1
_WORST_FROM = 0.05  # nats; each value gives a bound of the worst tenth, one near its lower end a tight one


def level_of_run(number: int) -> float:
    """The level of the n-th run on one plan, from 1; all together have 0.05, those behind the first one 0.025."""
    return ERROR / (number * (number + 1))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of prompts, and the losses that they exclude.

    Attributes:
        answered: prompts of a cell that dense answers; a cell with fewer is not judged.
        tried: most dense runs of a cell to find them.
        cell_loss: share of the answered ones in each cell.
        judged: prompts of all judged cells together, at least.
        net_loss: share of these: lost less won.
        long_prompts: prompts of each task at the one length above `LONG`.
        long_answered: of these over all tasks, at least.
        long_loss: share of the answered ones over all tasks.
        closely: prompts of each cell of which rounding (the kernels with every tile and token computed) and the
            agreement over dense's own text are measured.
        own: prompts of the caller, at least.
    """

    answered: int
    tried: int
    cell_loss: float
    judged: int
    net_loss: float
    long_prompts: int = 12
    long_answered: int = 48
    long_loss: float = 0.20
    closely: int = 1
    own: int = 60


# A cell: P(X <= 3 | 21, 0.40) = 0.011 and P(X <= 5 | 47, 0.25) = 0.012, so that 3 (5) may be lost at levels 0.025 and
# 0.0125. Of a plan that loses 2% of prompts where dense answers 65% (3.1% of these), a cell fails with 0.0036 (0.0032).
# One that dense answers in 65% has 21 among 40 with 0.96 and 47 among 86 with 0.98; among 35 (78) it would be 0.79.
# Net loss, 2% lost and 2% won: its standard error is 1.18 points of 288 prompts and 0.75 of 720; the bound at level
# 0.025 is below 5 (3) points up to a net loss of about 2.0 (1.3): 1.7 standard errors.
# Of 72 long prompts 48 answered: P(X <= 4 | 48, 0.20) = 0.0248.
SMALL = Sizes(answered=21, tried=40, cell_loss=0.40, judged=288, net_loss=0.05)
FULL = Sizes(answered=47, tried=86, cell_loss=0.25, judged=720, net_loss=0.03)
SIZES = {"small": SMALL, "full": FULL}


@dataclass(frozen=True, slots=True)
class Cell:
    """Right answers to one task at one length, dense beside the plan."""

    task: str
    length: int
    prompts: int
    answered: int
    lost: int
    won: int

    def __str__(self) -> str:
        return f"{self.task} at {format_length(self.length)}"


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound of a loss, a share or nats, beside the mean and the limit.

    Attributes:
        lengths: at which it was measured.
    """

    name: str
    mean: float
    upper: float
    limit: float
    lengths: tuple[int, ...]
    prompts: int
    unit: str = "%"

    @property
    def is_met(self) -> bool:
        return self.upper <= self.limit

    def text(self, value: float) -> str:
        return f"{100.0 * value if self.unit == '%' else value:.3g}{self.unit}"

    def __str__(self) -> str:
        mean, upper, limit = map(self.text, (self.mean, self.upper, self.limit))
        return f"{self.name} {mean} on {self.prompts} prompts, shown below {upper}, not {limit}"


@dataclass(frozen=True)
class FixedTest:
    """The results of a run, and their bounds.

    Attributes:
        excess: divergence beyond rounding of each prompt, in nats, by length.
        texts: the same over dense's own text, where that is long.
        own: the prompts are the caller's, and their answers are tested together.
    """

    sizes: Sizes
    level: float
    cells: tuple[Cell, ...]
    excess: Mapping[int, Sequence[float]]
    texts: Mapping[int, Sequence[float]] = field(default_factory=dict)
    own: bool = False

    @cached_property
    def judged(self) -> tuple[Cell, ...]:
        return self._judged_apart + self._pooled

    @property
    def too_few(self) -> tuple[int, ...]:
        """The lengths at which too little is judged to verify anything."""
        tasks = Counter(cell.length for cell in self._judged_apart if cell.task != TURNS)
        few = [length for length in _lengths(self._apart) if tasks[length] < LEAST_TASKS]
        prompts, answered = (sum(getattr(cell, name) for cell in self._pooled) for name in ("prompts", "answered"))
        enough = prompts >= self.sizes.own if self.own else answered >= self.sizes.long_answered
        return (*few, *(() if enough else _lengths(self._pooled)))

    @property
    def bounds(self) -> Iterator[Bound]:
        if self._judged_apart:
            yield self.net_loss
        yield from self.task_losses
        yield from self.pooled_losses
        for length, excess in self.excess.items():
            yield from divergence_bounds(length, excess)
        for length, excess in self.texts.items():
            yield from divergence_bounds(length, excess, "divergence over texts")

    @property
    def missed(self) -> tuple[Bound, ...]:
        return tuple(bound for bound in self.bounds if not bound.is_met)

    def worst_at(self, length: int) -> str:
        """The bound that a length misses most, in a few words."""
        missed = [bound for bound in self.missed if length in bound.lengths]
        worst = max(missed, key=lambda bound: (bound.name != _NET_LOSS, bound.mean / bound.limit))
        return f"{worst.name} {worst.text(worst.mean)}"

    @property
    def net_loss(self) -> Bound:
        cells = self._judged_apart
        lost, won, prompts = (sum(getattr(cell, name) for cell in cells) for name in ("lost", "won", "prompts"))
        upper, mean = net_loss_bound(lost, won, prompts, self.level), (lost - won) / max(1, prompts)
        return Bound(_NET_LOSS, mean, upper, self.sizes.net_loss, _lengths(cells), prompts)

    @property
    def task_losses(self) -> Iterator[Bound]:
        for cell in self._judged_apart:
            yield self._loss(f"loss of {cell}", [cell], self.sizes.cell_loss)

    @property
    def pooled_losses(self) -> Iterator[Bound]:
        """Lost answers of long prompts, or of the caller's, where there are any."""
        if any(cell.answered for cell in self._pooled):
            yield self._loss("loss over all tasks", self._pooled, self.sizes.long_loss)

    def _loss(self, name: str, cells: Sequence[Cell], limit: float) -> Bound:
        lost, answered = (sum(getattr(cell, which) for cell in cells) for which in ("lost", "answered"))
        upper = loss_bound(lost, answered, self.level)
        return Bound(name, lost / max(1, answered), upper, limit, _lengths(cells), answered)

    @cached_property
    def _judged_apart(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self._apart if cell.answered >= self.sizes.answered)

    @cached_property
    def _apart(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if not self.own and cell.length <= LONG)

    @cached_property
    def _pooled(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if self.own or cell.length > LONG)


def _lengths(cells: Sequence[Cell]) -> tuple[int, ...]:
    return tuple(sorted({cell.length for cell in cells}))


def missing_prompts(sizes: Sizes, tried: int, answered: int) -> int:
    """Further prompts of a cell that dense is to run: none once it is judged, or cannot be."""
    missing = sizes.answered - answered
    return missing if 0 < missing <= sizes.tried - tried else 0


def more_prompts(sizes: Sizes, judged: Sequence[Cell]) -> int:
    """Further prompts of each judged cell, evenly, for all cells together."""
    prompts = sum(cell.prompts for cell in judged)
    return max(0, math.ceil((sizes.judged - prompts) / len(judged))) if judged else 0


# --- bounds -----------------------------------------------------------------------------------------------------------


@cache
def loss_bound(lost: int, prompts: int, level: float) -> float:
    """Clopper and Pearson's upper bound of a share: the largest one of which so few are lost with more than `level`."""
    return 1.0 if lost >= prompts else float(beta.ppf(1.0 - level, lost + 1, prompts - lost))


@cache
def net_loss_bound(lost: int, won: int, prompts: int, level: float) -> float:
    """Upper bound of the net loss of paired answers, from Tango's score test (Statistics in Medicine 17, 1998)."""
    low, high, limit = (lost - won) / max(1, prompts), 1.0, -NormalDist().inv_cdf(1.0 - level)
    for _ in range(40 if prompts else 0):
        middle = (low + high) / 2.0
        low, high = (low, middle) if net_loss_score(lost, won, prompts, middle) <= limit else (middle, high)
    return high


def net_loss_score(lost: int, won: int, prompts: int, share: float) -> float:
    """Tango's score of the claim that the net loss is `share`; normal where it is."""
    linear = (2 * prompts - lost + won) * share - lost - won
    root = math.sqrt(linear**2 + 8 * prompts * won * share * (1.0 - share))
    won_share = (root - linear) / (4 * prompts)  # likeliest under the claim
    variance = prompts * (2 * won_share + share * (1.0 - share))
    return (lost - won - prompts * share) / math.sqrt(variance) if variance > 0.0 else 0.0


def divergence_bounds(length: int, excess: Sequence[float], name: str = "divergence") -> tuple[Bound, Bound]:
    """95% upper bounds of the mean and of the worst tenth of prompts.

    The mean of the worst tenth is at most t + E[max(x - t, 0)] / 0.1 for every t (Rockafellar and Uryasev, 2000).
    """
    values, lengths = np.asarray(excess, float), (length,)
    at, count = format_length(length), len(values)
    worst = np.sort(values)[-max(1, math.ceil(_WORST * count)) :]
    beyond = _WORST_FROM + mean_bound(np.maximum(values - _WORST_FROM, 0.0)) / _WORST
    mean = Bound(f"{name} at {at}", float(values.mean()), mean_bound(values), MEAN_NATS, lengths, count, " nats")
    tail = f"{name} of the worst tenth at {at}"
    return mean, Bound(tail, float(worst.mean()), beyond, WORST_NATS, lengths, count, " nats")


def mean_bound(values: np.ndarray) -> float:
    """95% upper bound of the mean of skewed values (Chen, JASA 90, 1995, equation 2.3)."""
    count = len(values)
    if count < 2 or float(np.ptp(values)) == 0.0:
        return float(values.mean()) if count > 1 else math.inf
    mean, spread, t = float(values.mean()), float(values.std(ddof=1)), _t95(count)
    apart = (values - mean) / spread
    skew = max(0.0, float((apart * apart) @ apart) / count) / (6.0 * math.sqrt(count))
    return mean + (t + skew * (1.0 + 2.0 * t**2) + skew**2 * (t + 2.0 * t**3)) * spread / math.sqrt(count)


@cache
def _t95(count: int) -> float:
    return float(student.ppf(0.95, count - 1))
