"""How long work reports on itself: through a `Progress` that is passed in, never printed from the inside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars


class Step:
    """One stage that is under way; this one reports nothing."""

    def advance(self, units: float = 1, note: str = "") -> None:
        """Says that `units` more are done, and what is being worked on."""


class Progress:
    """Where stages are announced; this one reports nothing, for tests and for use as a library."""

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """Opens a stage of `total` units (None: unknown) for the length of a `with` block."""
        yield Step()

    def say(self, line: str) -> None:
        """Says something once."""


class Stages(Progress):
    """Numbers the stages of a longer run: "cost (2 of 5)"."""

    def __init__(self, progress: Progress | None, names: Sequence[str]) -> None:
        self._progress, self._names = progress or Progress(), tuple(names)

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """See `Progress`. The name is one of those numbered."""
        number = self._names.index(name) + 1
        with self._progress.stage(f"{name} ({number} of {len(self._names)})", total) as step:
            yield step

    def say(self, line: str) -> None:
        """See `Progress`."""
        self._progress.say(line)


class _Bar(Step):
    def __init__(self, bars: RichBars, name: str, total: float | None) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=total, note="")

    def advance(self, units: float = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=units, note=note)


class _Lines(Step):
    """For logs, where a bar only shows when it is full: a line now and then."""

    def __init__(self, console: Console, name: str, total: float | None, seconds: float) -> None:
        self._console, self._name, self._seconds = console, name, seconds
        self._total, self._done, self._told = total, 0.0, time.monotonic()

    def advance(self, units: float = 1, note: str = "") -> None:
        self._done += units
        if time.monotonic() - self._told >= self._seconds:
            self._told = time.monotonic()
            share = f"{self._done:g}" if not self._total else f"{self._done / self._total:.0%}"
            self._console.print(
                ", ".join(filter(None, (f"{self._name}: {share}", note))), highlight=False, soft_wrap=True
            )


class BarProgress(Progress):
    """Bars with the time left on a console, standard error unless another one is given.

    Where the console is not a terminal, a line every so many seconds.
    """

    def __init__(self, console: Console | None = None, seconds: float = 20.0) -> None:
        self._console = console or Console(stderr=True)
        self._seconds = seconds

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """See `Progress`."""
        if not self._console.is_terminal:
            started = time.monotonic()
            self._console.print(f"{name} ...", highlight=False)
            yield _Lines(self._console, name, total, self._seconds)
            self._console.print(f"{name}: done in {time.monotonic() - started:.0f} s", highlight=False)
            return
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), *times)
        with RichBars(*columns, console=self._console, transient=False) as bars:
            yield _Bar(bars, name, total)

    def say(self, line: str) -> None:
        """See `Progress`."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
