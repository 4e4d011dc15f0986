"""How long work reports on itself: through a `Progress` that is passed in, never printed from the inside."""

from __future__ import annotations

from collections.abc import Iterator
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


class _Bar:
    def __init__(self, bars: RichBars, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, units: float = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=units, note=note)  # type: ignore[arg-type]


class BarProgress:
    """Bars with the time left on a console, standard error unless another one is given."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """See `Progress`."""
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichBars(*columns, console=self._console, transient=False) as bars:
            yield _Bar(bars, bars.add_task(name, total=total, note=""))
