"""What of its gates a plan misses, and what its samples do not prove: from results to lines.

Divergence, top-1 and exact agreement with dense say how much a plan changes whether or not dense solves a task;
accuracy is held against a plan where it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.evaluation.results import EvalResult, TaskResult, accuracy_interval, merged, pooled
from sparsekv.planner.options import Gate
from sparsekv.planner.settled import FEWEST_SAMPLES
from sparsekv.plans.schema import Agreement, Measurement
from sparsekv.plans.types import format_length


@dataclass(frozen=True, slots=True)
class _Limit:
    """What a gate allows of one figure of an `Agreement`.

    Attributes:
        above: whether it is missed above its bound; else below.
        miss, doubt: how a value outside is told, of a mean and of the unfavourable end of an interval.
    """

    figure: str
    bound: float
    above: bool
    miss: str
    doubt: str

    def is_missed(self, value: float) -> bool:
        return value > self.bound if self.above else value < self.bound

    def told(self, value: float | None) -> str:
        """The miss; empty where there is none, or no value."""
        return "" if value is None or not self.is_missed(value) else self.miss.format(value=value, bound=self.bound)

    def end(self, found: Agreement, *, worst: bool) -> float | None:
        """The favourable or unfavourable end of the 95% interval; a single sample, which is too few, has not all."""
        interval: tuple[float, float] | None = getattr(found, f"{self.figure}_interval")
        if interval is None:
            return found.kl if worst and self.above else None
        return interval[1 if self.above == worst else 0]


def _limits(gate: Gate, phase: PhaseName) -> tuple[_Limit, ...]:
    moved = "next-token distributions moved by {value:.4g} nats, more than {bound:g}"
    likeliest = "the likeliest token was dense's at {value:.1%} of positions, fewer than {bound:.1%}"
    kept = "{value:.1%} of dense's own greedy texts were kept, fewer than {bound:.1%}"
    agreement = "agreement {value:.1%} at {at} (gate {bound:.1%})"
    return (
        _Limit("kl", gate.kl_bound(phase), True, moved, "divergence may be {value:.3g} nats at {at} (gate {bound:g})"),
        _Limit("top1", gate.min_agreement, False, likeliest, f"top-1 {agreement}"),
        _Limit("exact", gate.min_exact, False, kept, f"exact {agreement}"),
    )


def misses_of(results: Sequence[EvalResult], gate: Gate, phase: PhaseName = "both") -> list[str]:
    """What of the gates the results of one phase, one a length, miss: a line each.

    Divergence and agreement are missed by their means over all lengths, or at one length beyond doubt (by the 95%
    interval). Accuracy counts at the lengths at which dense solves a task: it is missed by the answers to all tasks
    together, or by one task at all or one of its lengths beyond doubt.
    """
    limits, found = _limits(gate, phase), merged(results).agreement
    lines = [line for limit in limits if (line := limit.told(getattr(found, limit.figure)))]
    if not lines and len(results) > 1:
        ends = ((result, limit.end(result.agreement, worst=False), limit) for result in results for limit in limits)
        lines = [f"{line}, at {_names(result)}" for result, best, limit in ends if (line := limit.told(best))]
    return lines + _accuracy_misses(results, gate)


def worst_lengths(results: Sequence[EvalResult], gate: Gate, phase: PhaseName) -> tuple[int, ...]:
    """The lengths that miss the gate by themselves; all of them where only the sum does."""
    alone = [result for result in results if misses_of([result], gate, phase)]
    return tuple(length for result in alone or results for length in result.lengths)


def unproven(measured: Measurement, gate: Gate, phase: PhaseName) -> str:
    """The 95% bounds of a phase that do not meet its gate at some length, the worst of each; empty if all do."""
    told = []
    for limit in _limits(gate, phase):
        ends = [(limit.end(part.agreement, worst=True), format_length(part.length)) for part in measured.by_length]
        outside = [(value, at) for value, at in ends if value is not None and limit.is_missed(value)]
        if outside:
            value, at = (max if limit.above else min)(outside, key=lambda end: end[0])
            told.append(limit.doubt.format(value=value, bound=limit.bound, at=at))
    return ", ".join(told)


def too_few(results: Sequence[EvalResult]) -> Iterator[str]:
    """A remark for each length with too few samples."""
    for result in results:
        if (found := len(result.outcomes)) < FEWEST_SAMPLES:
            yield (
                f"too few samples at {_names(result)} to call a plan verified, {found} of at least {FEWEST_SAMPLES}: "
                f"verify on {math.ceil(FEWEST_SAMPLES / len(result.tasks))} or more of each task"
            )


def _accuracy_misses(results: Sequence[EvalResult], gate: Gate) -> list[str]:
    solved = [
        (name, task, result) for result in results for name, task in result.tasks.items() if _is_solved(task, gate)
    ]
    names = dict.fromkeys(name for name, _, _ in solved)
    if solved and _drop(together := pooled(task for _, task, _ in solved)) > gate.max_accuracy_drop:
        return [_fell(f"accuracy over {', '.join(names)}", together, gate)]
    lines = []
    for name in names:
        own = [(task, result) for other, task, result in solved if other == name]
        if _surely_fell(whole := pooled(task for task, _ in own), gate):
            lines.append(_fell(name, whole, gate))
        else:
            lines += [f"{_fell(name, task, gate)} at {_names(at)}" for task, at in own if _surely_fell(task, gate)]
    return lines


def _is_solved(task: TaskResult, gate: Gate) -> bool:
    return task.is_accuracy and sum(task.answers[0]) >= gate.solved * len(task.dense)


def _drop(task: TaskResult) -> float:
    """In points."""
    dense, sparse = task.answers
    return 100.0 * (sum(dense) - sum(sparse)) / len(dense)


def _surely_fell(task: TaskResult, gate: Gate) -> bool:
    return _drop(task) > gate.max_accuracy_drop and accuracy_interval(*task.answers)[1] < 0.0


def _fell(name: str, task: TaskResult, gate: Gate) -> str:
    dense, sparse = (sum(side) / len(side) for side in task.answers)
    return (
        f"{name} fell from {dense:.1%} to {sparse:.1%} on {len(task.dense)} samples, "
        f"more than {gate.max_accuracy_drop:g} points"
    )


def _names(result: EvalResult) -> str:
    return ", ".join(map(format_length, result.lengths))
