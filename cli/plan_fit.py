"""`sparsekv doctor MODEL`: which plans fit a model on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

from sparsekv.cli.arguments import found_source, plan_file, plans_place
from sparsekv.cli.output import FAILED, emit, emit_json, tell
from sparsekv.cli.plan_choice import Candidate, best_of, candidates, described, device_called, plans_in
from sparsekv.plans.aliases import PLAN_NAME, resolve_model
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan

_NEAR = (
    "of this device",
    "of this device by another host",
    "of no device",
    "of another device: may be slower than dense",
)


def say_fitting(model: str, place: Path | None, device: str, as_json: bool) -> None:
    """Prints the plan beside a model and those in a folder, each with why it fits or not, the best one marked.

    Raises:
        typer.Exit: none fits.
    """
    folder = place and plans_place(place)
    named = [] if folder is None else plans_in(folder) if folder.is_dir() else _one(plan_file(folder))
    plans = dict([*_own(model), *named])
    found = candidates(plans.items(), described(model), device_called(device))
    best = best_of(found)
    if as_json:
        emit_json({"model": model, "plans": [_facts(one, one is best) for one in found]})
    for one in found if not as_json else ():
        emit(_line(one, one is best))
    if all(one.why_not for one in found):
        tell(f"no plan fits {model}; make one: sparsekv plan {model} -o {PLAN_NAME}")
        raise typer.Exit(FAILED)


def _line(one: Candidate, is_best: bool) -> str:
    fits = f"does not fit, of another model: {one.why_not}" if one.why_not else f"fits, {_NEAR[one.near]}"
    return f"{one.told()}: {fits}{'; the best' if is_best else ''}"


def _facts(one: Candidate, is_best: bool) -> dict[str, object]:
    facts = {"path": str(one.path), "status": one.plan.status, "devices": list(one.devices)}
    lengths = list(one.plan.planned_lengths)
    return facts | {"lengths": lengths, "fits": not one.why_not, "why_not": one.why_not, "best": is_best}


def _own(model: str) -> list[tuple[Path, Plan]]:
    """The plan in a model's folder or repository."""
    source = found_source(resolve_model(model))
    try:
        return _one(plan_file(Path(source.place)))
    except UsageError:
        return []


def _one(path: Path) -> list[tuple[Path, Plan]]:
    try:
        return [(path, load_plan(path))]
    except PlanError as error:
        tell(f"left out: {error}")
        return []
