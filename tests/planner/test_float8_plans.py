"""`plan --kv-dtype fp8`: verified over keys and values in 8 bits, and recorded as such."""

from typing import Any

import pytest
from own_texts import text_of
from planner_models import quick_options

from sparsekv.planner import fixed_test
from sparsekv.planner.evaluation import predictions
from sparsekv.planner.job import job_of
from sparsekv.planner.options import GivenPrompt
from sparsekv.planner.plan import compile_plan
from sparsekv.runtime.hf.load import LoadedModel

PROMPTS = tuple(GivenPrompt(text_of(number, 1080)) for number in range(4))
OPTIONS = quick_options(loss=200.0, verify="small", prompts=PROMPTS, tasks=())


def test_a_plan_is_verified_over_them_and_says_so(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given, stored = predictions.apply, []

    def apply(*args: Any, **named: Any) -> Any:
        stored.append(named["kv_dtype"])
        return given(*args, **named)

    monkeypatch.setattr(predictions, "apply", apply)
    monkeypatch.setattr(fixed_test, "MEAN_NATS", 100.0)  # of random weights
    monkeypatch.setattr(fixed_test, "WORST_NATS", 100.0)
    found = compile_plan(job_of(loaded, OPTIONS.but(kv_dtype="fp8")))
    assert found.plan.targets[0].kv_dtype == found.plan.kv_dtype == "fp8"
    assert {*stored} == {"fp8"}
    assert found.plan.quality.lengths[0].floor > 0  # in float32 too, where kernels round to nothing
