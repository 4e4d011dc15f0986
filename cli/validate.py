"""`sparsekv validate`: are these sound plan files?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli import commands
from sparsekv.cli.arguments import PLACE, Json, plan_file
from sparsekv.cli.output import FAILED, emit, emit_json
from sparsekv.plans.errors import PlanError, SparseKVError, UsageError

Plans = Annotated[list[Path], typer.Argument(metavar="PLAN", help=PLACE, show_default=False)]


def validate(plans: Plans, as_json: Json = False) -> None:
    """Check plan files: schema, consistency, integrity. Needs no model and no GPU.

    Exit 0: all are sound. Exit 1: one is not. Exit 2: there is no such file, or it cannot be read.
    """
    checked = [_check(path) for path in plans]
    files = [facts for facts, _ in checked]
    errors = [error for _, error in checked if error is not None]
    for facts in files if not as_json else ():
        if facts["valid"]:
            emit("{path}: valid, {status}, schema {schema_version}, for {model}".format(**facts))
    told = files[0] if len(files) == 1 else {"valid": not errors, "files": files}
    if errors:
        raise _together(errors).with_facts(**told)
    if as_json:
        emit_json(told)


def _check(path: Path) -> tuple[dict[str, Any], PlanError | UsageError | None]:
    from sparsekv.plans.files import load_plan

    try:
        plan = load_plan(plan_file(path))
    except (PlanError, UsageError) as error:
        return {"path": str(path), "valid": False}, error
    facts = {"status": plan.status, "schema_version": plan.schema_version, "model": plan.model.id}
    return {"path": str(path), "valid": True, **facts}, None


def _together(errors: Sequence[PlanError | UsageError]) -> SparseKVError:
    """One error that says all. A file that is no plan is wrong usage elsewhere; here it is what the check found."""
    unsound = next((error for error in errors if isinstance(error, PlanError)), None)
    said = "\n".join(str(error) for error in errors)
    if unsound is None:
        return UsageError(said)
    found = PlanError(said)
    found.exit_code = FAILED
    return found


app = commands.app(validate)
