"""Rows of `sparsekv bench`, printed as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from sparsekv.cli.output import emit, emit_json, tell

if TYPE_CHECKING:
    from sparsekv.bench.harness import Columns, Row


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
