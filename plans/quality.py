"""Quality of a plan as its file has it: right answers and divergence beside dense, and the losses that are excluded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from sparsekv.plans.types import (
    FieldError,
    Length,
    Natural,
    NonNegative,
    Part,
    Portion,
    Positive,
    Real,
    Share,
    Text,
    format_length,
)

# Tasks of held-out prompts that tell what evicting tokens of a prompt loses: many keys, a question behind an answer.
HURT_BY_EVICTION = ("niah_multikey", "second_question")
_OLD = "betting"  # the sequential test of earlier versions
_OLD_FIELDS = frozenset(("prefill", "decode", "both", "evidence"))


def each_once(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    lengths = [entry.length for entry in entries]
    again = next((at for at, length in enumerate(lengths) if length in lengths[:at]), None)
    if again is not None:
        raise FieldError(f"expected each length once, found {lengths[again]} again", again, "length")
    return entries


class CellScore(Part):
    """One task at one length: prompts, those that dense answers, and of answers how many the plan lost and won.

    A cell that dense answers too seldom is `unjudged`; the plan did not run on it.
    """

    task: Text
    length: Length
    prompts: Positive
    answered: Natural
    lost: Natural = 0
    won: Natural = 0
    unjudged: bool = False

    @property
    def judged(self) -> bool:
        return not self.unjudged

    @property
    def right(self) -> int:
        return self.answered - self.lost + self.won


class LengthScore(Part):
    """Divergence of next-token distributions from dense at one length, in nats, and the attention that was computed.

    `floor` is that of the kernels with every tile and token computed, which is rounding alone; `upper` the 95% upper
    bound of the mean beyond it; `worst` the mean beyond it of the worst tenth; `agreed` the share of 64 tokens of
    dense's own text that the plan picks too.
    """

    length: Length
    density: Share
    read: Share
    kl: NonNegative
    floor: NonNegative
    upper: Real
    worst: Real
    agreed: Portion | None = None


class Excludes(Part):
    """Losses of right answers, as shares, that the run excludes with 95%: over all judged prompts, in any task at any
    length, and in long or own prompts."""

    net_loss: Portion | None = None
    task_loss: Portion | None = None
    pooled_loss: Portion | None = None


class Quality(Part):
    """The fixed test of a plan, both phases together with sparse always on.

    `run` counts the runs on this plan, of which each has its `level`; `step` is the most tokens of a prompt that ran at
    once, none where prompts ran whole; `missed` has the lengths at which the plan lost too much; `reason` keeps it from
    being verified. Of plans of earlier versions, which `betting` verified, the results are not read.
    """

    test: Literal["small", "full", "prompts", "betting"]
    run: Positive = 1
    level: Share | None = None
    step: Length | None = None
    cells: tuple[CellScore, ...] = ()
    lengths: Annotated[tuple[LengthScore, ...], AfterValidator(each_once)] = ()
    excludes: Excludes | None = None
    missed: tuple[Length, ...] = ()
    reason: Text | None = None

    @property
    def cut(self) -> int | None:
        """The step, unless all measured lengths fit in one."""
        lengths = [one.length for one in self.lengths]
        return None if self.step and lengths and max(lengths) <= self.step else self.step

    @property
    def judged(self) -> tuple[CellScore, ...]:
        """The cells whose answers count."""
        return tuple(cell for cell in self.cells if cell.judged)

    def at(self, length: int) -> LengthScore | None:
        """Divergence at a length; None where it was not measured."""
        return next((one for one in self.lengths if one.length == length), None)


def without_old(quality: Any) -> Any:
    """The data of a quality, with its step under its present name; of the test before its step and reason alone."""
    if not isinstance(quality, Mapping) or not {*_OLD_FIELDS, "chunk"} & quality.keys():
        return quality
    if not _OLD_FIELDS & quality.keys():
        is_old = "step" not in quality  # else the reader refuses the name
        return {"step" if name == "chunk" and is_old else name: value for name, value in quality.items()}
    measured, evidence = quality.get("both") or quality.get("prefill"), quality.get("evidence")
    parts = (("step", "chunk", measured), ("reason", "reason", evidence))
    kept = {name: part.get(old) for name, old, part in parts if isinstance(part, Mapping)}
    return {"test": _OLD, **{name: value for name, value in kept.items() if value is not None}}


def quality_sentence(quality: Quality, status: str) -> str:
    """The result of a test in a sentence: status, prompts, answers beside dense, and the losses that are excluded."""
    if quality.test == _OLD:
        return f"{status} ({_OLD}, the test of an earlier version){_because(quality)}"
    parts = [f"{status} ({quality.test}): {_prompts(quality)}"]
    parts += [line] if (line := _excluded(quality.excludes)) else []
    left: dict[str, list[str]] = {}
    for cell in quality.cells:
        if not cell.judged:
            left.setdefault(cell.task, []).append(format_length(cell.length))
    told = [f"{task} at {' '.join(lengths)}" for task, lengths in left.items()]
    parts += [f"not judged: {', '.join(told)}"] if told else []
    return "; ".join(parts) + _because(quality)


def _because(quality: Quality) -> str:
    return f"; {quality.reason}" if quality.reason else ""


def _prompts(quality: Quality) -> str:
    cells = quality.judged
    prompts, tasks = sum(cell.prompts for cell in cells), len({cell.task for cell in cells})
    lengths = ", ".join(format_length(length) for length in sorted({cell.length for cell in quality.cells}))
    told = f"{prompts} prompts, {tasks} {'task' if tasks == 1 else 'tasks'} at {lengths}"
    if not any(cell.answered for cell in cells):
        return f"{told}, none with an answer of dense: tested by divergence alone" if cells else told
    points = 100.0 * sum(cell.won - cell.lost for cell in cells) / prompts
    return f"{told}: {points:+.1f} points beside dense"


def _excluded(excludes: Excludes | None) -> str:
    if excludes is None:
        return ""
    told = []
    if excludes.net_loss is not None:
        told.append(f"{math.ceil(1000.0 * excludes.net_loss - 1e-9) / 10.0:g} points over all")
    if excludes.task_loss is not None:
        told.append(f"{_points(excludes.task_loss)} in any task")
    if excludes.pooled_loss is not None:
        told.append(f"{_points(excludes.pooled_loss)} points in long or own prompts")
    comma = "," if len(told) > 1 else ""
    return f"a loss above {', or '.join(told)}{comma} is excluded (95%)" if told else ""


def _points(share: float) -> str:
    return f"{math.ceil(100.0 * share - 1e-9)}"


def cell_rows(quality: Quality) -> Iterator[tuple[str, ...]]:
    """A header, and a row a task: at each length right answers of dense and of the plan, of so many prompts."""
    lengths = sorted({cell.length for cell in quality.cells})
    cells = {(cell.task, cell.length): cell for cell in quality.cells}
    yield "task", *map(format_length, lengths)
    for task in dict.fromkeys(cell.task for cell in quality.cells):
        yield task, *(_cell_text(cells.get((task, length))) for length in lengths)


def _cell_text(cell: CellScore | None) -> str:
    if cell is None:
        return ""
    if not cell.judged:
        return f"not judged: {cell.answered} of {cell.prompts}"
    return f"{cell.answered} -> {cell.right} of {cell.prompts}"


_ROWS = "length, prefill computed, decode read, divergence, rounding, shown below, worst tenth, agreed"
LENGTH_ROWS = tuple(_ROWS.split(", "))


def length_score_rows(quality: Quality) -> Iterator[tuple[str, ...]]:
    """A row a length, below LENGTH_ROWS: attention computed, divergence in nats, and agreement over 64 tokens."""
    for one in quality.lengths:
        shares = (f"{share:.1%}" for share in (one.density, one.read))
        nats = (f"{value:.4f}" for value in (one.kl, one.floor, one.upper, one.worst))
        yield format_length(one.length), *shares, *nats, "" if one.agreed is None else f"{one.agreed:.1%}"


def right_share(cells: Sequence[CellScore]) -> tuple[float, float]:
    """Shares of right answers, of dense and of the plan."""
    prompts = max(1, sum(cell.prompts for cell in cells))
    return sum(cell.answered for cell in cells) / prompts, sum(cell.right for cell in cells) / prompts
