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


def test_steps_are_taken_one_version_at_a_time() -> None:
    document = {"schema_version": 1, "old": 4}
    found = migrate(document, 3, "a.yaml", {1: rename, 2: double})
    assert found == {"schema_version": 3, "new": 8}
    assert document == {"schema_version": 1, "old": 4}


def test_a_file_enters_at_its_own_version() -> None:
    assert migrate({"schema_version": 2, "new": 4}, 3, "a.yaml", {1: rename, 2: double})["new"] == 8


def test_a_current_file_is_left_alone() -> None:
    document = {"schema_version": 3}
    assert migrate(document, 3, "a.yaml", {}) is document


def test_a_version_that_no_step_leads_from_is_refused() -> None:
    with pytest.raises(PlanError, match="schema_version"):
        migrate({"schema_version": 1, "old": 1}, 3, "a.yaml", {1: rename})


def test_a_newer_file_is_refused() -> None:
    with pytest.raises(PlanError, match="expected schema_version 3 or older"):
        migrate({"schema_version": 4}, 3, "a.yaml", {})
