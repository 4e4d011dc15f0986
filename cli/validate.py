"""`sparsekv validate`: is this a sound plan file?"""

from __future__ import annotations

from sparsekv.cli.arguments import Json, PlanArgument
from sparsekv.cli.output import FAILED, emit, emit_json


def validate(plan: PlanArgument, as_json: Json = False) -> None:
    """Check a plan file: schema, consistency, integrity. Needs no model and no GPU.

    Exit 0: it is sound. Exit 1: it is not. Exit 2: there is no such file, or it cannot be read.
    """
    from sparsekv.plans.errors import PlanError
    from sparsekv.plans.files import load_plan

    try:
        found = load_plan(plan)
    except PlanError as error:
        error.exit_code = FAILED  # elsewhere a file that is no plan is wrong usage; here it is what the check found
        error.with_facts(path=str(plan), valid=False)
        raise
    if as_json:
        facts = {"status": found.status, "schema_version": found.schema_version, "model": found.model.id}
        emit_json({"path": str(plan), "valid": True, **facts})
    else:
        emit(f"{plan}: valid, {found.status}, schema {found.schema_version}, for {found.model.id}")
