"""Files of `bench own`: the figures of one plan beside dense, and what they come to in a sentence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median, stdev
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
_PAIRS = 5  # of repeats, that tell a gain
_SPREADS = 2.0  # standard deviations of them, below which noise makes a gain: of five, one in 200 by chance


def lengths_of(plan: Plan) -> tuple[int, ...]:
    """The planned lengths; of a plan that names none, the model's context."""
    return plan.planned_lengths or (plan.model.context_length,)


class OwnLength(Part):
    """Shares of attention that a plan computes at one length; None is sparse, as yet uncounted."""

    length: Length
    prefill: Share | None
    decode: Share | None


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
                prefill=prefill_share(plan, length).computed,
                decode=decode_share(plan, length).computed,
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
        way: the dense side, the fastest of `ways`.
        host: the programs, and the day.
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
    ways: tuple[Text, ...] = ()
    note: str = ""
    failed: str = ""
    host: str = ""
    device: str = ""

    @property
    def key(self) -> tuple[Half, Name, int, int, int]:
        return self.half, self.name, self.length, self.at_once, self.turn

    @property
    def medians(self) -> tuple[float, float] | None:
        """The medians of dense and of the plan over the repeats."""
        return (median(self.dense), median(self.plan)) if self.dense and self.plan else None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speed of the plan over that of dense, one of each pair of repeats."""
        pairs = zip(self.dense, self.plan, strict=False)
        return tuple(plan / dense if self.name == "tokens/s" else dense / plan for dense, plan in pairs)

    @property
    def gain(self) -> float | None:
        if self.medians is None:
            return None
        dense, plan = self.medians
        return plan / dense if self.name == "tokens/s" else dense / plan

    @property
    def words(self) -> str:
        return self.words_at(format_length(self.length))

    def words_at(self, lengths: str) -> str:
        at_once = f", {self.at_once} at once" if self.half == "vllm" else ""
        names = {"turn": f"turn {self.turn}", "session": f"session of {self.turn} turns"}
        return f"{names.get(self.name, self.name)} at {lengths} in {TITLES[self.half]}{at_once}"


@dataclass(frozen=True, slots=True)
class _Group:
    """One figure at all its lengths."""

    figures: tuple[OwnFigure, ...]

    @property
    def repeats(self) -> list[float]:
        """The logarithm of the gain by repeat, a mean over lengths."""
        by_length = ([log(ratio) for ratio in figure.ratios] for figure in self.figures)
        return [fmean(logs) for logs in zip(*by_length, strict=False)]

    @property
    def gain(self) -> float:
        """The geometric mean over lengths."""
        return exp(fmean(log(figure.gain) for figure in self.figures if figure.gain))

    @property
    def sign(self) -> int:
        """1 where the plan is faster, -1 where it is slower, 0 where noise or a length says otherwise."""
        sign, repeats = 1 if self.gain > 1.0 else -1, self.repeats
        agrees = all(sign * ((figure.gain or 1.0) - 1.0) > -_LEAST for figure in self.figures)
        if not agrees or len(repeats) < _PAIRS or abs(self.gain - 1.0) < _LEAST:
            return 0
        return sign if sign * fmean(repeats) >= _SPREADS * stdev(repeats) else 0

    @property
    def words(self) -> str:
        lengths = sorted(figure.length for figure in self.figures)
        at = " to ".join(dict.fromkeys(format_length(length) for length in (lengths[0], lengths[-1])))
        return f"{self.figures[0].words_at(at)} {self.gain:.2f}x"


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
    def of(cls, plan: Plan, quantization: str | None = None, sparse: str = "auto") -> Self:
        fingerprint, elsewhere = plan.model.fingerprint, "" if sparse == "auto" else f"sparse={sparse}"
        return cls(
            model=", ".join(filter(None, (plan.model.id.rstrip("/").rpartition("/")[2], quantization, elsewhere))),
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
    groups = [*_groups(file)]
    by_sign = {sign: ", ".join(group.words for group in groups if group.sign == sign) for sign in (1, -1)}
    parts = [f"{word}: {told}" for word, told in zip(("faster", "slower"), by_sign.values(), strict=True) if told]
    if groups and not any(len(group.repeats) >= _PAIRS for group in groups):
        parts.insert(0, f"tells no gain: fewer than {_PAIRS} pairs of repeats")
    elif groups and not by_sign[1]:
        parts.insert(0, "gains nothing: no figure is faster by this plan than dense beyond noise")
    failed = [figure for figure in figures(file) if figure.failed]
    parts += [f"{len(failed)} figures failed: {failed[0].words}: {failed[0].failed}"] if failed else []
    return "; ".join(parts) or "nothing was measured"


def _groups(file: OwnFile) -> Iterator[_Group]:
    """Figures that were timed, by half, name and requests at once, at the longest length alone where lengths do not
    agree; turns are summed up by their session."""
    groups = defaultdict[tuple[Half, Name, int], list[OwnFigure]](list)
    for figure in figures(file):
        if figure.medians and figure.name != "turn":
            groups[figure.half, figure.name, figure.at_once].append(figure)
    for group in map(_Group, map(tuple, groups.values())):
        yield group if group.sign else _Group((max(group.figures, key=lambda figure: figure.length),))
