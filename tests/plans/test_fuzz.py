"""Anything may come in as a plan file: what comes out is a plan or a PlanError."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans_samples import full_plan
from plans_strategies import damaged_texts, json_objects, plans

from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import dump_plan, parse_plan, with_digest
from sparsekv.plans.schema import Plan
from sparsekv.plans.show import describe
from sparsekv.plans.types import parse_ids
from sparsekv.plans.yaml_io import read_tree, to_yaml

TEXT = dump_plan(full_plan())


def examples(count: int) -> settings:
    """The same `count` examples every time, so that a test that passed does not fail tomorrow."""
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def plan_or_error(text: str | bytes, sealed: bool = False) -> Plan | PlanError:
    found: Plan | PlanError
    try:
        found = parse_plan(text, "a.yaml", sealed=sealed)
    except PlanError as error:
        found = error
    if isinstance(found, PlanError):
        assert str(found).startswith("a.yaml")
        assert len(str(found)) < 3000
    return found


@examples(150)
@given(damaged_texts(TEXT))
def test_a_damaged_file_never_passes_for_another_plan(text: str) -> None:
    found = plan_or_error(text, sealed=True)
    assert isinstance(found, PlanError) or found == with_digest(full_plan())


@examples(40)
@given(plans)
def test_any_plan_reads_back(plan: Plan) -> None:
    text = dump_plan(plan)
    assert parse_plan(text) == with_digest(plan)
    assert dump_plan(parse_plan(text)) == text


@examples(20)
@given(plans)
def test_any_plan_can_be_shown(plan: Plan) -> None:
    assert describe(plan)


@examples(50)
@given(json_objects.filter(bool))
def test_written_data_reads_alike_everywhere(data: dict[str, Any]) -> None:
    text = to_yaml(data)
    assert yaml.safe_load(text) == data
    assert read_tree(text, "a").data == data


@examples(150)
@given(st.text(max_size=40) | st.text("0123456789-, ", max_size=30))
def test_sets_of_ids_are_read_or_refused(text: str) -> None:
    try:
        found = parse_ids(text)
    except ValueError:
        return
    assert list(found) == sorted(set(found))
