"""The gates: what each of them asks of a prompt, and what samples show of it by sequential tests.

The unit is a prompt. What counts is what a plan adds to rounding: the floor is the same prompt through the kernels with
every tile computed, and all figures but accuracy are excesses over it. A gate is *met* where the mean is shown to be
inside, *missed* where it is shown to be outside, else *undecided*; one sample is no finding. At each length divergence
is capped at `_CAP` gates, over all lengths together at `_FAILS` gates: from there on a prompt has failed, and failures
have a gate of their own. Accuracy is that of the tasks that dense or the plan solves at least half of the time. Which
those are is decided for each round by the rounds before it, so that no answer decides whether it counts. Where long
texts were read, divergence and agreement on them are figures of their own, by the same gates. A figure that is decided
stays so, and needs nothing more: `Wanted` says what is still asked for of further samples.

Attempts at a plan spend one error budget: half of what is left for each. Of one attempt every gate has to be shown to
be met, so that each has the whole level of the attempt; to be missed one is enough, so that they share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

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
_LEAVES_AFTER = 8  # prompts of a task that are not solved
_LEAST = 1e-6  # scale of a gate of zero


def level_of(attempt: int) -> float:
    """The probability of a wrong claim in an attempt, from 1."""
    return ERROR / 2.0**attempt


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Holds what dense, the floor and the plan did on one sample; dense is the floor where rounding counts as the
    plan's, and there is none of a sample of which only answers were wanted."""

    dense: Outcome
    floor: Outcome | None
    plan: Outcome

    @property
    def divergence(self) -> float | None:
        """In nats."""
        return self.plan.kl - self.floor.kl if self.floor else None

    @property
    def disagreement(self) -> float | None:
        """The share of positions at which the plan agrees less often."""
        return self.floor.agreed_share - self.plan.agreed_share if self.floor and self.plan.scored else None

    @property
    def text_divergence(self) -> float | None:
        """On the text that dense goes on with, in nats; None where no long one was read."""
        floor, plan = self.floor and self.floor.text, self.plan.text
        return plan.kl - floor.kl if plan and floor else None

    @property
    def text_disagreement(self) -> float | None:
        """The same of agreement."""
        floor, plan = self.floor and self.floor.text, self.plan.text
        return floor.agreed_share - plan.agreed_share if plan and floor else None

    @property
    def parted(self) -> float | None:
        """Returns whether the plan left dense's text."""
        if self.floor is None or self.plan.exact is None:
            return None
        return float(self.floor.exact is not False) - float(self.plan.exact)

    @property
    def lost(self) -> float | None:
        """Returns whether the plan lost a right answer (1), or found one (-1)."""
        return None if self.dense.correct is None else float(self.dense.correct) - float(bool(self.plan.correct))

    def fails(self, size: float) -> bool | None:
        """Returns whether the plan moves it by more than so many nats, or picks another first token where dense was
        sure."""
        if self.floor is None:
            return None
        return self.plan.kl - self.floor.kl > size or (self.plan.flipped and not self.floor.flipped)


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of one length, by task."""

    length: int
    tasks: Mapping[str, tuple[PromptScores, ...]]

    @classmethod
    def of(cls, own: EvalResult, floor: EvalResult | None) -> Measured:
        """A phase of a plan at a length, and its floor where one was measured, on all its samples or the first of
        them."""

        def prompts(name: str, task: TaskResult) -> tuple[PromptScores, ...]:
            rounding: Sequence[Outcome | None] = floor.tasks[name].sparse if floor else task.dense
            missing = len(task.dense) - len(rounding)
            return tuple(map(PromptScores, task.dense, (*rounding, *(None,) * missing), task.sparse))

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

    def claim(self, rounds: Rounds, level: float, shared: float, bounded: bool) -> Claim | None:
        """Returns what rounds of its values show of it; None where it has none."""
        values = [value for some in rounds for value in some]
        if not values:
            return None
        outcome, more = self._decided(rounds, level, shared)
        bound = upper_confidence_bound(rounds, self.span, level) if bounded else self.span.high
        return Claim(
            gate=self.gate,
            mean=sum(values) / len(values),
            bound=(min if outcome == "met" else max)(bound, self.gate),  # searched on a grid, which may skip the gate
            prompts=len(values),
            outcome=outcome,
            more=more,
        )

    def rounds(self, lengths: Iterable[Measured]) -> Rounds:
        """A value of every task and length a round; the last one, if it lacks some, is left out. Samples have it up to
        where it was decided, or none has."""
        strata = [list(map(self.value, prompts)) for one in lengths for prompts in one.tasks.values()]
        known = ([*takewhile(_is_known, values)] for values in strata if values and _is_known(values[0]))
        return [[value for value in some if value is not None] for some in zip(*known, strict=False)]

    def _decided(self, rounds: Rounds, level: float, shared: float) -> tuple[Finding, int | None]:
        if self.gate >= self.span.high or is_below(rounds, self.gate, self.span, level):
            return "met", None
        if is_above(rounds, self.finding, self.span, shared):
            return "missed", None
        return "undecided", more_needed(rounds, self.gate, self.span, level)


def _is_known(value: float | None) -> bool:
    return value is not None


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
        _Figure("failed", gate.max_failed, gate.max_failed, broken, lambda prompt: prompt.fails(size)),
    )


def _answered(lengths: Iterable[Measured], least: float) -> Rounds:
    """Right answers lost, a round, of the tasks that dense or the plan solved so often in the rounds before. A task
    that is no longer drawn has left the rounds; all lengths have as many."""
    strata = [[one for one in some.tasks.values() if _has_answers(one)] for some in lengths]
    rounds = range(1, min((max(map(len, some)) for some in strata if some), default=0))
    every = [(one, _solved_after(one, least)) for some in strata for one in some]
    return [[one[at].lost or 0.0 for one, solved in every if at < len(one) and solved[at - 1]] for at in rounds]


def _has_answers(prompts: Sequence[PromptScores]) -> bool:
    return all(prompt.lost is not None for prompt in prompts)


def _solved_after(prompts: Sequence[PromptScores], least: float) -> list[bool]:
    """Returns whether dense or the plan has solved so large a share of each number of the first of them, from one."""
    sides = ([bool(one.dense.correct) for one in prompts], [bool(one.plan.correct) for one in prompts])
    solved = zip(*map(accumulate, sides), strict=True)
    return [max(both) >= least * count for count, both in enumerate(solved, start=1)]


def answering_tasks(one: Measured, least: float) -> Iterator[str]:
    """The tasks of a length that say something of right answers: those that dense or the plan solves, by what was seen
    so far, or of which too little was seen."""
    for name, prompts in one.tasks.items():
        if _has_answers(prompts) and (len(prompts) < _LEAVES_AFTER or _solved_after(prompts, least)[-1]):
            yield name


def _accuracy(gate: Gate) -> _Figure:
    most = share_of_points(gate.max_accuracy_drop)
    span = Range(-1.0, 1.0, 0.0, 0.14, weight=100.0)  # one answer in a hundred lost, and one found
    return _Figure("accuracy", most, min(most, FINDING), span, lambda prompt: prompt.lost)


def fewest_prompts(gate: Gate) -> int:
    """About how many prompts over all lengths it takes to show that a plan meets its gate, where none of them fails."""
    _, failed = _of_all_lengths(gate, "prefill")
    claim = failed.claim([[0.0]], level_of(1), level_of(1), bounded=False)
    return 1 + (claim.more or 0 if claim else 0)


def fails_at(gate: Gate, phase: PhaseName) -> float:
    """The divergence above which a prompt has failed, in nats."""
    return _FAILS * gate.kl_bound(phase)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Holds what of a sample something undecided is about.

    Attributes:
        answers: whether its answer is right.
        floor: what it does through the kernels with every tile computed, beside the plan.
        texts: dense's own continuation, read by both.
    """

    answers: bool = True
    floor: bool = True
    texts: bool = True

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.answers or other.answers, self.floor or other.floor, self.texts or other.texts)


_OF_TEXTS = frozenset(("exact", "text_divergence", "text_agreement"))


def _undecided(claims: Mapping[str, Claim]) -> set[str]:
    return {name for name, claim in claims.items() if claim.outcome == "undecided"}


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
    def wanted(self) -> dict[int, Wanted]:
        """Returns what of more samples is wanted at each length, where anything is: the same at every length while
        something over all of them is undecided."""
        overall = _undecided(self.overall)
        found = {length: overall | _undecided(own) for length, own in self.by_length.items()}
        return {
            length: Wanted(answers="accuracy" in names, floor=names != {"accuracy"}, texts=bool(names & _OF_TEXTS))
            for length, names in found.items()
            if names
        }

    @property
    def missed_lengths(self) -> tuple[int, ...]:
        """Those that missed; where only all together did, those that did worst by their means, or all."""
        found = self.by_length.items()
        for is_bad in (lambda one: one.outcome == "missed", lambda one: one.mean > one.gate):
            if bad := tuple(length for length, own in found if any(map(is_bad, own.values()))):
                return bad
        return tuple(self.by_length)


def claims_of(
    measured: Mapping[PhaseName, Sequence[Measured]], gate: Gate, attempt: int = 1, *, bounded: bool = True
) -> dict[PhaseName, PhaseClaims]:
    """Returns what the samples of each phase, one entry a length, show by the gate.

    Args:
        attempt: which plan this is of those that were tried, from 1; see `level_of`.
        bounded: work out the bounds too, which takes a hundred times as long as what was decided.
    """
    level = level_of(attempt)
    figures = sum(
        3 + sum(len(_of_a_length(gate, phase, one)) for one in lengths) for phase, lengths in measured.items()
    )

    def claimed(figure: _Figure, rounds: Rounds) -> Claim | None:
        return figure.claim(rounds, level, level / figures, bounded)

    return {phase: _claims(phase, lengths, gate, claimed) for phase, lengths in measured.items()}


def _claims(
    phase: PhaseName, lengths: Sequence[Measured], gate: Gate, claimed: Callable[[_Figure, Rounds], Claim | None]
) -> PhaseClaims:
    def told(figures: Iterable[_Figure], some: Sequence[Measured]) -> dict[str, Claim]:
        claims = ((figure.name, claimed(figure, figure.rounds(some))) for figure in figures)
        return {name: claim for name, claim in claims if claim is not None}

    by_length = {one.length: told(_of_a_length(gate, phase, one), [one]) for one in lengths}
    overall = told(_of_all_lengths(gate, phase), lengths)
    accuracy = claimed(_accuracy(gate), _answered(lengths, gate.solved))
    return PhaseClaims(by_length, overall | ({"accuracy": accuracy} if accuracy else {}))


def more_prompts(claims: PhaseClaims) -> int | None:
    """About how many more prompts of a phase, over all lengths, would show that it meets its gates; 0 where nothing is
    undecided, None where the prompts seen do not say."""
    overall, *lengths = (
        [claim.more for claim in some.values() if claim.outcome == "undecided"]
        for some in (claims.overall, *claims.by_length.values())
    )
    known = [[more for more in some if more is not None] for some in (overall, *lengths)]
    if sum(map(len, known)) < sum(map(len, (overall, *lengths))):
        return None
    return max(max(known[0], default=0), sum(max(some, default=0) for some in known[1:]))


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
    return f"{phase}: {figure} is {mean} on {claim.prompts} prompts, shown to be below {bound} (gate {gate})"


_NAMES = {
    "divergence": "divergence from dense",
    "agreement": "disagreement with dense's likeliest tokens",
    "text_divergence": "divergence from dense in the text that it goes on with",
    "text_agreement": "disagreement with dense in the text that it goes on with",
    "exact": "the share of dense's texts left",
    "failed": "the share of prompts that fail",
    "accuracy": "the loss of right answers",
}
