"""The gates: what each of them asks of a prompt, and what samples show of it by sequential tests.

The unit is a prompt. What counts is what a plan adds to rounding: the floor is the same prompt through the kernels with
every tile computed, and all figures but accuracy are excesses over it. A gate is *met* where the mean is shown to be
inside, *missed* where it is shown to be outside, else *undecided*; one sample is no finding. At each length divergence
is capped at `_CAP` gates, over all lengths together at `_FAILS` gates: from there on a prompt has failed, and failures
have a gate of their own. Accuracy is that of the tasks that dense or the plan solves at least half of the time. Which
those are is decided for each round by the rounds before it, so that no answer decides whether it counts. Where long
texts were read, divergence and agreement on them are figures of their own, by the same gates.

Attempts at a plan spend one error budget: half of what is left for each. Of one attempt every gate has to be shown to
be met, so that each has the whole level of the attempt; to be missed one is enough, so that they share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.evaluation.results import EvalResult, Outcome, TaskResult
from sparsekv.planner.options import Gate
from sparsekv.planner.sequential import Range, Rounds, is_above, is_below, more_needed, upper_confidence_bound
from sparsekv.plans.schema import Claim, Finding
from sparsekv.plans.types import format_length, share_of_points

ERROR = 0.05  # of calling a plan verified by mistake, over all attempts; as much again of calling one missed
FINDING = 0.01  # a drop in accuracy that tightens a plan, once it is shown
_CAP = 5.0  # gates
_FAILS = 10.0  # gates
_LEAST = 1e-6  # scale of a gate of zero


def level_of(attempt: int) -> float:
    """The probability of a wrong claim in an attempt, from 1."""
    return ERROR / 2.0**attempt


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Holds what dense, the floor and the plan did on one sample; without a floor, rounding counts as the plan's."""

    dense: Outcome
    floor: Outcome
    plan: Outcome

    @property
    def divergence(self) -> float:
        """In nats."""
        return self.plan.kl - self.floor.kl

    @property
    def disagreement(self) -> float | None:
        """The share of positions at which the plan agrees less often."""
        return self.floor.agreed_share - self.plan.agreed_share if self.plan.scored else None

    @property
    def text_divergence(self) -> float | None:
        """On the text that dense goes on with, in nats; None where no long one was read."""
        floor, plan = self.floor.text, self.plan.text
        return plan.kl - floor.kl if plan and floor else None

    @property
    def text_disagreement(self) -> float | None:
        """The same of agreement."""
        floor, plan = self.floor.text, self.plan.text
        return floor.agreed_share - plan.agreed_share if plan and floor else None

    @property
    def parted(self) -> float | None:
        """Returns whether the plan left dense's text."""
        return None if self.plan.exact is None else float(self.floor.exact is not False) - float(self.plan.exact)

    @property
    def lost(self) -> float | None:
        """Returns whether the plan lost a right answer (1), or found one (-1)."""
        return None if self.dense.correct is None else float(self.dense.correct) - float(bool(self.plan.correct))

    def fails(self, size: float) -> bool:
        """Returns whether the plan moves it by more than so many nats, or picks another first token where dense was
        sure."""
        return self.divergence > size or (self.plan.flipped and not self.floor.flipped)


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of one length, by task."""

    length: int
    tasks: Mapping[str, tuple[PromptScores, ...]]

    @classmethod
    def of(cls, own: EvalResult, floor: EvalResult | None) -> Measured:
        """A phase of a plan at a length, and its floor where one was measured."""

        def prompts(name: str, task: TaskResult) -> tuple[PromptScores, ...]:
            rounding = floor.tasks[name].sparse if floor else task.dense
            return tuple(map(PromptScores, task.dense, rounding, task.sparse))

        return cls(own.lengths[0], {name: prompts(name, task) for name, task in own.tasks.items()})

    @property
    def has_texts(self) -> bool:
        """Returns whether long texts were read."""
        return any(prompt.plan.text for prompts in self.tasks.values() for prompt in prompts)


@dataclass(frozen=True, slots=True)
class _Figure:
    """One figure of a gate.

    Attributes:
        gate: what its mean must be shown to be below.
        finding: what it is missed above.
        value: of a prompt; None where it has none.
    """

    name: str
    gate: float
    finding: float
    span: Range
    value: Callable[[PromptScores], float | None]

    def claim(self, rounds: Rounds, level: float, shared: float) -> Claim | None:
        """Returns what rounds of its values show of it; None where it has none."""
        values = [value for some in rounds for value in some]
        if not values:
            return None
        outcome, more = self._decided(rounds, level, shared)
        return Claim(
            gate=self.gate,
            mean=sum(values) / len(values),
            bound=upper_confidence_bound(rounds, self.span, level),
            prompts=len(values),
            outcome=outcome,
            more=more,
        )

    def rounds(self, lengths: Iterable[Measured]) -> Rounds:
        """A value of every task and length a round; the last one, if it lacks some, is left out."""
        strata = [list(map(self.value, prompts)) for one in lengths for prompts in one.tasks.values()]
        return [
            [value for value in some if value is not None]
            for some in zip(*(values for values in strata if None not in values), strict=False)
        ]

    def _decided(self, rounds: Rounds, level: float, shared: float) -> tuple[Finding, int | None]:
        if self.gate >= self.span.high or is_below(rounds, self.gate, self.span, level):
            return "met", None
        if is_above(rounds, self.finding, self.span, shared):
            return "missed", None
        return "undecided", more_needed(rounds, self.gate, self.span, level)


def _divergence(gate: Gate, phase: PhaseName, cap: float) -> _Figure:
    nats = max(gate.kl_bound(phase), _LEAST)
    span = Range(-nats, cap * nats, 0.5 * nats, 0.5 * nats)
    return _Figure("divergence", gate.kl_bound(phase), gate.kl_bound(phase), span, lambda prompt: prompt.divergence)


def _of_a_length(gate: Gate, phase: PhaseName, one: Measured) -> tuple[_Figure, ...]:
    apart, parted = 1.0 - gate.min_agreement, 1.0 - gate.min_exact
    scale = max(apart, _LEAST)
    most = min(1.0, _CAP * scale)
    span = Range(-most, most, 0.2 * scale, scale)
    divergence = _divergence(gate, phase, _CAP)
    agreement = _Figure("agreement", apart, apart, span, lambda prompt: prompt.disagreement)
    exact = _Figure("exact", parted, parted, Range(-1.0, 1.0, 0.2, 0.4), lambda prompt: prompt.parted)
    texts = (
        replace(divergence, name="text_divergence", value=lambda prompt: prompt.text_divergence),
        replace(agreement, name="text_agreement", value=lambda prompt: prompt.text_disagreement),
    )
    return divergence, agreement, exact, *(texts if one.has_texts else ())


def _of_all_lengths(gate: Gate, phase: PhaseName) -> tuple[_Figure, ...]:
    size = fails_at(gate, phase)
    broken = Range(0.0, 1.0, 0.01, 0.1)
    return (
        _divergence(gate, phase, _FAILS),
        _Figure("failed", gate.max_failed, gate.max_failed, broken, lambda prompt: float(prompt.fails(size))),
    )


def _answered(lengths: Iterable[Measured], least: float) -> Rounds:
    """Right answers lost, a round, of the tasks that dense or the plan solved so often in the rounds before."""
    strata = [one for some in lengths for one in some.tasks.values() if all(prompt.lost is not None for prompt in one)]
    rounds = range(1, min(map(len, strata), default=0))
    return [[one[at].lost or 0.0 for one in strata if _is_solved(one[:at], least)] for at in rounds]


def _is_solved(prompts: Sequence[PromptScores], least: float) -> bool:
    dense, plan = (sum(bool(one.correct) for one in side) for side in zip(*map(_sides, prompts), strict=True))
    return max(dense, plan) >= least * len(prompts)


def _sides(prompt: PromptScores) -> tuple[Outcome, Outcome]:
    return prompt.dense, prompt.plan


def _accuracy(gate: Gate) -> _Figure:
    most = share_of_points(gate.max_accuracy_drop)
    span = Range(-1.0, 1.0, 0.0, 0.1)
    return _Figure("accuracy", most, min(most, FINDING), span, lambda prompt: prompt.lost)


def fewest_prompts(gate: Gate) -> int:
    """About how many prompts over all lengths it takes to show that a plan meets its gate, where none of them fails."""
    _, failed = _of_all_lengths(gate, "prefill")
    claim = failed.claim([[0.0]], level_of(1), level_of(1))
    return 1 + (claim.more or 0 if claim else 0)


def fails_at(gate: Gate, phase: PhaseName) -> float:
    """The divergence above which a prompt has failed, in nats."""
    return _FAILS * gate.kl_bound(phase)


@dataclass(frozen=True, slots=True)
class PhaseClaims:
    """Holds what samples show of a phase: at each length, and over all of them."""

    by_length: Mapping[int, Mapping[str, Claim]]
    overall: Mapping[str, Claim]

    @property
    def named(self) -> Iterator[tuple[str, Claim]]:
        """All, told by name and length."""
        yield from self.overall.items()
        for length, claims in self.by_length.items():
            yield from ((f"{name} at {format_length(length)}", claim) for name, claim in claims.items())

    def having(self, outcome: Finding) -> list[tuple[str, Claim]]:
        """Those that came out so."""
        return [(name, claim) for name, claim in self.named if claim.outcome == outcome]

    @property
    def undecided_lengths(self) -> tuple[int, ...]:
        """Returns where samples are wanted: every length while something over all of them is undecided."""
        if any(claim.outcome == "undecided" for claim in self.overall.values()):
            return tuple(self.by_length)
        found = self.by_length.items()
        return tuple(length for length, own in found if any(one.outcome == "undecided" for one in own.values()))

    @property
    def missed_lengths(self) -> tuple[int, ...]:
        """Those that missed; where only all together did, those that did worst by their means, or all."""
        found = self.by_length.items()
        for is_bad in (lambda one: one.outcome == "missed", lambda one: one.mean > one.gate):
            if bad := tuple(length for length, own in found if any(map(is_bad, own.values()))):
                return bad
        return tuple(self.by_length)


def claims_of(
    measured: Mapping[PhaseName, Sequence[Measured]], gate: Gate, attempt: int = 1
) -> dict[PhaseName, PhaseClaims]:
    """Returns what the samples of each phase, one entry a length, show by the gate.

    Args:
        attempt: which plan this is of those that were tried, from 1; see `level_of`.
    """
    level = level_of(attempt)
    figures = sum(
        3 + sum(len(_of_a_length(gate, phase, one)) for one in lengths) for phase, lengths in measured.items()
    )
    return {phase: _claims(phase, lengths, gate, level, level / figures) for phase, lengths in measured.items()}


def _claims(phase: PhaseName, lengths: Sequence[Measured], gate: Gate, level: float, shared: float) -> PhaseClaims:
    def told(figures: Iterable[_Figure], some: Sequence[Measured]) -> dict[str, Claim]:
        claims = ((figure.name, figure.claim(figure.rounds(some), level, shared)) for figure in figures)
        return {name: claim for name, claim in claims if claim is not None}

    by_length = {one.length: told(_of_a_length(gate, phase, one), [one]) for one in lengths}
    overall = told(_of_all_lengths(gate, phase), lengths)
    accuracy = _accuracy(gate).claim(_answered(lengths, gate.solved), level, shared)
    return PhaseClaims(by_length, overall | ({"accuracy": accuracy} if accuracy else {}))


def lost_tasks(phase: PhaseName, lengths: Sequence[Measured], gate: Gate) -> Iterator[str]:
    """A line where a task that dense solves has lost more right answers than all of them may, on the prompts seen."""
    lost = []
    for task in dict.fromkeys(name for one in lengths for name in one.tasks):
        prompts = [prompt for one in lengths for prompt in one.tasks.get(task, ()) if prompt.lost is not None]
        share = sum(prompt.lost or 0.0 for prompt in prompts) / max(1, len(prompts))
        solved = sum(bool(prompt.dense.correct) for prompt in prompts) >= gate.solved * len(prompts)
        if solved and share > share_of_points(gate.max_accuracy_drop):
            lost.append(f"{task} {100 * share:.3g}% on {len(prompts)} prompts")
    if lost:
        yield f"{phase}: more than {gate.max_accuracy_drop:g}% of right answers lost: {', '.join(lost)}"


def line_of(phase: PhaseName, name: str, claim: Claim) -> str:
    """One claim in a line."""
    unit, scale = (" nats", 1.0) if "divergence" in name else ("%", 100.0)
    mean, bound, gate = (f"{scale * value:.3g}{unit}" for value in (claim.mean, claim.bound, claim.gate))
    figure = _NAMES[name.split()[0]] + name.removeprefix(name.split()[0])
    if claim.outcome == "missed":
        return f"{phase}: {figure} is above {gate}: {mean} on {claim.prompts} prompts"
    more = f", about {claim.more} more would decide" if claim.more else ""
    return f"{phase}: {figure} is {mean} on {claim.prompts} prompts, shown to be below {bound} (gate {gate}){more}"


_NAMES = {
    "divergence": "divergence from dense",
    "agreement": "disagreement with dense's likeliest tokens",
    "text_divergence": "divergence from dense in the text that it goes on with",
    "text_agreement": "disagreement with dense in the text that it goes on with",
    "exact": "the share of dense's texts left",
    "failed": "the share of prompts that fail",
    "accuracy": "the loss of right answers",
}
