"""Progress that a test passes in: what was done so far, and Ctrl-C at a chosen point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparsekv.planner.progress import Progress, StageStep


class Counting(Progress, StageStep):
    """Adds up what stages announce and what is done of it."""

    def __init__(self) -> None:
        self.total, self.done, self.stages, self.said = 0.0, 0.0, [], []

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Counting]:
        self.stages.append(name)
        self.total += total or 0.0
        yield self

    def advance(self, units: float = 1, note: str = "") -> None:
        self.done += units

    def say(self, line: str) -> None:
        self.said.append(line)


class During(Counting):
    """Does something after so many steps of a stage; 0 is before the first."""

    def __init__(self, stage: str, happens: Callable[[], object], steps: int = 1) -> None:
        super().__init__()
        self._stage, self._happens, self._left, self._here = stage, happens, steps, False

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Counting]:
        with super().stage(name, total):
            self._here = self.stages[-1] == self._stage
            if self._here and not self._left:
                self._happens()
            yield self

    def advance(self, units: float = 1, note: str = "") -> None:
        super().advance(units, note)
        self._left -= self._here
        if self._here and not self._left:
            self._happens()


class CtrlC(During):
    """Interrupts a stage after so many of its steps."""

    def __init__(self, stage: str, steps: int = 1) -> None:
        super().__init__(stage, self._interrupt, steps)

    def _interrupt(self) -> None:
        raise KeyboardInterrupt
