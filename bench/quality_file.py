"""The file of the table of quality, and the Markdown of its tables.

Every outcome of a (method, task, length, sample) stands there once. Means are over tasks, of the first samples that all
methods have; a task that lost much was run on more samples, and its own loss counts them all.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from sparsekv.bench import ruler_suite
from sparsekv.bench.quality_methods import PLAN, Group
from sparsekv.bench.suite import Key, ModelRun, SuiteCell, check_continued
from sparsekv.planner.evaluation.predictions import DENSE
from sparsekv.planner.evaluation.results import Interval, score_interval
from sparsekv.planner.records import RunFile, RunRecord
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import Length, Natural, NonNegative, Portion, Text, format_length

LOST = 0.10  # of a task's score: what is run again, on more samples
FEWEST = 3  # tasks in a mean, at least
GOAL_POINTS, GOAL_RATIO = -2.0, 0.5
GOAL_KEPT, GOAL_LOSS = 0.5, 0.6  # of the bytes; of the points that the best other loses
GROUPS: dict[Group, tuple[str, str]] = {
    "plan": ("The whole plan", "tiles; tokens read"),
    "prefill": ("Prefill at the plan's density, decode dense", "tiles computed"),
    "decode": ("Decode at the plan's share, prefill dense", "tokens read"),
    "eviction": ("KV cache eviction at equal bytes, prefill and decode dense", "bytes"),
}


class QualityCell(SuiteCell):
    """One method on the samples of one task and length.

    Attributes:
        kl: divergence from dense on dense's own text, a mean over its first tokens, of each sample.
        steps: decode steps, which weigh `decode_share`; there are none where dense's text is one token.
        cached: share of the keys and values that are there once the prompt is complete.
        prefill_seconds, step_seconds: of a prompt and of a step of the whole batch, the least of all batches; None
            where what runs is no implementation.
    """

    kl: tuple[NonNegative, ...]
    decode_share: Portion
    steps: Natural = 0
    cached: Portion = 1.0
    prefill_seconds: NonNegative | None = None
    step_seconds: NonNegative | None = None

    def with_more(self, new: Self) -> Self:
        """These samples and later ones."""
        before, count = len(self.kl), len(self.kl) + len(new.kl)
        changes: dict[str, object] = {name: getattr(self, name) + getattr(new, name) for name in _BY_SAMPLE}
        for name in ("prefill_density", "cached"):
            changes[name] = (getattr(self, name) * before + getattr(new, name) * len(new.kl)) / count
        changes |= {"steps": self.steps + new.steps, "decode_share": share_of_steps([self, new])}
        for name in _TIMES:
            changes[name] = min((one for one in (getattr(self, name), getattr(new, name)) if one), default=None)
        return self.model_copy(update=changes)

    def untimed(self) -> Self:
        """Returns the cell without times, which say nothing where something else ran on the device."""
        return self.model_copy(update=dict.fromkeys(_TIMES))


def share_of_steps(cells: Sequence[QualityCell]) -> float:
    """The mean share of tokens that steps read; 1 without steps."""
    steps = sum(cell.steps for cell in cells)
    return sum(cell.decode_share * cell.steps for cell in cells) / steps if steps else 1.0


_BY_SAMPLE = ("recall", "exact", "kl")
_TIMES = ("prefill_seconds", "step_seconds")


class MethodNote(RunRecord):
    """A method at a length: where it stands in the tables, and what it was set to."""

    name: Text
    length: Length
    group: Group
    setting: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.length


class Knobs(RunRecord):
    """The settings of prefill methods at a length, and the density that they were held to."""

    length: Length
    values: dict[Text, float]

    @property
    def key(self) -> int:
        return self.length


class RunNote(RunRecord):
    """One run of the command, as far as it has come."""

    command: Text
    commit: Text
    device: Text
    began: Text
    seconds: NonNegative

    @property
    def key(self) -> tuple[str, str]:
        return self.command, self.began


class QualityRun(ModelRun):
    """The table that runs and parts of it belong to."""

    WHAT: ClassVar[str] = "a table of quality"
    RECORDS: ClassVar[Any] = QualityCell | MethodNote | Knobs | RunNote
    kind: Literal["sparsekv.quality"] = "sparsekv.quality"
    schema_version: Literal[2] = 2
    backend: Text


class QualityFile(RunFile[QualityRun]):
    """The results of a run so far."""

    @property
    def by_key(self) -> Mapping[Key, QualityCell]:
        return self.all(QualityCell)

    def samples(self, key: Key) -> int:
        """Returns how many there are of a method, task and length."""
        cell = self.by_key.get(key)
        return len(cell.kl) if cell else 0

    def with_earlier(self, new: QualityCell) -> QualityCell:
        earlier = self.by_key.get(new.key)
        return earlier.with_more(new) if earlier else new

    def tasks_of(self, methods: Sequence[str], length: int) -> tuple[str, ...]:
        """Returns the tasks of which dense and all of these methods have the samples that were asked for."""
        names, count = (DENSE, *methods), self.settings.samples
        return tuple(
            task
            for task in ruler_suite.RULER_SUITE
            if all(self.samples((name, task, length)) >= count for name in names)
        )

    def loss(self, method: str, task: str, length: int) -> float:
        """Returns what a method loses of a task's score, over all samples that dense has too; rounded, as 0.85 less
        0.75 is less than a tenth in floating point."""
        cells = self.by_key
        own, dense = cells[method, task, length].recall, cells[DENSE, task, length].recall
        count = min(len(own), len(dense))
        return round(float(np.mean(dense[:count]) - np.mean(own[:count])), 9)


def merged(parts: Sequence[QualityFile]) -> QualityFile:
    """Puts the parts of one table together, which ran other tasks or lengths beside each other."""
    whole, ran = QualityFile(parts[0].settings), dict[tuple[str, int], Path | None]()
    settings: dict[tuple[str, int], dict[str, None]] = {}
    for part in parts:
        known = {cell.method: cell.plan for cell in whole.by_key.values() if cell.plan}
        check_continued(part, dict(whole.settings), known, QualityCell)
        for task, length in {(task, length) for _, task, length in part.by_key}:
            if (task, length) in ran:
                raise UsageError(
                    f"expected parts of a table that ran other tasks or lengths, found {task} at "
                    f"{format_length(length)} in {ran[task, length]} and in {part.path}; leave one of them out"
                )
            ran[task, length] = part.path
        for note in part.all(MethodNote).values():
            own = settings.setdefault(note.key, {})
            own[note.setting] = None
            whole.add(note.model_copy(update={"setting": " or ".join(own)}))
        for knobs in part.all(Knobs).values():
            earlier = whole.all(Knobs).get(knobs.key)
            whole.add(knobs.model_copy(update={"values": knobs.values | earlier.values}) if earlier else knobs)
        whole.add(*part.all(RunNote).values(), *part.by_key.values())
    return whole


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One method at some lengths; scores are shares, times are None where they were not measured.

    Attributes:
        tasks: those whose scores it is the mean of.
        interval: 95%, of the difference from dense over the same samples.
        worst: the task and length that loses most, what it loses, and its samples.
    """

    method: str
    setting: str
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    dense: float
    own: float
    interval: Interval
    worst: tuple[str, int, float, int]
    kl: float
    density: float
    share: float
    cached: float
    prefill_seconds: float | None
    step_seconds: float | None

    @property
    def points(self) -> float:
        """Its mean minus that of dense, in percent."""
        return 100.0 * (self.own - self.dense)


def row_of(found: QualityFile, method: str, lengths: Sequence[int], tasks: Sequence[str]) -> Row:
    """A method over tasks and lengths that it has all run."""
    cells, count = found.by_key, found.settings.samples
    keys = [(task, length) for length in lengths for task in tasks]
    own = [cells[method, *key] for key in keys]
    dense = [cells[DENSE, *key] for key in keys]

    def scores(some: Sequence[QualityCell]) -> list[float]:
        return list(chain.from_iterable(cell.recall[:count] for cell in some))

    def mean(name: str) -> float:
        return float(np.mean([getattr(cell, name) for cell in own]))

    def typical(name: str) -> float | None:
        times = [getattr(cell, name) for cell in own if getattr(cell, name) is not None]
        return float(np.median(times)) if times else None

    worst = max(keys, key=lambda key: found.loss(method, *key))
    setting = next((n.setting for n in found.all(MethodNote).values() if n.key == (method, lengths[-1])), "")
    return Row(
        method=method,
        setting=setting,
        lengths=tuple(lengths),
        tasks=tuple(tasks),
        dense=float(np.mean(scores(dense))),
        own=float(np.mean(scores(own))),
        interval=score_interval(scores(dense), scores(own)),
        worst=(*worst, found.loss(method, *worst), len(cells[method, *worst].kl)),
        kl=float(np.mean(list(chain.from_iterable(cell.kl[:count] for cell in own)))),
        density=mean("prefill_density"),
        share=share_of_steps(own),
        cached=mean("cached"),
        prefill_seconds=typical("prefill_seconds"),
        step_seconds=typical("step_seconds"),
    )


def _is_ours(method: str) -> bool:
    return method == PLAN or method.startswith(f"{PLAN}, ")


def _kept(method: str) -> float:
    """The share of the bytes that the name of a method that evicts ends with."""
    return float(method.rsplit(" ", 1)[-1])


def rows(found: QualityFile) -> Iterator[tuple[Group, Row]]:
    """The rows of every group: of each length over the tasks that all of its methods have run, and of the whole plan
    over all lengths that are complete."""
    for group in GROUPS:
        notes = [note for note in found.all(MethodNote).values() if note.group == group]
        whole: list[int] = []
        for length in sorted({note.length for note in notes}):
            names = sorted((note.name for note in notes if note.length == length), key=lambda name: not _is_ours(name))
            if group == "eviction":
                names.sort(key=_kept, reverse=True)
            tasks, everything = found.tasks_of(names, length), tuple(ruler_suite.RULER_SUITE)
            if len(tasks) < min(FEWEST, len(everything)):
                names, tasks = [name for name in names if found.tasks_of([name], length) == everything], everything
            for name in names:
                yield group, row_of(found, name, (length,), tasks)
                whole += [length] if tasks == everything else []
        if group == "plan" and len(whole) > 1:
            yield group, row_of(found, PLAN, whole, tuple(ruler_suite.RULER_SUITE))


def markdown(found: QualityFile) -> Iterator[str]:
    """Lines of the tables: what was run, a table a group, and what the goals say."""
    every = list(rows(found))
    yield from _runs(found)
    for group, (title, _) in GROUPS.items():
        own = [row for of, row in every if of == group]
        if not own:
            continue
        yield f"**{title}**\n"
        heads = _HEADS if any(row.prefill_seconds or row.step_seconds for row in own) else _HEADS[:-2]
        yield f"| length | method | {' | '.join(heads)} |"
        yield "|---" * (len(heads) + 2) + "|"
        for lengths, tasks in dict.fromkeys((row.lengths, row.tasks) for row in own):
            at = ", ".join(map(format_length, lengths)) if len(lengths) == 1 else "all"
            at += f", {len(tasks)} tasks" if len(tasks) < len(ruler_suite.RULER_SUITE) else ""
            same = [row for row in own if (row.lengths, row.tasks) == (lengths, tasks)]
            for row in (row_of(found, DENSE, lengths, tasks), *same):
                yield f"| {at} | {' | '.join(_cells(group, row)[: len(heads) + 1])} |"
        yield ""
        partial = ((row.lengths[0], row.tasks) for row in own if len(row.tasks) < len(ruler_suite.RULER_SUITE))
        for length, tasks in dict.fromkeys(partial):
            yield f"All of these methods have run {len(tasks)} tasks at {format_length(length)}: {', '.join(tasks)}.\n"
    yield from _goals(every)


_HEADS = (
    "RULER, mean",
    "minus dense",
    "95%",
    "worst task",
    "divergence",
    "computed or cached",
    "prompt, s",
    "step, ms",
)


def _cells(group: Group, row: Row) -> tuple[str, ...]:
    task, length, lost, samples = row.worst
    spent = {
        "plan": f"{row.density:.3f}; {row.share:.3f}",
        "prefill": f"{row.density:.3f}",
        "decode": f"{row.share:.3f}",
        "eviction": f"{row.cached:.3f}",
    }
    name = f"{row.method} ({row.setting})" if row.setting else row.method
    low, high = (100.0 * bound for bound in row.interval)
    times = (
        "-" if row.prefill_seconds is None else f"{row.prefill_seconds:.3f}",
        "-" if row.step_seconds is None else f"{1000.0 * row.step_seconds:.1f}",
    )
    if row.method == DENSE:
        return (name, f"{100.0 * row.own:.1f}", "", "", "", "", "1", *times)
    return (
        name,
        f"{100.0 * row.own:.1f}",
        f"{row.points:+.1f}",
        f"{low:+.1f} to {high:+.1f}",
        f"{task} {format_length(length)} {-100.0 * lost:+.1f} ({samples})" if lost > 0 else "none",
        f"{row.kl:.4f}",
        spent[group],
        *times,
    )


def _runs(found: QualityFile) -> Iterator[str]:
    settings, runs = found.settings, [*found.all(RunNote).values()]
    seconds = sum(run.seconds for run in runs)
    devices, commits = (", ".join(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("device", "commit"))
    dates = " to ".join(sorted({run.began[:10] for run in (runs[0], runs[-1])}))
    parts = ", other tasks and lengths beside it" if len({_part_of(run) for run in runs}) > 1 else ""
    tasks = f"{settings.samples} samples of each of {len(ruler_suite.RULER_SUITE)} tasks"
    yield (
        f"{settings.model}, {settings.dtype}: `{runs[0].command}`{parts}, commit {commits}, {devices}, {dates}; "
        f"{len(runs)} runs, {seconds / 60.0:.0f} minutes; {tasks}.\n"
    )


def _part_of(run: RunNote) -> tuple[str, ...]:
    words = shlex.split(run.command)
    return tuple(after for word, after in pairwise(words) if word in ("--tasks", "--lengths"))


def _goals(every: Sequence[tuple[Group, Row]]) -> Iterator[str]:
    whole = [row for group, row in every if group == "plan" and row.tasks == tuple(ruler_suite.RULER_SUITE)]
    if whole:
        low = 100.0 * whole[-1].interval[0]
        told = f"{low:+.1f} points (goal {GOAL_POINTS:g}: {_verdict(low > GOAL_POINTS)})"
        yield f"- RULER's mean by the plan minus dense, lower bound: {told}."
    for group in ("prefill", "decode", "eviction"):
        together: dict[tuple[int, float | None], list[Row]] = {}
        for row in (row for of, row in every if of == group):
            kept = _kept(row.method) if group == "eviction" else None
            together.setdefault((row.lengths[0], kept), []).append(row)
        for (_, kept), same in together.items():
            ours = [row for row in same if _is_ours(row.method)]
            others = [row for row in same if not _is_ours(row.method) and row.kl]
            if ours and others:
                yield _divergence_goal(group, kept, ours[0], min(others, key=lambda row: row.kl))
                if kept is not None and round(ours[0].cached, 2) >= GOAL_KEPT:
                    yield _points_goal(ours[0], max(others, key=lambda row: row.points))


def _divergence_goal(group: Literal["prefill", "decode", "eviction"], kept: float | None, own: Row, best: Row) -> str:
    few = f", {len(own.tasks)} tasks" if len(own.tasks) < len(ruler_suite.RULER_SUITE) else ""
    at = f"{format_length(own.lengths[0])}{few}" + (f" and {own.cached:.2g} of the bytes" if kept is not None else "")
    spent = {"prefill": "density", "decode": "share", "eviction": "cached"}[group]
    ratio, both = own.kl / best.kl, f"{getattr(own, spent):.3f} and {getattr(best, spent):.3f}"
    return (
        f"- {group.capitalize()} at {at}: our divergence is {ratio:.2f} of that of {best.method}, which diverges least "
        f"of the others, at {both} (goal {GOAL_RATIO:g}: {_verdict(ratio <= GOAL_RATIO)})."
    )


def _points_goal(own: Row, best: Row) -> str:
    low = 100.0 * own.interval[0]
    within, less = low > GOAL_POINTS, own.points >= GOAL_LOSS * min(0.0, best.points)
    return (
        f"- RULER's mean there minus dense: ours {own.points:+.1f} points (at least {low:+.1f}, goal {GOAL_POINTS:g}: "
        f"{_verdict(within)}), {best.method}, which loses least, {best.points:+.1f} (goal {GOAL_LOSS:g} of it: "
        f"{_verdict(less)})."
    )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"
