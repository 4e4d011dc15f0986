"""What is valid but cannot be executed yet is named, each thing by its field."""

from __future__ import annotations

from plans_samples import full_plan, small_plan

from sparsekv.plans.phases import Retention
from sparsekv.plans.schema import Plan, to_data, unsupported


def test_a_plan_that_runs_names_nothing() -> None:
    assert unsupported(small_plan()) == []
    assert unsupported(small_plan(kv_cache=(Retention(layers=tuple(range(12)), keep="all"),))) == []


def test_what_cannot_run_is_named() -> None:
    assert [line.partition(" ranks")[0] for line in unsupported(full_plan())] == ["targets[0].tensor_parallel: 2"]


def test_what_is_gone_is_not_named() -> None:
    data = to_data(full_plan())
    del data["kv_cache"], data["targets"], data["decode"]
    assert [line.partition(":")[0] for line in unsupported(Plan.model_validate(data))] == []
