"""Captured decode steps of modes that are compared batch by batch, without a GPU."""

import numpy as np
import pytest
import torch
from emulated_graphs import emulate
from planner_models import loaded_tiny
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.planner.evaluation import PlanMode, opened
from sparsekv.planner.tasks import Sample
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.plans.types import KVDtype

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
PHASES = ("prefill", "decode", "both")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_steps_of_a_plan_and_of_its_floor_are_captured_once_for_all_batches(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: KVDtype
) -> None:
    """Dense decode behind a sparse prefill too."""
    emulate(monkeypatch)
    loaded = loaded_tiny(head_dim=16, layers=2, heads=2, kv_heads=1)
    model, dense = loaded.model, DecodePlan(lengths=(DecodeBucket(up_to=None, dense=True),))
    narrow, every = (AShape(sink=tokens(sink), window=tokens(window)) for sink, window in ((8, 8), (1, 64)))
    plans = {
        "plan": plan_for(model, every_head(model, narrow), decode_plan(segment(0, (1,), 8))),
        "floor": plan_for(model, every_head(model, every), dense),
    }
    modes = {
        f"{phase} {name}": PlanMode(plan, phase, "triton", kv_dtype=kv_dtype)
        for name, plan in plans.items()
        for phase in PHASES
    }
    rng = np.random.default_rng(0)
    ids = [(rng.integers(1, 90, 30, np.int32), rng.integers(1, 90, 2, np.int32)) for _ in range(2)]
    samples = [Sample(*both, "", "own", 32) for both in ids]
    with opened(loaded, modes, batch=1) as evaluator:
        captures = []
        for sample in samples:
            dense = evaluator.dense([sample])
            for name in modes:
                evaluator.beside(dense, name)
            captures.append({name: mode.handle.steps.captures for name, mode in evaluator.modes.items()})
    assert captures[0] == captures[1] == dict.fromkeys(modes, 1)
