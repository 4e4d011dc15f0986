"""Raw outcomes of an undecided verification in a file beside the plan, from which `verify --write --more` goes on.

The file is there while a verification is undecided, and removed once it is decided: the plan has its figures then, and
outcomes that nothing goes on from would only be mistaken for those of another plan under that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.evaluation.results import EvalResult, LongText, Outcome, Spent, TaskResult
from sparsekv.planner.gates import Wanted
from sparsekv.planner.options import Gate, Settled
from sparsekv.planner.outcomes import PHASES, Outcomes, floor_of
from sparsekv.planner.records import RunSettings, difference, read_measured, versions, write_measured
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import (
    Digest,
    FieldError,
    KVDtype,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Text,
)
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import device_name, dtype_name, has_soft_cap

_MODES = (*PHASES, *map(floor_of, PHASES))

Exact = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not rounded: two halves are to give one whole
Truth = Annotated[bool, Field(strict=True)]
TextRow = tuple[Exact, Natural, Positive]
Row = tuple[Truth | None, Exact, Exact, Natural, Natural, Truth | None, Truth, TextRow | None]
"""The fields of an `Outcome`, in their order."""


class OutcomesSettings(RunSettings):
    """Says what was drawn and how it was run: only outcomes of equal settings are one sequence.

    Attributes:
        plan: digest of what the plan executes.
        content_seed: of the samples.
        seed: the one that was asked for, in place of the one that follows from the plan.
        chosen: by what samples were chosen.
        attempt: which plan this is of those that were tried.
        skipped: prompts of the caller that earlier attempts saw, of each length.
        prompts: digest of the caller's prompts, in place of samples of tasks.
    """

    plan: Digest
    architecture: Digest
    weights: Digest | None = None
    dtype: Text
    device: Text
    backend: Text
    versions: dict[Text, Text]
    content_seed: Natural
    seed: Natural | None = None
    chosen: tuple[Text, ...] = ()
    gates: Gate
    attempt: Positive
    skipped: Natural
    tasks: tuple[Text, ...]
    lengths: tuple[Length, ...]
    prefill_chunk: Length | None = None
    kv_dtype: KVDtype = "auto"
    prompts: Digest | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, plan: Plan, digest: str, options: Settled, **drawn: Any) -> Self:
        """Returns the settings of a run.

        Args:
            digest: of what the plan executes.
            drawn: `content_seed`, `attempt`, `skipped` and `prompts`.
        """
        model, fingerprint = loaded.model, loaded.info.fingerprint
        tile, head_dim = plan.prefill.tile if plan.prefill else None, loaded.info.largest_head
        capped = has_soft_cap(config_of(model))
        return cls(
            plan=digest,
            architecture=fingerprint.architecture,
            weights=fingerprint.weights,
            dtype=dtype_name(model.dtype),
            device=device_name(model.device),
            backend=choose_backend(model.device, model.dtype, head_dim, options.backend, tile, capped).name,
            versions=versions(),
            seed=options.verify_seed,
            chosen=options.verify_chosen,
            gates=options.gate,
            tasks=options.tasks,
            lengths=options.verify_lengths,
            prefill_chunk=options.prefill_chunk,
            kv_dtype=options.kv_dtype,
            **drawn,
        )

    def check_same(self, own: Mapping[str, Any]) -> None:
        """Refuses outcomes that a run cannot go on from.

        Args:
            own: settings of the run by the names of fields, all or those that are known yet; gates are.

        Raises:
            UsageError: they were drawn with other settings; names each difference.
        """
        gates = difference("gates", self.gates.named, own["gates"].named)
        differing = [*self.differences({name: one for name, one in own.items() if name != "gates"}), *gates]
        if differing:
            raise UsageError(
                "expected outcomes to go on from that were drawn with the settings of this run, found other ones: "
                f"{'; '.join(differing)}. Give the settings that are there, or leave --more out to start again"
            )


class WantedDraw(Part):
    """Says what of the next samples of a length is wanted of a phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: Length
    phase: PhaseName
    answers: Truth = False
    floor: Truth = False
    texts: Truth = False


class TaskOutcomes(Part):
    """One task: dense and a mode on the same samples, in the order that they were drawn."""

    dense: tuple[Row, ...]
    own: tuple[Row, ...]

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        if len(self.dense) != len(self.own):
            raise FieldError(f"expected pairs, found {len(self.dense)} of dense and {len(self.own)} of the mode")
        return self


class ModeOutcomes(Part):
    """One mode at one length."""

    mode: Text
    length: Length
    spent: tuple[Exact, Exact, Exact, Exact]
    tasks: dict[Text, TaskOutcomes]

    @classmethod
    def of(cls, mode: str, result: EvalResult) -> Self:
        """Returns the result of a mode as a file has it."""
        tasks = {
            name: TaskOutcomes(dense=tuple(map(_row, task.dense)), own=tuple(map(_row, task.sparse)))
            for name, task in result.tasks.items()
        }
        return cls(mode=mode, length=result.lengths[0], spent=astuple(result.spent), tasks=tasks)

    @property
    def result(self) -> EvalResult:
        """Returns the result as it was measured."""
        tasks = {name: TaskResult(_outcomes(task.dense), _outcomes(task.own)) for name, task in self.tasks.items()}
        return EvalResult((self.length,), tasks, Spent(*self.spent))


class OutcomesRecord(Part):
    """Holds what a verification drew before its time was up.

    Attributes:
        drawn: samples of a task, by length.
        ended: lengths without more prompts.
        wanted: what is left of the round to be drawn.
        seconds: about how long it takes to decide what is left, at the pace of the run that drew last; None where that
            is not known, as in files of before this was written.
    """

    kind: Literal["sparsekv.outcomes"] = "sparsekv.outcomes"
    schema_version: Literal[1] = 1
    settings: OutcomesSettings
    looks: Natural
    drawn: tuple[tuple[Length, Natural], ...]
    ended: tuple[Length, ...] = ()
    wanted: Annotated[tuple[WantedDraw, ...], Field(min_length=1)]
    results: tuple[ModeOutcomes, ...]
    seconds: NonNegative | None = None

    @classmethod
    def of(cls, found: Outcomes, settings: OutcomesSettings) -> Self:
        """Returns the outcomes of a verification as a file has them."""
        wanted = ((length, phase, one) for length, some in found.wanted.items() for phase, one in some.items())
        results = ((mode, one) for mode, by_length in found.results.items() for one in by_length.values())
        return cls(
            settings=settings,
            looks=found.looks,
            drawn=tuple(found.drawn.items()),
            ended=tuple(sorted(found.ended)),
            wanted=tuple(
                WantedDraw(length=length, phase=phase, answers=one.answers, floor=one.floor, texts=one.texts)
                for length, phase, one in wanted
            ),
            results=tuple(ModeOutcomes.of(mode, one) for mode, one in results),
            seconds=found.seconds,
        )

    @model_validator(mode="after")
    def _is_of_its_settings(self) -> Self:
        tasks, lengths = set(self.settings.tasks), set(self.settings.lengths)
        drawn = dict(self.drawn)
        named = (*drawn, *self.ended, *(one.length for one in self.wanted), *(one.length for one in self.results))
        if unknown := set(named) - lengths:
            raise FieldError(f"expected lengths of the settings, found {min(unknown)}", "drawn")
        if len({(one.mode, one.length) for one in self.results}) < len(self.results):
            raise FieldError("expected each mode and length once, found one twice", "results")
        for one in self.results:
            if one.mode not in _MODES or set(one.tasks) - tasks:
                raise FieldError("expected modes and tasks of the settings, found others", "results")
            if any(len(task.own) > drawn.get(one.length, 0) for task in one.tasks.values()):
                raise FieldError(f"expected at most what was drawn at {one.length}, found more", "results")
        return self

    def outcomes(self, modes: Sequence[str]) -> Outcomes:
        """Returns the outcomes that a verification of these modes goes on from."""
        found = Outcomes({name: {} for name in modes}, self.settings.gates, self.settings.attempt, self.looks)
        found.drawn.update(self.drawn)
        found.ended.update(self.ended)
        for draw in self.wanted:
            wanted = Wanted(draw.answers, draw.floor, draw.texts)
            found.wanted.setdefault(draw.length, {})[draw.phase] = wanted
        for one in self.results:
            found.results[one.mode][one.length] = one.result
        return found


def _row(outcome: Outcome) -> Row:
    return astuple(outcome)


def _outcomes(rows: Sequence[Row]) -> tuple[Outcome, ...]:
    return tuple(Outcome(*row[:7], LongText(*row[7]) if row[7] else None) for row in rows)


def keep_outcomes(record: OutcomesRecord | None, path: Path) -> None:
    """Writes what a later run goes on from, atomically, or removes what is there where nothing is left to be drawn.

    Raises:
        UsageError: the file cannot be written.
    """
    if record is None:
        path.unlink(missing_ok=True)
        return
    write_measured(record, path)


def read_outcomes(path: Path) -> OutcomesRecord:
    """Reads what an undecided verification left.

    Raises:
        UsageError: there is none, or it cannot be read.
        PlanError: it is not what was written there.
    """
    if not path.exists():
        raise UsageError(
            f"expected outcomes of an undecided verification in {path}, found no such file; run `verify --write` "
            "without --more first"
        )
    try:
        return read_measured(OutcomesRecord, path)
    except PlanError as error:
        error.add_note("start again with `verify --write` without --more")
        raise
