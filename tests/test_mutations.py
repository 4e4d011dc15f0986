"""Plans that were changed anywhere: used whole, or refused by an error of ours.

`pytest -m fuzz` is the long run; FUZZ_COUNT is how many plans it makes, FUZZ_FIRST their first number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from typing import Any

import pytest
from mutations import Mutations, survey
from plans_samples import full_plan, model_info, small_plan
from rich.console import Console

from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.files import dump_plan, parse_plan, plan_of, with_digest
from sparsekv.plans.schema import check_model, to_data, unsupported
from sparsekv.plans.show import describe
from sparsekv.plans.yaml_io import Tree
from sparsekv.runtime.core.program import Program, Rank


def runnable_plan() -> dict[str, Any]:
    """The full plan without what this version only reads."""
    data = to_data(full_plan())
    del data["model"]["attention"][3], data["kv_cache"]
    data["targets"][0]["tensor_parallel"] = 1
    return data


PLANS = Mutations(
    to_data(with_digest(full_plan())), to_data(with_digest(small_plan())), runnable_plan(), runnable_plan()
)


def use_plan(data: Any) -> None:
    """Everything that needs no GPU; the slower the thing is, the rarer."""
    draw = random.Random(json.dumps(data))
    plan = plan_of(Tree(data, {}, "a.yaml"), sealed=False)
    with contextlib.suppress(PlanMismatchError):
        check_model(plan, model_info(layers=draw.choice((6, 12)), heads=2), allow_mismatch=draw.random() < 0.8)
    if not unsupported(plan):
        Program.of(plan.prefill, plan.decode, plan.model, Rank(1, 2) if draw.random() < 0.5 else None)
    if draw.random() < 0.05:
        console = Console(file=io.StringIO(), width=110)
        for part in describe(plan, full=draw.random() < 0.5):
            console.print(part)
    if draw.random() < 0.05:
        assert parse_plan(dump_plan(plan)) == with_digest(plan)


def check(first: int, count: int) -> None:
    ends, faults = survey(PLANS, use_plan, range(first, first + count))
    print(dict(ends))
    assert not faults, faults
    assert ends["passed"] > count // 50


def test_changed_plans_are_used_or_refused() -> None:
    check(0, 500)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_many_changed_plans_are_used_or_refused() -> None:
    check(int(os.environ.get("FUZZ_FIRST", "10000")), int(os.environ.get("FUZZ_COUNT", "20000")))
