"""The signature of a plan: sha256 over the canonical JSON of everything else in the file.

It keeps a plan that was changed by hand from passing for what was measured. It is no protection against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sparsekv.plans.errors import PlanError
from sparsekv.plans.schema import Plan, to_data

FIELD = "integrity"


def digest(data: Mapping[str, Any]) -> str:
    """The digest of a document's data, whatever its layout, order and comments; its own `integrity` is left out."""
    rest = {key: value for key, value in data.items() if key != FIELD}
    return "sha256:" + hashlib.sha256(canonical_json(rest)).hexdigest()


def canonical_json(data: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: it holds NaN or an infinity.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sign(plan: Plan) -> Plan:
    """`plan` with the digest of its content."""
    return plan.model_copy(update={FIELD: digest(to_data(plan))})


def check(data: Mapping[str, Any], source: str) -> None:
    """Passes when the data is what was signed.

    Raises:
        PlanError: it was changed since, or never signed.
    """
    signed = data.get(FIELD)
    if signed == digest(data):
        return
    found = "none" if signed is None else "that of another content: the file was changed after it was written"
    raise PlanError(
        f"{source}: expected an integrity digest that fits the content, found {found}. If the change is meant, "
        f"`sparsekv seal {source}` signs the file again, as unverified; otherwise restore it or plan again."
    )
