"""What the commands of `sparsekv bench` share: options, the model, and rows printed as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from sparsekv.cli.arguments import Subject
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.planner.flags import Count, Flag, Lengths, Options, Shares, Tile
from sparsekv.planner.options import Hardware, Seed

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.harness import Columns, Row
    from sparsekv.bench.random_model import BenchModel

Narrow = Annotated[int, Field(ge=1, le=1024)]  # heads, their size, layers: as in a plan
HandDensity = Annotated[
    Shares,
    Flag("Without a plan, of one made by hand: one, or one a length.", ("--density", "--densities"), "LIST"),
]
HandTile = Annotated[Tile, Flag("Rows and columns of a tile, of a plan made by hand.", reads=Literal["64", "128"])]
BenchLengths = Annotated[
    Lengths, Flag("Tokens, such as 8k,32k; by default as fits the device.", ("--lengths", "--length"), "LIST")
]


class Timed(Options):
    """How often, and on what."""

    repeats: Annotated[Count, Flag("How often each is timed; medians are shown.", metavar="N")] = 3
    seed: Seed = 0


class Benched(Options):
    """Which model."""

    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None, Flag("The plan; by default that in the model's folder or repository.", metavar="FILE")
    ] = None
    random_weights: Annotated[bool, Flag("Random weights of the model's shape, made on the device.")] = False


def subject_of(flags: Benched, device: torch.device, dtype: torch.dtype, **how: Any) -> BenchModel:
    """The model, for a run of which `random_model` says `how`."""
    from sparsekv.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.model_config import dtype_name

    if flags.random_weights:
        subject = random_model(flags.model, device=device, dtype=dtype, **how)
        tell(subject.note)
        return subject
    loaded = Subject(flags.model).load(Hardware(device=str(device), dtype=dtype_name(dtype)))
    return BenchModel(loaded.model, loaded.info, flags.model, "loaded")


def title_of(subject: BenchModel, row: Row, words: str) -> str:
    """What stands above the rows."""
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"


def print_rows(rows: Sequence[Row], title: str, columns: Columns, as_json: bool, measured: str = "sparse_ms") -> None:
    """The rows, as JSON or for people.

    Raises:
        typer.Exit: no row has the number that is to be measured, which is a failure.
    """
    from sparsekv.bench.harness import report

    if as_json:
        emit_json([row.data() for row in rows])
    else:
        emit(report(rows, title, columns))
    if all(row.data()[measured] is None for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)
