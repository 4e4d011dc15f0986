"""Several engines of one process, each with a plan of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm_engine import CROSSOVER, NEW, TILE, Oracle, make_engine
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
def other_file(other_plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "plan.yaml"
    write_plan(other_plan, path)
    return path


@pytest.fixture(scope="module")
def other(reference: LoadedModel, other_file: Path, kept_engines: list[Any]) -> Any:
    engine = make_engine(
        str(reference.model.name_or_path),
        additional_config={"sparsekv": {"plan": str(other_file)}},
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


STARTED_AGAIN = """
import gc, json, sys
sys.path.insert(0, {support!r})
from vllm_engine import generate, make_engine, tokens_and_logprobs
from sparsekv.runtime.vllm.engine_host import serving_stats
found = []
for plan in {plans}:
    engine = make_engine({model!r}, additional_config={{"sparsekv": {{"plan": plan}}}})
    (output,) = generate(engine, [{prompt}])
    stats = serving_stats(engine)
    found.append([*tokens_and_logprobs(output), stats.prefill_density, stats.sparse_tokens])
    engine.llm_engine.engine_core.shutdown()
    del engine, output
    gc.collect()
print(json.dumps(found))
"""


def test_an_engine_that_starts_after_another_was_shut_down_has_nothing_of_its_plan(
    reference: LoadedModel, plan_file: Path, other_file: Path, sparse: Oracle, other_plan: Plan, prompts: Prompts
) -> None:
    """In a process of its own: vLLM ends what other engines need."""
    prompt, files = prompts[1100], [str(plan_file), str(other_file)]
    model, support = str(reference.model.name_or_path), str(Path(__file__).parents[1] / "support")
    script = STARTED_AGAIN.format(support=support, plans=files, model=model, prompt=prompt)
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    cuts = [512, 1024]
    expected = [oracle(prompt, cuts) for oracle in (sparse, Oracle(sparse.model, other_plan))]
    for (new, logprobs, density, _), answer in zip(found, expected, strict=True):
        assert len(new) == NEW
        assert new == answer.tokens
        assert logprobs == pytest.approx(answer.logprobs, abs=1e-3)
        assert density == pytest.approx(answer.density, rel=1e-3)
    # By the other plan one whole chunk is sparse: the last one is smaller than its tile.
    assert [sparse_tokens for *_, sparse_tokens in found] == [1100, 512]
