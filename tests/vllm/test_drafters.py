"""Speculation by others beside a plan: prefill by the plan, and vLLM's own kernel verifies what was drafted."""

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import BUDGET, generate, make_engine, preemptions, tokens_of

from sparsekv.bench.hand_plans import kept_by_hand
from sparsekv.bench.random_model import write_eagle
from sparsekv.bench.serve import by_look_up
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import BlockSparse, fraction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.counters import reset_stats, serving_stats
from sparsekv.runtime.vllm.internals import layers_so_far

Prompts = dict[int, list[int]]
NGRAM = by_look_up(3)
NEW = 24  # tokens of an answer


def engine(reference: LoadedModel, options: dict[str, Any], **settings: Any) -> Any:
    folder = str(reference.model.name_or_path)
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM 0.32 looks through all modules, and fails at this one
    try:
        return make_engine(folder, additional_config={"sparsekv": options}, enable_prefix_caching=False, **settings)
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def accepted(llm: Any) -> int:
    """Tokens of drafts."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


@pytest.fixture(scope="module")
def repeated(prompts: Prompts) -> list[list[int]]:
    """Prompts of mixed lengths that repeat themselves, so that drafts are accepted."""
    return [(prompts[200] * 12)[:length] for length in (2300, 300, 1500, 90, 700)]


@pytest.fixture(scope="module")
def alone(reference: LoadedModel, plan_file: Path, kept_engines: list[Any]) -> Any:
    """The plan without a drafter, and without its decode."""
    kept_engines.append(engine(reference, {"plan": str(plan_file), "decode": False}))
    return kept_engines[-1]


@pytest.fixture(scope="module")
def eagle(reference: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter of one layer, which vLLM numbers behind the model's own."""
    return str(write_eagle(reference.model.config, tmp_path_factory.mktemp("eagle")))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "layers"), [("ngram", 0), ("draft_model", 12), ("eagle", 1)])
def test_answers_are_those_without_a_drafter_at_the_same_cuts(
    method: str, layers: int, reference: LoadedModel, plan_file: Path, alone: Any, eagle: str,
    repeated: list[list[int]], kept_engines: list[Any],
) -> None:  # fmt: skip
    """One at a time: drafts take rows of a step, so that prompts together would be cut elsewhere. The draft model is
    the model itself, each of whose layers has the name and the shape of one of the plan's."""
    models = {"draft_model": str(reference.model.name_or_path), "eagle": eagle}
    drafter = NGRAM if method == "ngram" else {"method": method, "model": models[method], "num_speculative_tokens": 3}
    step = BUDGET + (method == "draft_model")  # of which vLLM leaves one to each request's drafts
    beside = engine(reference, {"plan": str(plan_file)}, speculative_config=drafter, max_num_batched_tokens=step)
    kept_engines.append(beside)
    attending = [layer.impl for layer in layers_so_far(beside.llm_engine.vllm_config).values()]
    assert [getattr(impl, "plan_host", None) is None for impl in attending] == [False] * 12 + [True] * layers
    reset_stats(alone)
    for prompt in repeated:
        (expected,), (found,) = generate(alone, [prompt], NEW), generate(beside, [prompt], NEW)
        assert tokens_of(found) == tokens_of(expected)
    least = {"ngram": len(repeated), "draft_model": len(repeated) * NEW // 2, "eagle": -1}  # which is random
    assert accepted(beside) > least[method]
    stats, plain = serving_stats(beside), serving_stats(alone)
    assert stats.sparse_tokens == plain.sparse_tokens > 3000
    assert stats.tiles_computed == plain.tiles_computed
    assert (stats.decode_sparse, stats.failures) == (0, 0)


def test_requests_together_that_are_preempted_answer_as_dense(
    reference: LoadedModel, plan: Plan, tmp_path: Path, prompts: Prompts, kept_engines: list[Any]
) -> None:
    """A plan whose patterns cover everything computes what dense does, whatever is cut, drafted or computed again.
    Answers grow into a further page, of which there are too few."""
    write_plan(whole(plan), tmp_path / "plan.yaml")
    asked = [(prompts[200] * 4)[:length] for length in range(630, 638)]
    found = {}
    for name, options in (("plan", {"plan": str(tmp_path / "plan.yaml")}), ("dense", {"dense": True})):
        llm = engine(reference, options, speculative_config=NGRAM, num_gpu_blocks_override=26)
        kept_engines.append(llm)
        found[name] = [tokens_of(output) for output in generate(llm, asked, NEW)]
        assert preemptions(llm) > 0
        assert accepted(llm) > len(asked)
        if name == "plan":
            assert serving_stats(llm).sparse_tokens > 3000
    assert found["plan"] == found["dense"]


def whole(plan: Plan) -> Plan:
    """The plan with budgets that cover every prompt."""
    assert plan.prefill is not None
    everything = BlockSparse(keep=fraction(1.0))
    buckets = tuple(
        bucket.model_copy(
            update={"heads": tuple(group.model_copy(update={"pattern": everything}) for group in bucket.heads)}
        )
        for bucket in plan.prefill.lengths
    )
    return plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": buckets}), "decode": None})


def test_a_plan_that_evicts_tokens_is_refused_beside_a_drafter(
    reference: LoadedModel, plan: Plan, tmp_path: Path
) -> None:
    rules, _ = kept_by_hand(plan.model, 256, 64)
    write_plan(plan.model_copy(update={"decode": None, "kv_cache": rules}), tmp_path / "plan.yaml")
    with pytest.raises(UnsupportedError, match=r"speculative decoding \(ngram\), where layers 3-11"):
        engine(reference, {"plan": str(tmp_path / "plan.yaml")}, speculative_config=NGRAM)
