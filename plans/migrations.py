"""Older plan files brought to the current schema, one version at a time, by pure functions on plain data.

Version 1 is the first, so there is nothing to migrate yet. A migration from version n takes the data of a version n
file and returns that of a version n + 1 file; it comes with a golden file of version n that still loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparsekv.plans.errors import PlanError

Document = dict[str, Any]
Migration = Callable[[Document], Document]

MIGRATIONS: Mapping[int, Migration] = {}


def migrate(document: Document, target: int, source: str, registry: Mapping[int, Migration] = MIGRATIONS) -> Document:
    """`document` as schema version `target`.

    Raises:
        PlanError: its version is newer, unknown, or no version at all.
    """
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        found = "none" if version is None else repr(version)[:40]
        raise PlanError(f"{source}: expected `schema_version`, a whole number from 1 to {target}, found {found}")
    if version > target:
        raise PlanError(
            f"{source}: expected schema_version {target} or older, which this sparsekv reads, found {version}; "
            "install a newer sparsekv, or plan the model again with this one"
        )
    for step in range(version, target):
        if step not in registry:
            raise PlanError(f"{source}: schema_version {step} can no longer be read; plan the model again")
        document = registry[step](document) | {"schema_version": step + 1}
    return document
