"""The published schema allows what the writer writes and refuses what it can see is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from plans_samples import small_plan
from plans_strategies import plans

from sparsekv.plans.files import dump_plan
from sparsekv.plans.schema import SCHEMA_FILE, Plan, json_schema

SCHEMA = json_schema()
VALIDATOR = pytest.importorskip(
    "jsonschema", reason="comes with the extra: pip install 'sparsekv[report]'"
).Draft202012Validator
GOLDEN = yaml.safe_load((Path(__file__).parent / "golden" / "v1.yaml").read_text())


def fits(data: Any) -> bool:
    return bool(VALIDATOR(SCHEMA).is_valid(data))


def test_the_golden_file_fits() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert fits(GOLDEN)


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans)
def test_any_written_plan_fits(plan: Plan) -> None:
    assert fits(yaml.safe_load(dump_plan(plan)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("surprise",), 1),
        (("status",), "perfect"),
        (("schema_version",), 2),
        (("model", "surprise"), 1),
        (("prefill", "lengths", 1, "heads", 0, "pattern"), "zigzag"),
        (("prefill", "lengths", 1, "heads", 0, "keep"), {"tokens": 1}),
        (("prefill", "lengths", 1, "heads", 0, "heads"), "all"),
        (("prefill", "lengths", 1, "heads", 0, "sink"), {"tokens": -1}),
        (("prefill", "lengths", 1, "heads", 0, "sink"), {"tokens": 1, "fraction": 0.1}),
        (("prefill", "lengths", 1, "heads", 0, "sink"), 128),
        (("prefill", "tile", "key"), 32),
        (("decode", "lengths", 1, "segments", 0, "selector"), "first"),
        (("decode", "lengths", 1, "segments", 0, "layers"), True),
        (("integrity",), "abc"),
    ],
)
def test_what_is_visibly_wrong_does_not_fit(path: tuple[str | int, ...], value: object) -> None:
    data = copy.deepcopy(GOLDEN)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert not fits(data)


@pytest.mark.parametrize("field", ["kind", "schema_version", "status", "model", "integrity"])
def test_what_every_file_has_is_required(field: str) -> None:
    assert not fits({key: value for key, value in GOLDEN.items() if key != field})


def test_the_schema_is_json_and_names_itself_as_files_do() -> None:
    assert json.loads(json.dumps(SCHEMA))["$id"] == SCHEMA_FILE
    assert f"$schema={SCHEMA_FILE}" in dump_plan(small_plan()).splitlines()[0]
    assert '"#/$defs/AShape"' not in json.dumps(SCHEMA)
