"""The requests of an engine's steps: which row is whose, and how long its prompt is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Holds what a step schedules."""

    rows: Mapping[str, int]  # of each request
    prompts: Mapping[str, int]  # tokens of the prompts of requests that are new to the worker
    computed: Mapping[str, int]  # of these, tokens before the step
    resumed: Collection[str]  # that were preempted and start again
    finished: Collection[str]  # since the last step, aborted ones among them


class Requests:
    """The requests that a worker knows of."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        self._open: dict[str, int] = {}  # tokens computed of prompts that are not complete
        self._order: Callable[[], Sequence[str]] | None = None
        self.steps = 0  # begun so far

    @contextmanager
    def step(self, scheduled: Scheduled, order: Callable[[], Sequence[str]] | None = None) -> Iterator[bool]:
        """A step runs meanwhile. Gives whether it has single rows alone, one of them of a prompt.

        Args:
            scheduled: its requests.
            order: their rows, once the worker knows them, unless it tells `order`.
        """
        for request in scheduled.finished:
            self._prompts.pop(request, None)
            self._open.pop(request, None)
        self._prompts.update(scheduled.prompts)
        self._open.update(scheduled.computed)
        self._open.update(dict.fromkeys(scheduled.resumed, 0))
        self._order = order
        self.steps += 1
        try:
            yield self._advance(scheduled.rows)
        finally:
            self._order = None

    def _advance(self, rows: Mapping[str, int]) -> bool:
        single = False
        for request in [request for request in self._open if request in rows]:
            single |= rows[request] == 1
            self._open[request] += rows[request]
            if self._open[request] >= self._prompts[request]:
                del self._open[request]
        return single and max(rows.values()) == 1

    def knows(self, request: str) -> bool:
        """Returns whether the worker still has a request."""
        return request in self._prompts

    def order(self, requests: Sequence[str]) -> None:
        """The rows of the step under way."""
        self._order = lambda: requests

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The request of each row of the step under way, and the tokens of its prompt; none of steps that vLLM makes
        up."""
        return [] if self._order is None else [(request, self._prompts[request]) for request in self._order()]
