"""`sparsekv seal`: sign a plan that was edited by hand."""

from __future__ import annotations

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json, PlanArgument
from sparsekv.cli.output import emit, emit_json


def seal(plan: PlanArgument, as_json: Json = False) -> None:
    """Sign an edited plan again. It becomes `unverified`: nobody has measured what it says now."""
    from sparsekv.plans.files import seal as sign_again

    sealed = sign_again(plan)
    if as_json:
        facts = {"status": sealed.plan.status, "integrity": sealed.plan.integrity, "changed": sealed.changed}
        emit_json({"path": str(plan), **facts, "notes": list(sealed.notes)})
    else:
        emit(f"{plan}: " + "; ".join(sealed.notes))


app = commands.app(seal)
