"""The results of a comparison: the same samples, dense and sparse, with 95% intervals."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sparsekv.planner.tasks import Sample
from sparsekv.plans.types import Natural, NonNegative, Part, Portion, Positive, Real

LEVEL = 0.95
_RESAMPLES = 9999  # of a bootstrap; its generator is the same every time

Interval = tuple[Real, Real]
Exact = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not rounded: two halves are to give one whole


class Agreement(Part):
    """Distances of a plan's next tokens from dense ones on the same samples, each with its 95% interval.

    `kl` is the mean divergence KL(dense || sparse) of next-token distributions, in nats; `top1` the share of positions
    at which the likeliest token is dense's; `exact` the share of samples of which the plan picks every token of dense's
    own greedy continuation. A mean of a single sample has no interval.
    """

    samples: Positive
    kl: NonNegative
    kl_interval: Interval | None = None
    top1: Portion | None = None
    top1_interval: Interval | None = None
    exact: Portion | None = None
    exact_interval: Interval | None = None


class Score(Part):
    """One task, dense and sparse on the same samples.

    `interval` is the 95% interval of sparse - dense, paired; a mean of a single sample has none.
    """

    dense: NonNegative
    sparse: NonNegative
    samples: Positive
    interval: Interval | None = None
    agreement: Agreement | None = None


@dataclass(frozen=True, slots=True)
class LongText:
    """Dense's own text behind a prompt, read by a mode: `kl`, `agreed` and `scored` as of an outcome."""

    kl: Exact
    agreed: Natural
    scored: Positive


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
        text: the same on dense's own continuation, where that is long.
    """

    correct: bool | None
    nll: float
    kl: float = 0.0
    agreed: int = 0
    scored: int = 0
    exact: bool | None = None
    text: LongText | None = None

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.nll, self.kl, self.text.kl if self.text else 0.0)))


@dataclass(frozen=True, slots=True)
class Spent:
    """The work of a mode: tiles of prefill, tokens of decode, beside those of dense."""

    tiles: float = 0.0
    causal_tiles: float = 0.0
    attended: float = 0.0
    cached: float = 0.0

    @property
    def density(self) -> float:
        """The share of the tiles of dense prefill; 1 where nothing was prefilled."""
        return self.tiles / self.causal_tiles if self.causal_tiles else 1.0

    @property
    def read(self) -> float:
        """The share of the cached tokens that decode attended to; 1 where nothing was decoded."""
        return self.attended / self.cached if self.cached else 1.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mode on some samples."""

    outcomes: tuple[Outcome, ...]
    spent: Spent

    @property
    def kl(self) -> tuple[float, ...]:
        return tuple(outcome.kl for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task, sample by sample."""

    dense: tuple[Outcome, ...]
    sparse: tuple[Outcome, ...]

    @property
    def is_accuracy(self) -> bool:
        """The task has right answers; otherwise it has a perplexity."""
        return all(outcome.correct is not None for outcome in self.dense)

    @property
    def answers(self) -> tuple[list[bool], list[bool]]:
        before, after = ([bool(outcome.correct) for outcome in side] for side in (self.dense, self.sparse))
        return before, after

    @property
    def score(self) -> Score:
        dense, sparse, interval = self._accuracies() if self.is_accuracy else self._perplexities()
        agreement, samples = agreement_of(self.sparse), len(self.dense)
        return Score(dense=dense, sparse=sparse, samples=samples, interval=interval, agreement=agreement)

    def _accuracies(self) -> tuple[float, float, Interval | None]:
        before, after = self.answers
        return float(np.mean(before)), float(np.mean(after)), score_interval(before, after)

    def _perplexities(self) -> tuple[float, float, Interval | None]:
        before, after = ([outcome.nll for outcome in side] for side in (self.dense, self.sparse))
        dense, sparse = (math.exp(min(700.0, float(np.mean(nll)))) for nll in (before, after))
        moved = bootstrap_interval(np.subtract(after, before).tolist())
        return dense, sparse, moved and (dense * math.expm1(moved[0]), dense * math.expm1(moved[1]))


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A plan, some of its phases, on all tasks at some lengths."""

    lengths: tuple[int, ...]
    tasks: Mapping[str, TaskResult]
    spent: Spent

    @classmethod
    def of(cls, length: int, samples: Sequence[Sample], dense: Comparison, sparse: Comparison) -> EvalResult:
        def of_task(task: str, side: Comparison) -> tuple[Outcome, ...]:
            both = zip(samples, side.outcomes, strict=True)
            return tuple(outcome for sample, outcome in both if sample.task == task)

        tasks = dict.fromkeys(sample.task for sample in samples)
        results = {task: TaskResult(of_task(task, dense), of_task(task, sparse)) for task in tasks}
        return cls((length,), results, sparse.spent)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return pooled(self.tasks.values()).sparse

    @property
    def kl(self) -> float:
        """Mean divergence over all samples, in nats."""
        return float(np.mean([outcome.kl for outcome in self.outcomes])) if self.outcomes else 0.0

    @property
    def agreement(self) -> Agreement:
        return agreement_of(self.outcomes)


def pooled(tasks: Iterable[TaskResult]) -> TaskResult:
    parts = list(tasks)
    dense, sparse = (tuple(chain.from_iterable(getattr(task, side) for task in parts)) for side in ("dense", "sparse"))
    return TaskResult(dense, sparse)


def merged(results: Iterable[EvalResult]) -> EvalResult:
    parts = list(results)
    names = dict.fromkeys(chain.from_iterable(part.tasks for part in parts))
    tasks = {name: pooled(part.tasks[name] for part in parts if name in part.tasks) for name in names}
    lengths = tuple(sorted({length for part in parts for length in part.lengths}))
    return EvalResult(lengths, tasks, sum((part.spent for part in parts), Spent()))


def agreement_of(outcomes: Sequence[Outcome]) -> Agreement:
    """Divergence, top-1 and exact agreement over some samples, with their intervals."""
    kl = [outcome.kl for outcome in outcomes]
    measured: dict[str, Any] = {"samples": len(kl), "kl": float(np.mean(kl)), "kl_interval": bootstrap_interval(kl)}
    agreed, scored = [outcome.agreed for outcome in outcomes], [outcome.scored for outcome in outcomes]
    if all(scored):
        measured |= {"top1": sum(agreed) / sum(scored), "top1_interval": share_interval(agreed, scored)}
    exact = [int(outcome.exact) for outcome in outcomes if outcome.exact is not None]
    if exact:  # of the first samples alone, where more did not matter
        measured |= {"exact": float(np.mean(exact)), "exact_interval": share_interval(exact, [1] * len(exact))}
    return Agreement(**measured)


# --- intervals --------------------------------------------------------------------------------------------------------


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


def share_interval(agreed: Sequence[int], scored: Sequence[int]) -> Interval:
    """The 95% interval of a share of positions that come in samples: agreed[i] of scored[i] in sample i.

    Wilson's score interval at the effective number of positions (Dean and Pagano, Survey Methodology 41, 2015), which
    is no more than there are samples: positions of one sample agree or disagree together. Unlike a bootstrap, it does
    not collapse to zero where all agree.
    """
    hits, counts = np.asarray(agreed, float), np.asarray(scored, float)
    positions, samples = float(counts.sum()), float(len(counts))
    share = float(hits.sum()) / positions
    variance = float((((hits - share * counts) / positions) ** 2).sum())  # linearised, of a ratio between samples
    return _wilson(share, min(samples, share * (1.0 - share) / variance) if variance > 0.0 else samples)


def _wilson(share: float, count: float) -> Interval:
    """Wilson's score interval of a share of so many independent positions."""
    from scipy.stats import norm

    z2 = float(norm.ppf(0.5 + LEVEL / 2.0)) ** 2
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
