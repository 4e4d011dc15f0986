"""Outcomes of a verification: what was drawn and measured so far, what that shows, and what of more is wanted.

They are one sequence, however many runs it took: each run draws the samples behind those of the run before it, and a
round that was cut short by the time is finished first. So looks are what they would have been in one run, and the
sequential tests hold (planner/sequential.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.evaluation.results import EvalResult, merged
from sparsekv.planner.gates import Measured, PhaseClaims, Wanted, answering_tasks, claims_of, more_prompts
from sparsekv.planner.options import Gate

PHASES: tuple[PhaseName, ...] = ("prefill", "decode", "both")
_NO_NUMBER = 20.0  # nats, of a sample without finite probabilities

Draws = dict[int, dict[PhaseName, Wanted]]
"""Says of each length and phase what of the next samples is wanted."""


def floor_of(phase: str) -> str:
    """Returns the name of the mode that runs a phase with every tile and token computed."""
    return f"{phase} floor"


@dataclass(frozen=True, slots=True)
class Pace:
    """Holds how many prompts a round of this run had, over all lengths, and how many seconds they took."""

    prompts: int
    seconds: float


@dataclass(slots=True)
class Outcomes:
    """Results by mode and length, and what they show so far.

    Attributes:
        looks: how often it was decided whether to draw more.
        drawn: samples of a task, by length.
        ended: lengths without more prompts.
        broken: samples without finite probabilities, by mode and length.
        wanted: what is left of the round to be drawn.
        timed: the rounds of this run.
    """

    results: dict[str, dict[int, EvalResult]]
    gate: Gate
    attempt: int
    looks: int = 0
    drawn: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: set[int] = field(default_factory=set)
    broken: dict[tuple[str, int], int] = field(default_factory=dict)
    claims: Mapping[PhaseName, PhaseClaims] = field(default_factory=dict)
    wanted: Draws = field(default_factory=dict)
    timed: list[Pace] = field(default_factory=list)

    def add(self, name: str, result: EvalResult) -> None:
        """Adds what a mode did on further samples of a length."""
        own, length = self.results[name], result.lengths[0]
        if bad := sum(not outcome.is_finite for outcome in result.outcomes):
            self.broken[name, length] = self.broken.get((name, length), 0) + bad
            result = result.with_finite(_NO_NUMBER)
        own[length] = merged([own[length], result]) if length in own else result

    def look(self, *, last: bool = False) -> None:
        """Holds the gates against what was found, and says what is wanted next; the last time, bounds are worked out
        instead."""
        measured = {phase: self.measured(phase) for phase in self.phases}
        self.claims = claims_of(measured, self.gate, self.attempt, bounded=last)
        if not last:
            self.looks += 1
            self.wanted = self._wanted()

    def of(self, name: str) -> tuple[EvalResult, ...]:
        """One a length."""
        return tuple(self.results.get(name, {}).values())

    def measured(self, phase: PhaseName) -> list[Measured]:
        """One a length."""
        floors = self.results.get(floor_of(phase), {})
        return [Measured.of(result, floors.get(length)) for length, result in self.results[phase].items()]

    @property
    def phases(self) -> tuple[PhaseName, ...]:
        """Those of the plan."""
        return tuple(phase for phase in PHASES if phase in self.results)

    @property
    def prompts(self) -> int:
        """Returns how many were run, over all lengths."""
        return max((sum(len(result.outcomes) for result in self.of(phase)) for phase in self.phases), default=0)

    @property
    def is_missed(self) -> bool:
        """Returns whether something is."""
        return bool(self.broken) or any(claims.having("missed") for claims in self.claims.values())

    @property
    def is_open(self) -> bool:
        """Returns whether more samples may decide what is undecided."""
        return self._is_undecided and bool(self.wanted)

    @property
    def is_used_up(self) -> bool:
        """Returns whether something stays undecided, since no length has more prompts."""
        return self._is_undecided and bool(self.ended) and not self.wanted

    @property
    def _is_undecided(self) -> bool:
        return any(claims.having("undecided") for claims in self.claims.values()) and not self.is_missed

    @property
    def more(self) -> int | None:
        """About how many more prompts would show that every gate is met; None where those seen do not say."""
        needed = [more_prompts(claims) for claims in self.claims.values()]
        known = [some for some in needed if some is not None]
        return max(known, default=0) if len(known) == len(needed) else None

    @property
    def pace(self) -> float | None:
        """Seconds a prompt in the second half of this run's rounds, which draw what is still undecided; None where
        nothing was drawn."""
        late = self.timed[len(self.timed) // 2 :]
        prompts = sum(one.prompts for one in late)
        return sum(one.seconds for one in late) / prompts if prompts else None

    @property
    def seconds(self) -> float | None:
        """About how many more seconds that takes; None where it is not known, or there are no more prompts."""
        if self.more is None or self.pace is None or self.is_used_up:
            return None
        return self.more * self.pace

    def answering_tasks(self, length: int) -> tuple[str, ...]:
        """The tasks that say something of right answers in some phase."""
        known = [Measured.of(own[length], None) for own in map(self.results.get, self.phases) if own and length in own]
        return tuple(dict.fromkeys(name for one in known for name in answering_tasks(one, self.gate.solved)))

    def _wanted(self) -> Draws:
        draws: Draws = defaultdict(dict)
        for phase, claims in self.claims.items():
            for length, wanted in claims.wanted.items():
                if length not in self.ended:
                    draws[length][phase] = wanted
        return dict(draws)
