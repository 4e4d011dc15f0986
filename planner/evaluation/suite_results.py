"""Scores of each method on every sample of a suite's tasks: the records of a run, and means over tasks and lengths.

A score is a sample's, from 0 to 1: `recall` is RULER's, the share of the expected strings that occur in the generated
text; `exact` is `RulerTask.is_exact` of that text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, ClassVar, Literal, Self

import numpy as np

from sparsekv.planner.evaluation.modes import DENSE
from sparsekv.planner.evaluation.results import Interval, score_interval
from sparsekv.planner.records import RunFile, RunRecord, RunSettings, check_same, difference, versions
from sparsekv.planner.tasks import ruler_suite
from sparsekv.plans.errors import PlanError
from sparsekv.plans.types import Digest, Length, Natural, Portion, Positive, Text
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import dtype_name

Metric = Literal["recall", "exact"]
SuiteName = Literal["ruler", "long"]
Key = tuple[str, str, int]  # method, task, length


class SuiteCell(RunRecord):
    """One method on the samples of one task and length, in their order.

    Attributes:
        plan: digest of what its plan executes; None without one.
        decode_share: of the tokens; None where no text went beyond its first token.
    """

    method: Text
    plan: Digest | None = None
    device: Text
    task: Text
    length: Length
    recall: tuple[Portion, ...]
    exact: tuple[Portion, ...]
    prefill_density: Portion
    decode_share: Portion | None = None

    @property
    def key(self) -> Key:
        return self.method, self.task, self.length


class ModelRun(RunSettings):
    """Which model was run, and on which samples of tasks."""

    TOLD: ClassVar[frozenset[str]] = frozenset({"model", "versions"})
    model: Text
    architecture: Digest
    weights: Digest | None = None
    dtype: Text
    seed: Natural
    samples: Positive
    prefill_chunk: Length | None = None
    versions: dict[Text, Text]

    @classmethod
    def of(cls, loaded: LoadedModel, **asked: Any) -> Self:
        prints = {name: getattr(loaded.info.fingerprint, name) for name in ("architecture", "weights")}
        dtype = dtype_name(loaded.model.dtype)
        return cls(model=loaded.info.id, dtype=dtype, versions=versions(), **prints, **asked)


class SuiteRun(ModelRun):
    """One run of `eval --suite`."""

    WHAT: ClassVar[str] = "results of `eval --suite`"
    RECORDS: ClassVar[Any] = SuiteCell
    kind: Literal["sparsekv.suite"] = "sparsekv.suite"
    schema_version: Literal[2] = 2
    suite: SuiteName = "ruler"
    phase: Text
    backend: Text

    def check(self, record: RunRecord) -> None:
        """Refuses a cell of another task, or without one score of each kind a sample."""
        assert isinstance(record, SuiteCell)
        tasks = ruler_suite.SUITES[self.suite]
        if record.task not in tasks or not len(record.recall) == len(record.exact) == self.samples:
            raise ValueError


def check_continued(
    file: RunFile[Any], known: Mapping[str, Any], plans: Mapping[str, str], cells: type[SuiteCell] = SuiteCell
) -> None:
    """Refuses results that a run cannot go on from.

    Args:
        known: settings of the run, all or those that are known before a model is loaded.
        plans: digests of its plans by the names of methods.
    """
    there = {cell.method: cell.plan for cell in file.all(cells).values()}
    others = (difference(f"plan of {name}", there[name], plans[name]) for name in plans if name in there)
    check_same(file, chain(file.settings.differences(known), *others))


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean scores of dense and of a method on the same samples, and the 95% interval of their difference."""

    dense: float
    own: float
    interval: Interval

    @property
    def difference(self) -> float:
        return self.own - self.dense


@dataclass(frozen=True, slots=True)
class SuiteTable:
    """Results that are complete for some methods and lengths."""

    file: RunFile[SuiteRun]
    methods: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, file: RunFile[SuiteRun]) -> SuiteTable:
        """The lengths at which dense has run all tasks, and the methods that have at all of these."""
        cells, suite = file.all(SuiteCell), ruler_suite.SUITES[file.settings.suite]

        def is_whole(method: str, lengths: Sequence[int]) -> bool:
            return all((method, task, length) in cells for task, length in product(suite, lengths))

        lengths = tuple(n for n in sorted({length for _, _, length in cells}) if is_whole(DENSE, (n,)))
        if not lengths:
            raise PlanError("expected a length at which all tasks were run, found none; let `eval --suite` go on first")
        methods = dict.fromkeys(method for method, _, _ in cells if method != DENSE)
        return cls(file, tuple(method for method in methods if is_whole(method, lengths)), lengths)

    @property
    def cells(self) -> Mapping[Key, SuiteCell]:
        return self.file.all(SuiteCell)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(ruler_suite.SUITES[self.file.settings.suite])

    @property
    def haystacks(self) -> dict[str, list[str]]:
        """The tasks by what their haystack is."""
        suite = ruler_suite.SUITES[self.file.settings.suite]
        named = {
            what: [name for name in suite if suite[name].haystack == haystack]
            for haystack, what in ruler_suite.HAYSTACKS.items()
        }
        return {what: names for what, names in named.items() if names}

    def scores(self, method: str, metric: Metric, tasks: Collection[str], lengths: Collection[int]) -> list[float]:
        """The scores of all samples of some tasks and lengths, in the same order for every method."""
        chosen = (self.cells[method, task, length] for length in lengths for task in tasks)
        return list(chain.from_iterable(getattr(cell, metric) for cell in chosen))

    def paired(self, method: str, metric: Metric, tasks: Collection[str] = (), lengths: Collection[int] = ()) -> Paired:
        """A method beside dense, over some tasks and lengths, by default all."""
        some = tasks or self.tasks, lengths or self.lengths
        dense, own = (self.scores(name, metric, *some) for name in (DENSE, method))
        return Paired(float(np.mean(dense)), float(np.mean(own)), score_interval(dense, own))

    def worst_first(self, method: str) -> list[str]:
        """The tasks, by what a method loses of RULER's score over all lengths, the greatest loss first."""
        return sorted(self.tasks, key=lambda task: self.paired(method, "recall", (task,)).difference)

    def share(self, method: str, name: Literal["prefill_density", "decode_share"], length: int) -> float:
        """The mean over the tasks that have one; 1 where decode ran dense or not at all."""
        each = (getattr(self.cells[method, task, length], name) for task in self.tasks)
        known = [share for share in each if share is not None]
        return sum(known) / len(known) if known else 1.0
