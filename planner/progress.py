"""How long work reports on itself: through a `Progress` that is passed in, never printed from the inside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars


class Step(Protocol):
    """One stage that is under way."""

    def advance(self, units: float = 1, note: str = "") -> None:
        """Says that `units` more are done, and what is being worked on."""


class Progress(Protocol):
    """Where stages are announced."""

    def stage(self, name: str, total: float | None = None) -> AbstractContextManager[Step]:
        """Opens a stage of `total` units (None: unknown) for the length of a `with` block."""


class _Silent:
    def advance(self, units: float = 1, note: str = "") -> None:
        """Says nothing."""


class NoProgress:
    """For tests and for use as a library."""

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """See `Progress`."""
        yield _Silent()


class Stages:
    """Numbers the stages of a longer run: "cost (2 of 5)"."""

    def __init__(self, progress: Progress | None, names: Sequence[str]) -> None:
        self._progress, self._names = progress or NoProgress(), tuple(names)

    def stage(self, name: str, total: float | None = None) -> AbstractContextManager[Step]:
        """See `Progress`. The name is one of those numbered."""
        return self._progress.stage(f"{name} ({self._names.index(name) + 1} of {len(self._names)})", total)


class _Bar:
    def __init__(self, bars: RichBars, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, units: float = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=units, note=note)  # type: ignore[arg-type]


class _Lines:
    """For logs, where a bar only shows when it is full: a line now and then."""

    def __init__(self, console: Console, name: str, total: float | None, seconds: float) -> None:
        self._console, self._name, self._total, self._seconds = console, name, total, seconds
        self._done = 0.0
        self._told = time.monotonic()

    def advance(self, units: float = 1, note: str = "") -> None:
        self._done += units
        now = time.monotonic()
        if now - self._told >= self._seconds:
            self._told = now
            share = f"{self._done:g}" if self._total is None else f"{self._done:g} of {self._total:g}"
            self._console.print(f"{self._name}: {share} {note}".rstrip(), highlight=False, soft_wrap=True)


class BarProgress:
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
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichBars(*columns, console=self._console, transient=False) as bars:
            yield _Bar(bars, bars.add_task(name, total=total, note=""))
