"""`sparsekv diff`: what changed between two plans."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import PLACE, Json, plan_file
from sparsekv.cli.output import FAILED, emit, emit_json, tell

if TYPE_CHECKING:
    from sparsekv.plans.schema import Plan


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=PLACE, show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help=PLACE, show_default=False)],
    full: Annotated[
        bool, typer.Option("--full", help="List every head of every layer and every figure; --json always does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what changed between two plans: model, patterns, budgets, quality, cost. Needs no model.

    Exit 0: nothing did; integrity, comments and layout of a file are no change. Exit 1: something did. Exit 2: a file
    is no plan.
    """
    from sparsekv.plans.diff import diff_plans

    changes = diff_plans(_read(old), _read(new), full or as_json)
    if as_json:
        emit_json({"changed": bool(changes), "changes": [asdict(change) for change in changes]})
    elif not changes:
        emit(f"no change: {new} says what {old} says")
    for section, members in groupby(changes if not as_json else (), key=lambda change: change.section):
        emit("\n".join((section, *(f"  {change.text}" for change in members))))
    if changes:
        raise typer.Exit(FAILED)


def _read(place: Path) -> Plan:
    """A plan, an edited one too: its changes are what is to be reviewed before it is sealed."""
    from sparsekv.plans.files import parse_plan, read_text, sign

    path = plan_file(place)
    plan = parse_plan(read_text(path), str(path), signed=False)
    if plan != sign(plan):
        tell(f"{path}: its integrity does not fit its content; `sparsekv seal {path}` signs it, as unverified")
    return plan


app = commands.app(diff)
