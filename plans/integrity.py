"""Signing plans, and signing again one that was edited by hand: as unverified, without what was measured before.

The signature itself stands in `signature`, which the reader needs too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sparsekv.plans.files import read_text
from sparsekv.plans.reader import parse_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.signature import check, digest, sign
from sparsekv.plans.writer import write_plan

__all__ = ["Sealed", "check", "digest", "seal", "sign"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """The plan as it is now in the file, and what became of it, a line each."""

    plan: Plan
    changed: bool
    notes: tuple[str, ...]


def seal(path: str | os.PathLike[str]) -> Sealed:
    """Signs the plan at `path`; one whose signature fits is left as it is.

    Raises:
        PlanError: it is no plan, or contradicts itself.
        UsageError: there is no such file, or it cannot be read or written.
    """
    plan = parse_plan(read_text(path), os.fspath(path), signed=False)
    if plan == sign(plan):
        return Sealed(plan, False, (f"the signature fits the content; left as it is, {plan.status}",))
    sealed = sign(plan.model_copy(update={"status": "unverified", "quality": None, "cost": None}))
    write_plan(sealed, path)
    dropped = [name for name in ("quality", "cost") if getattr(plan, name) is not None]
    notes = ["signed as unverified"]
    if dropped:
        notes.append(f"dropped {' and '.join(dropped)}: measured on other content; `sparsekv verify` measures again")
    return Sealed(sealed, True, tuple(notes))
