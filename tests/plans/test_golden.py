"""The file of schema version 1, byte for byte. It changes only together with the schema version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plans_samples import full_plan, sharing_plan
from pydantic import BaseModel

from sparsekv.plans.brief import sentence
from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import dump_plan, load_plan, parse_plan, with_digest
from sparsekv.plans.schema import Plan

GOLDEN = Path(__file__).parent / "golden" / "v1.yaml"


SHARING = GOLDEN.with_name("v1_index_sharing.yaml")


@pytest.mark.parametrize(("golden", "plan"), [(GOLDEN, full_plan()), (SHARING, sharing_plan())])
def test_the_golden_bytes_are_still_written_and_read(golden: Path, plan: Plan) -> None:
    assert dump_plan(plan) == golden.read_text()
    assert load_plan(golden) == with_digest(plan)


def test_a_plan_of_the_test_before_keeps_its_status_and_cut() -> None:
    plan = load_plan(GOLDEN.with_name("v1_betting.yaml"))
    assert plan.status == "verified"
    assert (plan.quality.test, plan.quality.step, plan.quality.cells) == ("betting", None, ())
    assert sentence(plan).startswith("verified (betting, the test of an earlier version); samples were chosen")


def _unused(part: BaseModel, used: dict[type, set[str]]) -> None:
    names = used.setdefault(type(part), set())
    for name in type(part).model_fields:
        value = getattr(part, name)
        if value not in (None, (), {}, False):
            names.add(name)
        for inner in _parts(value):
            _unused(inner, used)


def _parts(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parts(item)


def test_the_golden_file_uses_every_field() -> None:
    used: dict[type, set[str]] = {}
    _unused(with_digest(full_plan()), used)
    _unused(sharing_plan(), used)
    assert Plan in used
    assert len(used) >= 25
    for part, names in used.items():
        assert issubclass(part, BaseModel)
        assert names == set(part.model_fields), part.__name__


@pytest.mark.parametrize("line", range(1, len(GOLDEN.read_text().splitlines())))
def test_no_value_of_the_golden_file_is_free_of_the_digest(line: int) -> None:
    lines = GOLDEN.read_text().splitlines()
    del lines[line]
    with pytest.raises(PlanError):
        parse_plan("\n".join(lines), "golden")


def test_a_sealed_plan_with_the_step_under_its_name_before_is_read() -> None:
    assert load_plan(GOLDEN.with_name("v1_chunk.yaml")).quality == full_plan().quality


def test_a_step_under_both_names_is_refused() -> None:
    text = dump_plan(full_plan()).replace("\n  step: 4096", "\n  chunk: 2048\n  step: 4096")
    with pytest.raises(PlanError, match="chunk"):
        parse_plan(text, sealed=False)
