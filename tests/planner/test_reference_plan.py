"""The shipped model, planned at a short length: the plan keeps its answers."""

from collections.abc import Iterator

import numpy as np
import pytest
from compared import compare
from planner_models import TILE, bare_job, made_up_prices
from torch_state import torch_threads

from sparsekv.planner.evaluation import EvalSamples, PlanMode
from sparsekv.planner.evaluation.results import Comparison
from sparsekv.planner.fixed_test import MEAN_NATS
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.plan import compile_once
from sparsekv.planner.prices import HeadShape
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.tasks import Split, prepare
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import fraction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel, load_model

LENGTH = 1024
TASKS = ("niah_multikey",)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    try:
        return load_model("tiny-retriever", device="cpu")
    except UsageError as error:
        pytest.skip(f"the reference model is not there: {error}")


@pytest.fixture(scope="module")
def plan(reference: LoadedModel) -> Plan:
    options = settle(
        PlanOptions(
            lengths=(LENGTH,),
            target_density=(0.6,),
            tile=TILE,
            levels=(1.0,),
            calibration_samples=1,
            tasks=("niah_multikey",),
            filter_layers=(0, 7),
            decode_budget=fraction(0.2),
        ),
        reference.info.context_length,
        "cpu",
    )
    cost = made_up_prices(shape=HeadShape(heads=4, kv_heads=2, head_dim=64))
    return compile_once(reference.info, options, profile(bare_job(reference, options)), cost)


@pytest.fixture(scope="module")
def results(reference: LoadedModel, plan: Plan) -> dict[str, Comparison]:
    modes = {phase: PlanMode(plan, phase) for phase in ("prefill", "decode")}
    kit = prepare(reference.tokenizer, Split.EVALUATION)
    return compare(reference, modes, EvalSamples(TASKS, (LENGTH,), 5).drawn(kit, LENGTH))


def test_the_plan_of_the_reference_model_stays_near_dense(results: dict[str, Comparison]) -> None:
    assert np.mean([outcome.correct for outcome in results["dense"].outcomes]) > 0.5
    assert np.mean(results["prefill"].kl) < MEAN_NATS
    assert np.mean(results["decode"].kl) < MEAN_NATS


def test_both_phases_of_the_plan_are_sparse(results: dict[str, Comparison]) -> None:
    assert results["prefill"].spent.density <= 0.61
    assert results["decode"].spent.read < 0.8
