"""A model with and without a plan on the same held-out samples of the tasks, by `compare.py`.

Dense runs once and is shared by all modes; a mode is switched on once for all samples, tasks and lengths. The phases of
one plan share prefills as well, batch by batch (shared_prefills.py).

Shapes: B batch, A tokens of the answer, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from sparsekv.planner.compare import DENSE, DenseBatch, Mode, PhaseName, PlanMode, batches
from sparsekv.planner.eval_results import EvalResult, Outcome, Spent, TaskResult
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.prompts_at_once import prompts_at_once
from sparsekv.planner.shared_prefills import Measured, measured_together, phases_of_one_plan
from sparsekv.planner.tasks import TASKS, Kit, Sample, Split, prepare
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import LEAST_CHUNK
from sparsekv.runtime.hf.load import LoadedModel

__all__ = ["DENSE", "EvalSamples", "Mode", "PhaseName", "PlanMode", "evaluate"]

# Dense logits that wait in host memory for the modes; with more, modes are switched on again for later samples.
_WAITING_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class EvalSamples:
    """Samples that neither training nor calibration used, and how they are fed.

    Attributes:
        lengths: most tokens of prompt and answer together.
        samples: of each task and length.
        batch: most samples run at once; None: as many as surely fit. Only samples of equal shape share a batch.
        prefill_chunk: most tokens of a prompt given to the model at once; None is all.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    batch: int | None = None
    seed: int = 0
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tasks) - set(TASKS))
        if unknown:
            raise UsageError(f"expected tasks of {', '.join(sorted(TASKS))}, found {', '.join(unknown)}")
        if self.prefill_chunk is not None and self.prefill_chunk < LEAST_CHUNK:
            raise UsageError(
                f"expected a prefill chunk of at least {LEAST_CHUNK} tokens, found {self.prefill_chunk}; thousands are "
                "sensible"
            )

    def check_fit(self, kit: Kit) -> None:
        """Finds out, without running a model, whether every task fits every length.

        Raises:
            PromptError: one does not.
        """
        for length, task in product(self.lengths, self.tasks):
            next(held_out(kit, task, length, 1, self.seed))

    def batches(self, kit: Kit, model: PreTrainedModel) -> Iterator[tuple[Sample, ...]]:
        """The samples in batches, one length after the other."""
        for length in self.lengths:
            drawn = (sample for task in self.tasks for sample in held_out(kit, task, length, self.samples, self.seed))
            yield from batches(drawn, self.batch or prompts_at_once(model, length))


def evaluate(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    asked: EvalSamples,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[EvalResult, ...]]:
    """Evaluates some modes, and dense once, on the same samples.

    Args:
        loaded: the model, with nothing applied to it.
        modes: what to compare with dense, by name; may be empty.
        kit: the evaluation split's, `prepare(tokenizer, Split.EVALUATION)`, for those who call this often.

    Returns:
        A result a length for each mode, and for "dense" with dense on both sides.

    Raises:
        PromptError: a task does not fit a length.
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    found = {name: _Findings() for name in (DENSE, *modes)}
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    asked.check_fit(source)
    total = asked.samples * len(asked.tasks) * len(found) * sum(map(prefill_work, asked.lengths))
    with (progress or Progress()).stage("evaluate", total=total) as step:
        batches, chunk, phases = asked.batches(source, loaded.model), asked.prefill_chunk, phases_of_one_plan(modes)
        measured = (
            measured_together(loaded, phases, batches, chunk)
            if phases
            else _measured_apart(loaded, modes, batches, chunk)
        )
        with closing(measured):  # which gives the model back
            for one in measured:
                found[one.name].note(one)
                length = one.samples[0].length
                step.advance(len(one.samples) * prefill_work(length), f"{length} tokens, {one.name}")
    return {
        name: tuple(own.result(found[DENSE], length, asked.tasks) for length in asked.lengths)
        for name, own in found.items()
    }


def _measured_apart(
    loaded: LoadedModel, modes: Mapping[str, Mode], batches: Iterable[tuple[Sample, ...]], chunk: int | None
) -> Generator[Measured]:
    _check_modes(modes, loaded.model)
    for some in _rounds(batches, loaded.model):
        dense = []
        for samples in some:
            dense.append(DenseBatch.of(loaded, samples, chunk))
            yield Measured(DENSE, samples, dense[-1].outcomes, Spent())
        for name, mode in modes.items():
            with mode.running(loaded.model) as spent:
                before = Spent()
                for one in dense:
                    outcomes, after = one.compared(loaded, mode), spent()
                    yield Measured(name, one.samples, outcomes, after - before)
                    before = after


def _check_modes(modes: Mapping[str, Mode], model: PreTrainedModel) -> None:
    """Switches each on and off, so that one that cannot be is found out before dense is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        for mode in modes.values():
            with mode.running(model):
                pass


def _rounds(groups: Iterable[tuple[Sample, ...]], model: PreTrainedModel) -> Iterator[list[tuple[Sample, ...]]]:
    """Batches whose dense logits together fit what may wait for the modes."""
    config: Any = model.config
    some: list[tuple[Sample, ...]] = []
    waiting = 0
    for samples in groups:
        own = len(samples) * (len(samples[0].answer_ids) + 1) * config.vocab_size * model.dtype.itemsize
        if some and waiting + own > _WAITING_BYTES:
            yield some
            some, waiting = [], 0
        some.append(samples)
        waiting += own
    if some:
        yield some


@dataclass(slots=True)
class _Findings:
    """Of one mode, by length."""

    outcomes: dict[tuple[int, str], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[int, Spent] = field(default_factory=lambda: defaultdict(Spent))

    def note(self, measured: Measured) -> None:
        self.spent[measured.samples[0].length] += measured.spent
        for sample, outcome in zip(measured.samples, measured.outcomes, strict=True):
            self.outcomes[sample.length, sample.task].append(outcome)

    def result(self, dense: _Findings, length: int, tasks: Sequence[str]) -> EvalResult:
        both = ((task, dense.outcomes[length, task], self.outcomes[length, task]) for task in tasks)
        return EvalResult((length,), {task: TaskResult(tuple(a), tuple(b)) for task, a, b in both}, self.spent[length])
