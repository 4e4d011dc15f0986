"""The outcomes of a test under way, cell by cell: an interrupted run goes on with the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sparsekv.planner.evaluation.results import Outcome, Spent
from sparsekv.planner.fixed_test import Cell
from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.plans.types import Digest, KVDtype, Length, Natural, Part, Positive, Text

BROKEN = 20.0  # nats, of a prompt without finite probabilities

Exact = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not rounded: two halves are to give one whole
Truth = Annotated[bool, Field(strict=True)]


class TextRow(Part):
    """Dense's own continuation of a prompt, read by the plan: divergence in nats, and tokens that agree."""

    kl: Exact
    agreed: Natural
    scored: Positive


class CellOutcomes(RunRecord):
    """Prompts of one task and length, in the order in which they were drawn.

    Attributes:
        more: they are behind those that decided whether the cell is judged.
        dense: whether dense answers each; None where there is no answer to compare.
        plan, kl: the same of the plan, and its divergence in nats; empty where the cell is not judged.
        rounding: divergence of the kernels with every tile and token computed, of the first prompts.
    """

    task: Text
    length: Length
    more: Truth = False
    dense: tuple[Truth | None, ...]
    plan: tuple[Truth | None, ...] = ()
    kl: tuple[Exact, ...] = ()
    rounding: tuple[Exact, ...] = ()
    texts: tuple[TextRow, ...] = ()
    spent: tuple[Exact, Exact, Exact, Exact] = (0.0, 0.0, 0.0, 0.0)

    @property
    def key(self) -> tuple[str, int, bool]:
        """See `RunRecord`."""
        return self.task, self.length, self.more


class OutcomesSettings(RunSettings):
    """The run of a test: only cells of equal settings are one run."""

    WHAT: ClassVar[str] = "outcomes of a verification"
    RECORDS: ClassVar = CellOutcomes
    kind: Literal["sparsekv.outcomes"] = "sparsekv.outcomes"
    schema_version: Literal[2] = 2
    plan: Digest
    architecture: Digest
    weights: Digest | None = None
    dtype: Text
    device: Text
    backend: Text
    versions: dict[Text, Text]
    sizes: dict[Text, Exact | Natural]
    seed: Natural
    run: Positive
    tasks: tuple[Text, ...]
    lengths: tuple[Length, ...]
    prefill_chunk: Length | None = None
    kv_dtype: KVDtype = "auto"
    prompts: Digest | None = None


def outcomes_file(settings: OutcomesSettings, path: Path | None) -> RunFile[OutcomesSettings]:
    """The file of an interrupted run with the same settings, or a new one in place of any other."""
    earlier = RunFile.earlier(OutcomesSettings, path) if _is_of_tests(path) else None
    if earlier is not None and not list(earlier.settings.differences(dict(settings))):
        return earlier
    if path is not None:
        path.unlink(missing_ok=True)
    return RunFile(settings, path)


def _is_of_tests(path: Path | None) -> bool:
    """Returns whether a file is of this version; one of another is begun anew."""
    if path is None or not path.exists():
        return False
    with path.open("rb") as file:
        return b'"schema_version": 2' in file.readline(1 << 16)


def cell_of(parts: Sequence[CellOutcomes]) -> Cell:
    """Right answers of all prompts of a cell."""
    pairs = [pair for one in parts for pair in zip(one.dense, one.plan or one.dense, strict=True)]
    return Cell(
        task=parts[0].task,
        length=parts[0].length,
        prompts=len(pairs),
        answered=sum(bool(dense) for dense, _ in pairs),
        lost=sum(bool(dense) and not plan for dense, plan in pairs),
        won=sum(bool(plan) and not dense for dense, plan in pairs),
    )


def finite(outcome: Outcome) -> tuple[bool | None, float]:
    """Whether an outcome is right, and its divergence; one without finite probabilities is wrong and far away."""
    if outcome.is_finite:
        return outcome.correct, outcome.kl
    return None if outcome.correct is None else False, BROKEN


def spent_of(parts: Sequence[CellOutcomes]) -> Spent:
    """The attention that all of them computed."""
    return sum((Spent(*one.spent) for one in parts), Spent())
