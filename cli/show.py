"""`sparsekv show`: a plan as tables, or as an HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, PlanPlace, plan_file
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable
from sparsekv.plans.errors import UsageError, install_command

if TYPE_CHECKING:
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.plans.schema import Plan

# Where there is no terminal to fit into.
_WIDTH = 110


def show(
    plan: PlanPlace,
    full: Annotated[bool, typer.Option("--full", help="List every head of every layer.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained page with charts, in place of tables.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The plan's profile: damages and similarity, for --html.")
    ] = None,
    curve: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured curves (JSON), for --html.")] = None,
    as_json: Json = False,
) -> None:
    """Print a plan as tables: what each layer computes, measured quality, predicted cost. Needs no model."""
    from sparsekv.plans.files import load_plan

    idle = [flag for flag, given in (("--profile", profile), ("--curve", curve)) if given is not None and html is None]
    if idle:
        raise UsageError(f"expected --html FILE beside {idle[0]}, which only the page shows; add it, or leave it out")
    if html is not None:
        check_replaceable(html, "--html", "page")
    found = load_plan(plan_file(plan))
    if html is not None:
        _write_page(found, str(plan), html, profile, curve)
    if as_json:
        from sparsekv.plans.show import summary

        emit_json(summary(found) | ({} if html is None else {"html": str(html)}))
    elif html is not None:
        emit(f"{html}: the page of {found.model.id}, {found.status}")
    else:
        _print(found, full, str(plan))


def _print(plan: Plan, full: bool, place: str) -> None:
    from rich.console import Console

    from sparsekv.plans.show import describe, verdict

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for part in describe(plan, full):
        console.print(part)
    emit("\n".join(("", *verdict(plan, place))))


def _write_page(plan: Plan, place: str, html: Path, profile: Path | None, curve: Path | None) -> None:
    try:
        from sparsekv.bench.report.page import report
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected the packages that --html needs, found no {error.name}; install them: {install_command('report')}"
        ) from error
    from sparsekv.bench.curve_file import read_curve
    from sparsekv.plans.files import write_bytes

    points = read_curve(curve) if curve else ()
    profiled = _profile_of(plan, profile) if profile else None
    write_bytes(html, report(plan, place, profiled, points).encode())


def _profile_of(plan: Plan, path: Path) -> Profile:
    """The profile, if it is one of the plan's model; another one of it than the plan was compiled from is said.

    Raises:
        PlanMismatchError: it is of another model.
    """
    from sparsekv.planner.data_files import check_model, digest_of, read_measured
    from sparsekv.planner.profile.profile_data import Profile

    found = read_measured(Profile, path)
    check_model(found, plan.model)
    if plan.provenance.profile not in (None, digest_of(found)):
        tell(
            f"{path}: another profile than the plan was compiled from, or more of it; patterns it lacks have no damage"
        )
    return found


app = commands.app(show)
