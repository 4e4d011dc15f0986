"""Plans, profiles and records of profiling that were changed anywhere: used whole, or refused by an error of ours.

`pytest -m fuzz` is the long run; FUZZ_COUNT is how many documents of each kind it makes, FUZZ_FIRST their first number.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import Mutations, survey
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse
from plans_samples import full_plan, model_info, small_plan
from rich.console import Console

from sparsekv.planner.job import job_of_profile
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.files import dump_plan, parse_plan, plan_of, with_digest
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.schema import check_model, to_data, unsupported
from sparsekv.plans.show import describe, summary
from sparsekv.plans.yaml_io import Tree, to_yaml
from sparsekv.runtime.core.program import Program, Rank

PATH = Path("measured")

# --- plans ------------------------------------------------------------------------------------------------------------


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
        json.dumps(summary(plan), allow_nan=False)
        console = Console(file=io.StringIO(), width=110)
        for part in describe(plan, full=draw.random() < 0.5):
            console.print(part)
    if draw.random() < 0.05:
        assert parse_plan(dump_plan(plan)) == with_digest(plan)


def use_plan_text(data: Any) -> None:
    """The same from text: what the reader says about lines, what the data looks like as YAML."""
    plan = parse_plan(to_yaml(data) if _is_yaml(data) else json.dumps(data), "a.yaml", sealed=False)
    assert parse_plan(dump_plan(plan)) == with_digest(plan)


def _is_yaml(data: Any) -> bool:
    try:
        return bool(json.dumps(data, allow_nan=False))
    except ValueError:
        return False


# --- profiles ---------------------------------------------------------------------------------------------------------


def _profile(seed: int, **fields: Any) -> Profile:
    draw = np.random.default_rng(seed)
    made = made_up_model()
    sliding = made.attention[0].model_copy(update={"layers": (1,), "kind": "sliding", "window": 512})
    full = made.attention[0].model_copy(update={"layers": (0, 2)})
    model = made.model_copy(update={"attention": (full, sliding)}) if seed % 2 else made
    kept = made_up_reuse(draw.uniform(0.5, 1.0, (3, 3)))
    lengths = [made_up_length(length, draw, drift=0.05, turned=seed % 2 == 1) for length in (1024, 4096)]
    if seed % 2:
        lengths = [one.model_copy(update={"layers": (one.layers[0], one.layers[2])}) for one in lengths]
    lengths = [one.model_copy(update={"reuse": kept}) for one in lengths]
    return made_up_profile(*lengths, model=model).model_copy(update=fields)


WANTED = tuple(
    PlanOptions(**({"verify": "none"} | given))
    for given in (
        {"target_density": (0.3,), "filter_layers": (0,)},
        {"target_density": (0.4,)},
        {"target_density": (0.3,), "filter_layers": (0,), "decode_budget": tokens(100)},
        {"loss": 0.5, "decode_budget": fraction(0.2)},
        {"target_density": (0.25,), "offload": True, "filter_layers": (0,)},
        {"target_density": (0.3,), "families": ("a_shape", "vertical_slash"), "phases": ("prefill",)},
        {"phases": ("decode",), "filter_layers": (0,), "lengths": (4096,)},
        {},
    )
)


def recompile(profile: Profile, wanted: PlanOptions) -> None:
    """Compiles a plan from a profile alone, as `sparsekv plan --profile FILE --no-verify`."""
    plan = compile_plan(job_of_profile("made/up", wanted, profile)).plan
    assert parse_plan(dump_plan(plan)) == with_digest(plan)


# --- tests ------------------------------------------------------------------------------------------------------------

KINDS = {
    "plan": (PLANS, use_plan, 500),
    "plan text": (PLANS, use_plan_text, 50),
}


def check(kind: str, first: int, count: int) -> None:
    documents, work, _ = KINDS[kind]
    ends, faults = survey(documents, work, range(first, first + count))
    print(kind, dict(ends))
    assert not faults, faults
    assert ends["passed"] > count // 50


@pytest.mark.parametrize("kind", KINDS)
def test_changed_documents_are_used_or_refused(kind: str) -> None:
    check(kind, 0, KINDS[kind][2])


@pytest.mark.fuzz
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_documents_are_used_or_refused(kind: str) -> None:
    check(kind, int(os.environ.get("FUZZ_FIRST", "10000")), int(os.environ.get("FUZZ_COUNT", "20000")))
