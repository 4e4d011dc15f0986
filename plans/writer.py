"""Plan files written: the same plan always gives the same bytes, and a file is replaced whole or not at all."""

from __future__ import annotations

import os

from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import MAX_BYTES, write_text
from sparsekv.plans.schema import Plan, to_data
from sparsekv.plans.signature import sign
from sparsekv.plans.yaml_text import to_yaml

SCHEMA_FILE = "sparsekv-plan-v1.schema.json"
"""What editors look for beside a plan; `sparsekv schema` prints it."""


def dump_plan(plan: Plan) -> str:
    """The text of a plan's file, signed.

    Raises:
        PlanError: it is longer than a reader accepts.
    """
    text = f"# yaml-language-server: $schema={SCHEMA_FILE}\n{to_yaml(to_data(sign(plan)))}"
    size = len(text.encode())
    if size > MAX_BYTES:
        raise PlanError(f"expected a plan of at most {MAX_BYTES:,} bytes, found {size:,}; plan fewer lengths")
    return text


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan, signed, in one step: on any failure the file there before stays as it was.

    Raises:
        PlanError: the plan is too large for a file.
        UsageError: the file cannot be written.
    """
    write_text(path, dump_plan(plan))
