"""Reports of long work: through a `Progress` that is passed in, never printed from the inside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column
from rich.text import Text

_PACED = 5.0  # percent of a stage from which on its pace is told: the first units pay for warming up


def prefill_work(tokens: int) -> float:
    """Units of a stage that a prompt is, in proportion to its time: attention takes the square of the tokens, the rest
    of the model takes them once. The time left is told from units done, so that lengths must not count alike.
    """
    return tokens / 1024 * (1.0 + tokens / 8192)


class StageStep:
    """One stage that is under way; this one reports nothing."""

    def advance(self, units: float = 1, note: str = "") -> None:
        """Counts `units` more as done; `note` names the work at hand."""


class Progress:
    """The receiver of stages; this one reports nothing, for tests and for use as a library."""

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[StageStep]:
        """Opens a stage of `total` units (None: unknown) for the length of a `with` block."""
        yield StageStep()

    def say(self, line: str) -> None:
        """Reports a line."""


class _Bar(StageStep):
    def __init__(self, bars: RichBars, name: str, total: float | None) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=total, note="")

    def advance(self, units: float = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=units, note=note)


class _Lines(_Bar):
    """For logs, where a bar only shows when it is full: a line now and then, of what the bar would show."""

    def __init__(self, bars: RichBars, name: str, total: float | None, seconds: float) -> None:
        super().__init__(bars, name, total)
        self._seconds, self._told = seconds, bars.get_time()

    def advance(self, units: float = 1, note: str = "") -> None:
        super().advance(units, note)
        now = self._bars.get_time()
        if now - self._told >= self._seconds:
            self._told = now
            _print(self._bars.console, ", ".join(filter(None, (*self._figures(), note))))

    def _figures(self) -> Iterator[str]:
        (task,) = self._bars.tasks
        share = f"{task.percentage:.0f}% in " if task.total else ""
        yield f"{task.description}: {share}{_clock(task.elapsed or 0.0)}"
        if task.time_remaining is not None and task.percentage >= _PACED:
            yield f"about {_clock(task.time_remaining)} left"


class _TimeLeft(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        is_early = task.total and task.percentage < _PACED
        return Text("-:--:--", style="progress.remaining") if is_early else super().render(task)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class BarProgress(Progress):
    """Bars with the time taken and left on a console, standard error unless another one is given.

    Where the console is not a terminal, a line every so many seconds.
    """

    def __init__(self, console: Console | None = None, seconds: float = 20.0) -> None:
        self._console = console or Console(stderr=True)
        self._seconds = seconds

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[StageStep]:
        note = TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True))  # what room is left for
        times = (TimeElapsedColumn(), TextColumn("left"), _TimeLeft())
        columns = (TextColumn("{task.description:<22}"), BarColumn(20), TaskProgressColumn(), *times, note)
        # The mean pace of the whole stage: one step may take longer than the seconds that rich looks back by default.
        bars = RichBars(*columns, console=self._console, speed_estimate_period=math.inf, expand=True)
        if self._console.is_terminal:
            with bars:
                yield _Bar(bars, name, total)
            return
        started = bars.get_time()
        _print(self._console, f"{name} ...")
        yield _Lines(bars, name, total, self._seconds)
        _print(self._console, f"{name}: done in {bars.get_time() - started:.0f} s")

    def say(self, line: str) -> None:
        _print(self._console, line)
