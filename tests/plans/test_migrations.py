"""The way old plan files would take. Version 1 is the first, so the migrations here are made up."""

from __future__ import annotations

from typing import Any

import pytest

from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import migrate


def rename(document: dict[str, Any]) -> dict[str, Any]:
    return {("new" if key == "old" else key): value for key, value in document.items()}


def double(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"new": document["new"] * 2}


STEPS = {1: rename, 2: double}


@pytest.mark.parametrize(
    ("document", "migrated"),
    [
        ({"schema_version": 1, "old": 4}, {"schema_version": 3, "new": 8}),
        ({"schema_version": 2, "new": 4}, {"schema_version": 3, "new": 8}),
        ({"schema_version": 3}, {"schema_version": 3}),
    ],
)
def test_a_file_takes_the_steps_from_its_own_version_on(document: dict[str, Any], migrated: dict[str, Any]) -> None:
    before = dict(document)
    assert migrate(document, 3, "a.yaml", STEPS) == migrated
    assert document == before


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"schema_version": 2, "old": 1}, "schema_version"),
        ({"schema_version": 4}, "expected schema_version 3 or older"),
    ],
)
def test_a_version_that_no_step_leads_from_and_a_newer_one_are_refused(document: dict[str, Any], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        migrate(document, 3, "a.yaml", {1: rename})
