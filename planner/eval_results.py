"""What an evaluation found: the same samples, dense and sparse, and 95% intervals of what was measured on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

import numpy as np

from sparsekv.plans.schema import Agreement, LengthMeasurement, Measurement, Score

LEVEL = 0.95
_RESAMPLES = 9999  # of a bootstrap; its generator is the same every time


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


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of a mean of skewed values (percentile bootstrap over samples); None of fewer than two."""
    from scipy.stats import bootstrap

    found = np.asarray(values, float)
    if len(found) < 2:
        return None
    if float(np.ptp(found)) == 0.0:
        return (mean := float(found.mean())), mean
    luck = np.random.default_rng(0)
    interval = bootstrap(
        (found,), np.mean, n_resamples=_RESAMPLES, batch=256, method="percentile", random_state=luck
    ).confidence_interval
    return float(interval.low), float(interval.high)


def share_interval(agreed: Sequence[int], scored: Sequence[int]) -> tuple[float, float]:
    """The 95% interval of a share of positions that come in samples: agreed[i] of scored[i] in sample i.

    Wilson's score interval at the effective number of positions: positions of one sample agree or disagree together,
    so that they count as fewer (Dean and Pagano, Survey Methodology 41, 2015). Unlike a bootstrap, it does not
    collapse to zero where all agree.
    """
    from scipy.stats import norm

    hits, counts = np.asarray(agreed, float), np.asarray(scored, float)
    positions = float(counts.sum())
    share = float(hits.sum()) / positions
    variance = _ratio_variance(hits, counts, share)
    effective = min(positions, share * (1.0 - share) / variance) if variance > 0.0 else positions
    z2 = float(norm.ppf(0.5 + LEVEL / 2.0)) ** 2
    centre = (share + z2 / (2.0 * effective)) / (1.0 + z2 / effective)
    spread = math.sqrt(z2 * (share * (1.0 - share) / effective + z2 / (4.0 * effective**2))) / (1.0 + z2 / effective)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _ratio_variance(hits: np.ndarray, counts: np.ndarray, share: float) -> float:
    """Of the share, between samples (the linearised variance of a ratio)."""
    residuals = (hits - share * counts) / counts.sum()
    return float((residuals**2).sum())


def agreement_of(outcomes: Sequence[Outcome]) -> Agreement:
    """Divergence, top-1 and exact agreement over some samples, as plans record them."""
    kl = [outcome.kl for outcome in outcomes]
    measured: dict[str, Any] = {"samples": len(kl), "kl": float(np.mean(kl)), "kl_interval": bootstrap_interval(kl)}
    agreed, scored = [outcome.agreed for outcome in outcomes], [outcome.scored for outcome in outcomes]
    if all(scored):
        measured |= {"top1": sum(agreed) / sum(scored), "top1_interval": share_interval(agreed, scored)}
    exact = [int(outcome.exact) for outcome in outcomes if outcome.exact is not None]
    if len(exact) == len(outcomes):
        measured |= {"exact": float(np.mean(exact)), "exact_interval": share_interval(exact, [1] * len(exact))}
    return Agreement(**measured)


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

    @property
    def answers(self) -> tuple[list[bool], list[bool]]:
        """Which answers were right, of dense and of the plan."""
        before, after = ([bool(outcome.correct) for outcome in side] for side in (self.dense, self.sparse))
        return before, after

    def _accuracy(self) -> Score:
        before, after = self.answers
        interval = accuracy_interval(before, after)
        return self._score(float(np.mean(before)), float(np.mean(after)), interval)

    def _perplexity(self) -> Score:
        before, after = ([outcome.nll for outcome in side] for side in (self.dense, self.sparse))
        dense, moved = perplexity(before), mean_interval(before, after)
        interval = moved and (dense * math.expm1(moved[0]), dense * math.expm1(moved[1]))
        return self._score(dense, perplexity(after), interval)

    def _score(self, dense: float, sparse: float, interval: tuple[float, float] | None) -> Score:
        agreement = agreement_of(self.sparse)
        return Score(dense=dense, sparse=sparse, samples=len(self.dense), interval=interval, agreement=agreement)


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
    def outcomes(self) -> tuple[Outcome, ...]:
        """Of the plan, over all tasks."""
        return tuple(outcome for task in self.tasks.values() for outcome in task.sparse)

    @property
    def kl(self) -> float:
        """Mean divergence over all samples, in nats."""
        return float(np.mean([outcome.kl for outcome in self.outcomes])) if self.outcomes else 0.0

    @property
    def agreement(self) -> Agreement:
        """Over all tasks."""
        return agreement_of(self.outcomes)


def merged(results: Iterable[EvalResult]) -> EvalResult:
    """Results of one mode at several lengths, pooled."""
    parts = list(results)
    tasks: dict[str, TaskResult] = {}
    for name, one in chain.from_iterable(part.tasks.items() for part in parts):
        so_far = tasks.get(name, TaskResult((), ()))
        tasks[name] = TaskResult(so_far.dense + one.dense, so_far.sparse + one.sparse)
    lengths = tuple(sorted({length for part in parts for length in part.lengths}))
    return EvalResult(lengths, tasks, sum((part.spent for part in parts), Spent()))


def measurement_of(results: Sequence[EvalResult], phase: str, chunk: int | None) -> Measurement:
    """The results of one phase, one a length, as plans record them.

    Args:
        phase: the phases that followed the plan: of "decode" alone, the density is that of decode.
        chunk: most tokens of a prompt that were prefilled at once; None is all.
    """

    def density(result: EvalResult) -> float:
        return result.decode_share if phase == "decode" else result.prefill_density

    whole = merged(results)
    return Measurement(
        lengths=whole.lengths,
        density=density(whole),
        kl=whole.kl,
        chunk=chunk,
        agreement=whole.agreement,
        by_length=tuple(
            LengthMeasurement(length=result.lengths[0], density=density(result), agreement=result.agreement)
            for result in results
        ),
        tasks={name: task.score for name, task in whole.tasks.items()},
    )


def perplexity(nll: Sequence[float]) -> float:
    """Of mean negative log-likelihoods."""
    return math.exp(min(700.0, float(np.mean(nll))))
