"""Several engines of one process, each with a plan of its own."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm_engine import CROSSOVER, TILE, Oracle, make_engine
from vllm_replay import assert_replayed, recorded

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats

Prompts = dict[int, list[int]]


@pytest.fixture(scope="module")
def other_plan(plan: Plan) -> Plan:
    """Other patterns, another tile, and sparse from another length on."""
    pattern = AShape(sink=tokens(2 * TILE), window=tokens(2 * TILE))
    heads = tuple(HeadGroup(layer=layer, heads=tuple(range(4)), pattern=pattern) for layer in range(plan.model.layers))
    prefill = PrefillPlan(
        tile=TileShape(query=2 * TILE, key=TILE),
        lengths=(PrefillBucket(up_to=2 * CROSSOVER, dense=True), PrefillBucket(up_to=None, heads=heads)),
    )
    return plan.model_copy(update={"prefill": prefill, "decode": None})


@pytest.fixture(scope="module")
def other(
    reference: LoadedModel, other_plan: Plan, tmp_path_factory: pytest.TempPathFactory, kept_engines: list[Any]
) -> Any:
    write_plan(other_plan, path := tmp_path_factory.mktemp("other") / "plan.yaml")
    engine = make_engine(
        str(reference.model.name_or_path),
        additional_config={"sparsekv": {"plan": str(path)}},
        disable_log_stats=True,
    )
    kept_engines.append(engine)
    return engine


def test_two_engines_that_take_turns_run_each_its_own_plan_and_count_each_their_own_prompts(
    engine: Any, other: Any, sparse: Oracle, other_plan: Plan, prompts: Prompts
) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with recorded(engine) as first, recorded(other) as second:
        for number, length in enumerate((700, 1100)):
            for one in (engine, other):
                one.llm_engine.add_request(str(number), {"prompt_token_ids": prompts[length]}, asked)
        while engine.llm_engine.has_unfinished_requests() or other.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
            other.llm_engine.step()
    assert_replayed(sparse, first)
    assert_replayed(Oracle(sparse.model, other_plan), second)
    ours, theirs = serving_stats(engine), serving_stats(other)
    assert ours.sparse_tokens + ours.dense_tokens == theirs.sparse_tokens + theirs.dense_tokens == 1800
    assert ours.sparse_tokens > theirs.sparse_tokens > 0
    assert ours.prefill_density != theirs.prefill_density
