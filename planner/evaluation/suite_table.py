"""Views of a suite's results: means of methods, the tasks that lose most, and what the haystacks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from sparsekv.planner.evaluation.suite_file import Metric, SuiteResult
from sparsekv.planner.tasks import ruler_suite
from sparsekv.plans.errors import PlanError

_DENSE = "dense"


@dataclass(frozen=True, slots=True)
class SuiteTable:
    """Results that are complete for some methods and lengths.

    Attributes:
        methods: beside dense.
        lengths: ascending.
    """

    result: SuiteResult
    methods: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, result: SuiteResult) -> SuiteTable:
        """The lengths at which dense has run all tasks, and the methods that have at all of these.

        Raises:
            PlanError: there is no such length.
        """
        known = result.by_key

        def is_whole(method: str, lengths: Sequence[int]) -> bool:
            return all((method, task, length) in known for task, length in product(ruler_suite.RULER_SUITE, lengths))

        lengths = tuple(n for n in sorted({cell.length for cell in result.cells}) if is_whole(_DENSE, (n,)))
        if not lengths:
            raise PlanError("expected a length at which all tasks were run, found none; let `eval --suite` go on first")
        methods = (method.name for method in result.methods if method.name != _DENSE)
        return cls(result, tuple(method for method in methods if is_whole(method, lengths)), lengths)

    @property
    def tasks(self) -> tuple[str, ...]:
        """RULER's names, in its order."""
        return tuple(ruler_suite.RULER_SUITE)

    @property
    def absent(self) -> tuple[str, ...]:
        """The tasks that are not part of it."""
        return ruler_suite.ABSENT

    @property
    def haystacks(self) -> dict[str, list[str]]:
        """The tasks by what their haystack is."""
        suite = ruler_suite.RULER_SUITE
        named = {
            what: [name for name in suite if suite[name].haystack == haystack]
            for haystack, what in ruler_suite.HAYSTACKS.items()
        }
        return {what: names for what, names in named.items() if names}

    def mean(self, method: str, metric: Metric, lengths: Sequence[int], tasks: Sequence[str] = ()) -> float:
        """A method's score over tasks, by default all; each task and length has as many samples."""
        scores = self.result.scores(method, metric, tasks or self.tasks, lengths)
        return sum(scores) / len(scores)

    def worst_first(self, method: str) -> list[str]:
        """The tasks, by what a method loses of RULER's score over all lengths, the greatest loss first."""
        lost = {task: self.result.paired(method, "recall", (task,), self.lengths).difference for task in self.tasks}
        return sorted(self.tasks, key=lost.__getitem__)

    def prefill_density(self, method: str, length: int) -> float:
        """The mean over tasks."""
        return self._share(method, "prefill_density", length)

    def decode_share(self, method: str, length: int) -> float:
        """The mean over the tasks that had steps; 1 where decode ran dense or not at all."""
        return self._share(method, "decode_share", length)

    def _share(self, method: str, name: Literal["prefill_density", "decode_share"], length: int) -> float:
        cells = self.result.by_key
        each: list[float | None] = [getattr(cells[method, task, length], name) for task in self.tasks]
        known = [share for share in each if share is not None]
        return sum(known) / len(known) if known else 1.0
