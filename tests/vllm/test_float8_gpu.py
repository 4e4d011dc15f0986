"""Engines over a cache in 8 bits on an NVIDIA GPU: a plan that leaves nothing out beside vLLM's own dense engine, and
captured steps beside those that are launched."""

from typing import Any

import pytest
from vllm_engine import NEW, gpu_engine, tokens_of
from vllm_steps import check_rows_that_choose, likely_answers

from sparsekv.plans.files import write_plan
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

pytestmark = pytest.mark.gpu
Prompts = dict[int, list[int]]


@pytest.fixture(scope="module")
def engines(
    reference: LoadedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory, kept_engines: list[Any]
) -> dict[str, Any]:
    """By the plan, and by one whose layers leave one token of 50 out, those that get least attention: a tenth
    would take the longest prompt its answer, in float32 as well."""
    budget = DecodeBudget(fraction=0.98, at_most=4096)
    most = (Segment(filter=1, layers=tuple(range(2, 12)), budget=budget, sink=2, recent=4),)
    nearly = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=most),))
    plans = {"sparse": plan, "nearly all": plan.model_copy(update={"prefill": None, "decode": nearly})}
    folder = tmp_path_factory.mktemp("plans")
    for name, one in plans.items():
        write_plan(one, folder / f"{name}.yaml")

    def engine(own: dict[str, Any], captured: bool) -> Any:
        model, settings = str(reference.model.name_or_path), {"kv_cache_dtype": "fp8", "num_gpu_blocks_override": 1024}
        return gpu_engine(model, own, captured, **settings)

    found = {"dense": engine({"dense": True}, captured=True)}
    for name in plans:
        for captured in (False, True):
            own = {"plan": str(folder / f"{name}.yaml"), "require": True}
            found[f"{name}, {'captured' if captured else 'eager'}"] = engine(own, captured)
    kept_engines.extend(found.values())
    return found


def check_alike(found: list[Any], expected: list[Any], unsure: float = 0.5) -> None:
    """The same tokens, up to one that is nearly as likely as another: a key in 8 bits goes to the next number, a
    sixteenth away, where bfloat16 rounds it otherwise in a batch of another size."""
    for one, other in zip(found, expected, strict=True):
        tokens, its = tokens_of(one), tokens_of(other)
        at = next((number for number, pair in enumerate(zip(tokens, its, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        likely = other.outputs[0].logprobs[at]
        assert tokens[at] in likely, (at, tokens, its)
        assert likely[its[at]].logprob - likely[tokens[at]].logprob < unsure, (at, tokens, its)
    assert any(tokens_of(one)[:5] == tokens_of(other)[:5] for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_decode_that_leaves_little_out_answers_as_vllms_own_kernel(
    engines: dict[str, Any], prompts: Prompts, how: str
) -> None:
    """Where the model is sure of its answer; vLLM's kernel rounds attention weights to 8 bits, ours does not."""
    asked = [prompts[length] for length in (700, 2000, 2700)]
    reset_stats(engines[f"nearly all, {how}"])
    check_alike(likely_answers(engines[f"nearly all, {how}"], asked), likely_answers(engines["dense"], asked))
    assert serving_stats(engines[f"nearly all, {how}"]).decode_sparse == 3 * (NEW - 1)


@pytest.mark.parametrize(
    ("kind", "unsure", "lengths"),
    [
        ("nearly all", 0.5, (2700,)),
        ("nearly all", 0.5, (700, 2000)),
        ("nearly all", 0.5, (200, 2000, 700, 2700)),
        ("sparse", 2.0, (2700,)),
        ("sparse", 2.0, (700, 2000)),
    ],
)
def test_a_captured_step_answers_as_one_that_is_launched(
    engines: dict[str, Any], prompts: Prompts, lengths: tuple[int, ...], kind: str, unsure: float
) -> None:
    """The sparse plan loses one of these answers, and with it what the model is sure of; of four at once one engine may
    lose what the other keeps: those are compared by which rows choose, and by what is likely before (next test)."""
    asked, pair = [prompts[length] for length in lengths], [engines[f"{kind}, {how}"] for how in ("captured", "eager")]
    for engine in pair:
        reset_stats(engine)
    found, expected = (likely_answers(engine, asked) for engine in pair)
    captured, launched = (serving_stats(engine) for engine in pair)
    assert (captured.decode_sparse, captured.failures) == (launched.decode_sparse, 0)
    assert captured.decode_sparse > 0
    check_alike(found, expected, unsure)
    if kind == "sparse":
        assert captured.prefill_density < 0.9


def test_rows_choose_beside_chunks_of_prompts_however_steps_are_run(engines: dict[str, Any], prompts: Prompts) -> None:
    pair = {how: engines[f"sparse, {how}"] for how in ("eager", "captured")}
    for engine in pair.values():
        reset_stats(engine)
    check_rows_that_choose({**pair, "dense": engines["dense"]}, prompts)
    assert [serving_stats(engine).failures for engine in pair.values()] == [0, 0]
