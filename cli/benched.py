"""Shared parts of the commands of `sparsekv bench`: the model and its plan, options of timing, rows on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from pydantic import model_validator

from sparsekv.cli.arguments import Subject, check_machine
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.planner.common_options import Hardware
from sparsekv.planner.flags import Count, Flag, Key, Lengths, Options, Shares, TokenBudget

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.harness import Columns, Row
    from sparsekv.bench.random_model import BenchModel

LENGTHS = (("--lengths", "--length"), "LIST")
BenchLengths = Annotated[Lengths, Flag("Tokens, such as 8k,32k; by default as fits the device.", *LENGTHS)]


class Timed(Options):
    """Says how often, and on what."""

    repeats: Count = 3
    seed: int = 0


class Benched(Options):
    """Says which model."""

    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None, Flag("The plan; by default that in the model's folder or repository.", metavar="FILE")
    ] = None
    random_weights: Annotated[bool, Flag("Random weights of the model's shape, made on the device.")] = False

    @model_validator(mode="after")
    def _one_says_what_the_plan_is(self) -> Self:
        if self.plan is not None:
            self.refuse(self.by_hand(), "each says what the plan is", "plan")
        return self

    @classmethod
    def by_hand(cls) -> tuple[str, ...]:
        """Returns the options of plans made by hand."""
        hand = (HandPrefill, HandDecode)
        return tuple(name for one in hand if issubclass(cls, one) for name in one.model_fields)

    @property
    def is_by_hand(self) -> bool:
        """Returns whether a plan made by hand was asked for."""
        return any(map(self.is_given, self.by_hand()))


class HandPrefill(Options):
    """Says how sparse a plan made by hand is in prefill."""

    density: Annotated[Shares, Key("Without a plan, of one made by hand: one, or one a length.", "SHARES")] = ()


class HandDecode(Options):
    """Says how many tokens filter layers choose by a plan made by hand; three by depth do."""

    budget: Annotated[TokenBudget | None, Key("Without a plan: tokens that a filter layer chooses.", "N")] = None


def named_subject(flags: Benched, lengths: Sequence[int], by_hand: bool | None = None) -> Subject:
    """The model and its plan, unless one is made by hand; random weights take any length, of a model that need not be
    there."""
    by_hand = flags.is_by_hand if by_hand is None else by_hand
    named = Subject(flags.model) if by_hand else Subject.named(flags.model, flags.plan)
    if not flags.random_weights:
        return named.checked(flags, tuple(lengths))
    check_machine(flags)
    return named


def subject_of(flags: Benched, named: Subject, device: torch.device, dtype: torch.dtype, **how: Any) -> BenchModel:
    """The model, for a run of which `random_model` says `how`."""
    from sparsekv.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.model_config import dtype_name

    if flags.random_weights:
        subject = random_model(flags.model, device=device, dtype=dtype, **how)
        tell(subject.note)
        return subject
    loaded = named.load(Hardware(device=str(device), dtype=dtype_name(dtype)))
    return BenchModel(loaded.model, loaded.info, flags.model, "loaded")


def title_of(subject: BenchModel, row: Row, words: str) -> str:
    """Returns what stands above the rows."""
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Rows of one bench, and how they are shown.

    Attributes:
        title: stands above them.
        number: the one that is measured; rows without it failed.
        note: beside rows in JSON, which have no title.
    """

    rows: Sequence[Row]
    title: str
    columns: Columns
    number: str = "sparse_ms"
    note: str = ""


def print_rows(*parts: BenchRun, as_json: bool) -> None:
    """The rows, as one list of JSON, or for people.

    Raises:
        typer.Exit: no row of a part has the number that is to be measured, which is a failure.
    """
    show_rows(*parts, as_json=as_json)
    if any(all(row.data()[part.number] is None for row in part.rows) for part in parts):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


def show_rows(*parts: BenchRun, as_json: bool) -> None:
    """Prints the rows of a run, whatever has become of it."""
    from sparsekv.bench.harness import report

    if as_json:
        for note in dict.fromkeys(part.note for part in parts if part.note):
            tell(note)
        emit_json([row.data() for part in parts for row in part.rows])
    else:
        emit("\n".join(report(part.rows, part.title, part.columns) for part in parts))
