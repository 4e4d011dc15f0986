"""`sparsekv show`: a plan as tables."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sparsekv.cli.arguments import Json, PlanPlace, plan_file
from sparsekv.cli.output import emit_json

# Where there is no terminal to fit into.
_WIDTH = 110


def show(
    plan: PlanPlace,
    full: Annotated[bool, typer.Option("--full", help="List every head of every layer.")] = False,
    as_json: Json = False,
) -> None:
    """Print a plan as tables: what each layer computes, measured quality, predicted cost. Needs no model."""
    from sparsekv.plans.files import load_plan

    found = load_plan(plan_file(plan))
    if as_json:
        from sparsekv.plans.show import summary

        emit_json(summary(found))
        return
    from rich.console import Console

    from sparsekv.plans.show import describe

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for part in describe(found, full):
        console.print(part)
