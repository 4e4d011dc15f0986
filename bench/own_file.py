"""Files of `bench own`: the figures of one plan beside dense, and what they come to in a sentence."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.plans.brief import decode_share, prefill_share, sentence
from sparsekv.plans.files import executed_digest
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import Digest, Length, Natural, NonNegative, Part, Positive, Share, Text, format_length

Half = Literal["transformers", "vllm"]
Name = Literal["prompt", "first token", "token", "tokens/s", "turn", "session"]
TITLES: dict[Half, str] = {"transformers": "transformers", "vllm": "vLLM"}
_LEAST = 0.02  # of a ratio: less is no difference


def lengths_of(plan: Plan) -> tuple[int, ...]:
    """The planned lengths; of a plan that names none, the model's context."""
    return plan.planned_lengths or (plan.model.context_length,)


class OwnLength(Part):
    """Shares of attention that a plan computes at one length."""

    length: Length
    prefill: Share
    decode: Share


class OwnPlan(RunRecord):
    """The plan as its file tells it: status, sentence of its test, shares by planned length, families of sparse heads,
    the most frequent first."""

    status: Text
    verdict: str
    lengths: tuple[OwnLength, ...]
    families: tuple[Text, ...] = ()

    @property
    def key(self) -> str:
        return "plan"

    @classmethod
    def of(cls, plan: Plan) -> Self:
        lengths = (
            OwnLength(
                length=length,
                prefill=prefill_share(plan, length).computed or 1.0,
                decode=decode_share(plan, length).computed or 1.0,
            )
            for length in lengths_of(plan)
        )
        families = tuple(name for name, _ in Counter(_families(plan)).most_common())
        return cls(status=plan.status, verdict=sentence(plan), lengths=tuple(lengths), families=families)


def _families(plan: Plan) -> Iterator[str]:
    for bucket in plan.prefill.lengths if plan.prefill else ():
        for layer in plan.model.full_layers:
            patterns = bucket.patterns(layer, plan.model.group_of(layer).heads)
            yield from (pattern.pattern for pattern in patterns if pattern.pattern != "dense")


class OwnFigure(RunRecord):
    """One figure by the plan and dense, taken in turn.

    Attributes:
        length: tokens of the prompt, or of the cache; of a turn all that stand before its answer.
        turn: its number from 1 on; `new` are the tokens that it adds.
        dense, plan: one value a repeat, milliseconds or tokens a second.
        share: of attention that was computed, as counted.
        way: the dense side.
        failed: why there are no values; the next run tries again.
    """

    half: Half
    name: Name
    length: Length
    at_once: Positive = 1
    turn: Natural = 0
    new: Natural = 0
    dense: tuple[NonNegative, ...] = ()
    plan: tuple[NonNegative, ...] = ()
    share: Share | None = None
    way: str = ""
    note: str = ""
    failed: str = ""
    host: str = ""
    device: str = ""

    @property
    def key(self) -> tuple[Half, Name, int, int, int]:
        return self.half, self.name, self.length, self.at_once, self.turn

    @property
    def medians(self) -> tuple[float, float] | None:
        """Of dense and of the plan."""
        return (statistics.median(self.dense), statistics.median(self.plan)) if self.dense and self.plan else None

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times faster the plan was, a repeat each."""
        pairs = zip(self.dense, self.plan, strict=False)
        return tuple(plan / dense if self.name == "tokens/s" else dense / plan for dense, plan in pairs)

    @property
    def gain(self) -> float | None:
        if self.medians is None:
            return None
        dense, plan = self.medians
        return plan / dense if self.name == "tokens/s" else dense / plan

    @property
    def differs(self) -> int:
        """1 where every pair of repeats has the plan faster, -1 where every pair has it slower, else 0."""
        if self.gain is None or abs(self.gain - 1.0) < _LEAST:
            return 0
        return int(min(self.ratios) > 1.0) - int(max(self.ratios) < 1.0)

    @property
    def words(self) -> str:
        at_once = f", {self.at_once} at once" if self.half == "vllm" else ""
        names = {"turn": f"turn {self.turn}", "session": f"session of {self.turn} turns"}
        return f"{names.get(self.name, self.name)} at {format_length(self.length)} in {TITLES[self.half]}{at_once}"


class OwnRun(RunSettings):
    """A model and a plan: halves that ran on different days, or machines, join where both are the same."""

    WHAT: ClassVar[str] = "figures of `bench own`"
    RECORDS: ClassVar[Any] = OwnFigure | OwnPlan
    kind: Literal["sparsekv.own"] = "sparsekv.own"
    schema_version: Literal[1] = 1
    model: Text
    architecture: Digest
    weights: Digest | None = None
    plan: Digest

    @classmethod
    def of(cls, plan: Plan) -> Self:
        fingerprint = plan.model.fingerprint
        return cls(
            model=plan.model.id.rstrip("/").rpartition("/")[2],
            architecture=fingerprint.architecture,
            weights=fingerprint.weights,
            plan=executed_digest(plan),
        )


OwnFile = RunFile[OwnRun]


def figures(file: OwnFile) -> tuple[OwnFigure, ...]:
    return tuple(file.all(OwnFigure).values())


def measured(file: OwnFile) -> set[tuple[Half, Name, int, int, int]]:
    """The keys of figures that are not measured again."""
    return {figure.key for figure in figures(file) if not figure.failed}


def plan_of(file: OwnFile) -> OwnPlan:
    return file.all(OwnPlan)["plan"]


def result(file: OwnFile) -> str:
    """The sentence that a reader sees first: where the plan gains, where it loses, what failed."""
    timed = [figure for figure in figures(file) if figure.medians]
    parts = [*_told("faster", timed, 1), *_told("slower", timed, -1)]
    if timed and not any(figure.differs > 0 for figure in timed):
        parts.insert(0, "gains nothing: no figure is faster by this plan than dense")
    failed = [figure for figure in figures(file) if figure.failed]
    parts += [f"{len(failed)} figures failed: {failed[0].words}: {failed[0].failed}"] if failed else []
    return "; ".join(parts) or "nothing was measured"


def _told(word: str, timed: list[OwnFigure], sign: int) -> Iterator[str]:
    """The strongest figure of each name and half; turns are summed up by their session."""
    groups: dict[tuple[Half, Name], list[OwnFigure]] = {}
    for figure in timed:
        if figure.differs == sign and figure.name != "turn":
            groups.setdefault((figure.half, figure.name), []).append(figure)
    strongest = (max(group, key=lambda one: sign * (one.gain or 1.0)) for group in groups.values())
    told = ", ".join(f"{figure.words} {figure.gain:.2f}x" for figure in strongest)
    if told:
        yield f"{word}: {told}"
