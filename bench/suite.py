"""Runs the tasks of a suite on held-out samples: dense and plans generate freely, and their text is scored.

A score is a sample's, from 0 to 1: `recall` is RULER's, the share of the expected strings that occur in the generated
text; `exact` is `RulerTask.is_exact` of that text.

Generation is greedy, whatever the checkpoint's generation_config.json asks for beside its end tokens.

Shapes: B batch, S tokens of a prompt, G tokens that are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.intervals import Interval, score_interval
from sparsekv.bench.ruler_suite import SUITES, RulerTask, recall
from sparsekv.bench.text_runs import followed, until_end
from sparsekv.planner.evaluation.batches import prompts_at_once
from sparsekv.planner.evaluation.predictions import DENSE, PlanMode, prefill, without_plans
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.progress import Progress, StageStep, prefill_work
from sparsekv.planner.records import RunFile, RunRecord, RunSettings, check_same, difference, versions
from sparsekv.planner.tasks import Kit, Sample, Split, make_samples, prepare
from sparsekv.planner.tasks.text import TaskError
from sparsekv.plans.errors import PlanError, PromptError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.types import Digest, Length, Natural, Portion, Positive, Text, format_length
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import device_name, dtype_name

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
    """One run of `eval`."""

    WHAT: ClassVar[str] = "results of `eval`"
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


def check_continued(file: RunFile[Any], settings: Mapping[str, Any], plans: Mapping[str, str]) -> None:
    """Refuses results that a run cannot go on from.

    Args:
        settings: of the run, all or those that are known before a model is loaded.
        plans: digests of its plans by the names of methods.
    """
    there = {cell.method: cell.plan for cell in file.all(SuiteCell).values()}
    others = (difference(f"plan of {name}", there[name], plans[name]) for name in plans if name in there)
    check_same(file, chain(file.settings.differences(settings), *others))


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
            raise PlanError("expected a length at which all tasks were run, found none; let `eval` go on first")
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
        chosen = tasks or self.tasks, lengths or self.lengths
        dense, scores = (self.scores(name, metric, *chosen) for name in (DENSE, method))
        return Paired(float(np.mean(dense)), float(np.mean(scores)), score_interval(dense, scores))

    def worst_first(self, method: str) -> list[str]:
        """The tasks, by what a method loses of RULER's score over all lengths, the greatest loss first."""
        return sorted(self.tasks, key=lambda task: self.paired(method, "recall", (task,)).difference)

    def share(self, method: str, name: Literal["prefill_density", "decode_share"], length: int) -> float:
        """The mean over the tasks that have one; 1 where decode ran dense or not at all."""
        each = (getattr(self.cells[method, task, length], name) for task in self.tasks)
        shares = [share for share in each if share is not None]
        return sum(shares) / len(shares) if shares else 1.0


@dataclass(frozen=True, slots=True)
class SuiteSamples:
    """Held-out samples of every task of the suite, and how they are fed."""

    lengths: tuple[int, ...]
    samples: int = 20
    batch: int | None = None
    seed: int = 0
    prefill_chunk: int | None = None
    suite: SuiteName = "ruler"

    @property
    def tasks(self) -> Mapping[str, RulerTask]:
        return SUITES[self.suite]

    def check_fit(self, kit: Kit) -> None:
        """Refuses a task that does not fit a length, without running a model."""
        for length, task in product(self.lengths, self.tasks.values()):
            next(self.drawn(kit, task, length))

    def drawn(self, kit: Kit, task: RulerTask, length: int) -> Iterator[Sample]:
        """The samples of one task and length, whose prompts are equally long."""
        try:
            kit = kit.shared_by(tuple(self.tasks), self.lengths)
            yield from make_samples(task, kit, length, self.seed, self.samples)
        except TaskError as error:
            raise PromptError(
                f"{task.name} of --suite {self.suite} at {format_length(length)}, of which {task.tokens} tokens "
                f"or more are for what is generated: {error}"
            ) from error


def run_suite(
    loaded: LoadedModel,
    modes: Mapping[str, PlanMode],
    asked: SuiteSamples,
    file: RunFile[Any],
    *,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> None:
    """Runs dense and other modes on every task at every length, but for what a file holds, and adds that to it.

    Args:
        file: of records that include `SuiteCell`, of a run with the same settings.
    """
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    asked.check_fit(source)
    measured = file.all(SuiteCell)
    open_ = {
        (length, task): [name for name in (DENSE, *modes) if (name, task.name, length) not in measured]
        for length, task in product(sorted(asked.lengths), asked.tasks.values())
    }
    total = asked.samples * sum(prefill_work(length) * len(names) for (length, _), names in open_.items())
    with (progress or Progress()).stage("evaluate", total=total) as step:
        for (length, task), names in open_.items():
            if names:
                run = _Run(loaded, task.name, length, list(asked.drawn(source, task, length)), asked, step)
                file.add(*[run.cell(name, modes.get(name)) for name in names])


@dataclass(frozen=True, slots=True)
class _Run:
    """The samples of one task and length."""

    loaded: LoadedModel
    task: str
    length: int
    samples: Sequence[Sample]
    asked: SuiteSamples
    step: StageStep

    def cell(self, method: str, mode: PlanMode | None) -> SuiteCell:
        with mode.running(self.loaded.model) if mode else _dense() as spent:
            texts = [text for batch in self._batches() for text in self._generated(method, batch)]
            computed = spent()
        if mode:
            mode.check(len(self.samples[0].prompt_ids), computed)
        both = list(zip(texts, self.samples, strict=True))
        return SuiteCell(
            method=method,
            plan=executed_digest(mode.plan) if mode else None,
            device=device_name(self.loaded.model.device),
            task=self.task,
            length=self.length,
            recall=tuple(recall(text, sample.answer) for text, sample in both),
            exact=tuple(float(self.asked.tasks[self.task].is_exact(text, sample.answer)) for text, sample in both),
            prefill_density=computed.density,
            decode_share=computed.attended / computed.cached if computed.cached else None,
        )

    def _batches(self) -> Iterator[Sequence[Sample]]:
        size = self.asked.batch or prompts_at_once(self.loaded.model, self.length)
        for first in range(0, len(self.samples), size):
            yield self.samples[first : first + size]

    def _generated(self, method: str, batch: Sequence[Sample]) -> list[str]:
        ids_BS = torch.from_numpy(np.stack([sample.prompt_ids for sample in batch]).astype(np.int64))
        with without_plans() if method == DENSE else nullcontext():
            texts = generated(self.loaded, ids_BS, self.length - ids_BS.shape[1], self.asked.prefill_chunk)
        note = f"{self.task}, {format_length(self.length)}, {method}"
        self.step.advance(len(batch) * prefill_work(self.length), note)
        return texts


@contextmanager
def _dense() -> Iterator[Callable[[], Spent]]:
    yield Spent


@torch.no_grad()
def generated(loaded: LoadedModel, ids_BS: torch.Tensor, tokens: int, chunk: int | None = None) -> list[str]:
    """Continues prompts of equal length greedily by at most so many tokens, with whatever is applied to the model."""
    model: Any = loaded.model
    prompts = prefill(model, ids_BS.to(model.device), chunk)
    check_numbers(model, "logits", prompts.logits_BKV)
    return texts_of(loaded, followed(model, prompts, tokens, 1).picked_BG)


def texts_of(loaded: LoadedModel, picked_BG: torch.Tensor) -> list[str]:
    rows = zip(picked_BG.tolist(), until_end(loaded.model, picked_BG).tolist(), strict=True)
    texts = ([token for token, counts in zip(*row, strict=True) if counts] for row in rows)
    return [str(loaded.tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]
