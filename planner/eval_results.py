"""What an evaluation found: the same samples, dense and sparse, and 95% intervals of their paired differences."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain

import numpy as np

from sparsekv.plans.schema import Score

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


def mean_interval(dense: Sequence[float], sparse: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the mean of paired differences, sparse - dense (Student's t); None of fewer than two."""
    from scipy.stats import ttest_rel

    differences = np.asarray(sparse, float) - np.asarray(dense, float)
    if len(differences) < 2:
        return None
    if float(np.ptp(differences)) == 0.0:
        return (mean := float(differences.mean())), mean
    interval = ttest_rel(sparse, dense).confidence_interval(LEVEL)
    return float(interval.low), float(interval.high)


def _hybrid(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(0.0, a * a - 2.0 * phi * a * b + b * b))


def _correlation(before: np.ndarray, after: np.ndarray) -> float:
    sides = ((before, after), (~before, ~after), (before, ~after), (~before, after))
    both, neither, lost, won = (float((one & other).sum()) for one, other in sides)
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    if margins == 0.0:
        return 0.0
    agreement = both * neither - lost * won
    if agreement > 0.0:
        agreement = max(agreement - len(before) / 2.0, 0.0)  # Newcombe's continuity correction
    return agreement / math.sqrt(margins)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample.

    Attributes:
        correct: whether greedy generation gives the answer; None where there is no text to compare (perplexity).
        nll: mean negative log-likelihood over the answer's tokens, in nats.
        kl: mean divergence KL(dense || sparse) over the scored positions, in nats.
        agreed: scored positions at which the likeliest token is dense's.
        scored: positions at which next-token distributions were compared.
        exact: whether every token of dense's own greedy continuation was picked; None where that was not measured.
    """

    correct: bool | None
    nll: float
    kl: float = 0.0
    agreed: int = 0
    scored: int = 0
    exact: bool | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What a mode computed: tiles of prefill, tokens of decode, against what dense would have."""

    tiles: float = 0.0
    causal_tiles: float = 0.0
    attended: float = 0.0
    cached: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*map(operator.sub, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task, sample by sample."""

    dense: tuple[Outcome, ...]
    sparse: tuple[Outcome, ...]

    @property
    def is_accuracy(self) -> bool:
        """Whether the task has right answers; otherwise it has a perplexity."""
        return all(outcome.correct is not None for outcome in self.dense)

    @property
    def score(self) -> Score:
        """As plans record it: shares of right answers, or perplexities, and the interval of their difference."""
        return self._accuracy() if self.is_accuracy else self._perplexity()

    def _accuracy(self) -> Score:
        before, after = ([bool(outcome.correct) for outcome in side] for side in (self.dense, self.sparse))
        interval = accuracy_interval(before, after)
        return Score(dense=float(np.mean(before)), sparse=float(np.mean(after)), samples=len(before), interval=interval)

    def _perplexity(self) -> Score:
        before, after = ([outcome.nll for outcome in side] for side in (self.dense, self.sparse))
        dense, moved = perplexity(before), mean_interval(before, after)
        interval = moved and (dense * math.expm1(moved[0]), dense * math.expm1(moved[1]))
        return Score(dense=dense, sparse=perplexity(after), samples=len(before), interval=interval)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A plan, some of its phases, on all tasks at some lengths."""

    lengths: tuple[int, ...]
    tasks: Mapping[str, TaskResult]
    spent: Spent

    @property
    def samples(self) -> int:
        """Of each task, at each length."""
        return max((len(task.dense) for task in self.tasks.values()), default=0) // max(1, len(self.lengths))

    @property
    def prefill_density(self) -> float:
        """Computed tiles over causal tiles; 1 where prefill ran dense."""
        return self.spent.tiles / self.spent.causal_tiles if self.spent.causal_tiles else 1.0

    @property
    def decode_share(self) -> float:
        """Tokens attended to over tokens cached, in decode; 1 where decode ran dense or not at all."""
        return self.spent.attended / self.spent.cached if self.spent.cached else 1.0

    @property
    def kl(self) -> float:
        """Mean divergence over all samples, in nats."""
        outcomes = [outcome.kl for task in self.tasks.values() for outcome in task.sparse]
        return float(np.mean(outcomes)) if outcomes else 0.0


def merged(results: Iterable[EvalResult]) -> EvalResult:
    """Results of one mode at several lengths, pooled."""
    parts = list(results)
    tasks: dict[str, TaskResult] = {}
    for name, one in chain.from_iterable(part.tasks.items() for part in parts):
        so_far = tasks.get(name, TaskResult((), ()))
        tasks[name] = TaskResult(so_far.dense + one.dense, so_far.sparse + one.sparse)
    lengths = tuple(sorted({length for part in parts for length in part.lengths}))
    return EvalResult(lengths, tasks, sum((part.spent for part in parts), Spent()))


def perplexity(nll: Sequence[float]) -> float:
    """Of mean negative log-likelihoods."""
    return math.exp(min(700.0, float(np.mean(nll))))
