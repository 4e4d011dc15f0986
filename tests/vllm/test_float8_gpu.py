"""Engines over a cache in 8 bits on an NVIDIA GPU: a plan that leaves nothing out beside vLLM's own dense engine, and
captured steps beside those that are launched."""

from typing import Any

import pytest
from vllm_engine import DECODE_BOUND, NEW, make_engine, tokens_of
from vllm_steps import SPARSE_FROM_DENSE, apart, recorded_choices

from sparsekv.bench.vllm_engines import asking_for_ours
from sparsekv.plans.files import write_plan
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

pytestmark = pytest.mark.gpu
Prompts = dict[int, list[int]]
CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without compilation, which these tests turn off


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
        graphs = {"enforce_eager": False, "compilation_config": CAPTURED} if captured else {}
        return make_engine(
            str(reference.model.name_or_path), dtype="bfloat16", kv_cache_dtype="fp8",
            additional_config={"sparsekv": own}, num_gpu_blocks_override=1024, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=2 << 30,
            disable_log_stats=True, **asking_for_ours(), **graphs,
        )  # fmt: skip

    found = {"dense": engine({"dense": True}, captured=True)}
    for name in plans:
        for captured in (False, True):
            own = {"plan": str(folder / f"{name}.yaml"), "require": True}
            found[f"{name}, {'captured' if captured else 'eager'}"] = engine(own, captured)
    kept_engines.extend(found.values())
    return found


def answers(engine: Any, asked: list[list[int]]) -> list[Any]:
    """What the engine says, with the likeliest tokens beside each."""
    from vllm import SamplingParams

    assert engine.reset_prefix_cache()
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=5)
    return list(engine.generate([{"prompt_token_ids": one} for one in asked], greedy, use_tqdm=False))


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
    check_alike(answers(engines[f"nearly all, {how}"], asked), answers(engines["dense"], asked))
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
    found, expected = (answers(engine, asked) for engine in pair)
    captured, launched = (serving_stats(engine) for engine in pair)
    assert (captured.decode_sparse, captured.failures) == (launched.decode_sparse, 0)
    assert captured.decode_sparse > 0
    check_alike(found, expected, unsure)
    if kind == "sparse":
        assert captured.prefill_density < 0.9


def test_rows_choose_beside_chunks_of_prompts_however_steps_are_run(engines: dict[str, Any], prompts: Prompts) -> None:
    """Nearly all steps that decode for the prompt of 2,000 tokens hold chunks of others. Which tokens an answer ends in
    is decided by rounding, so what is compared comes before: the rows that choose on the device, and how sure the model
    is of the tokens that all engines give."""
    lengths = (200, 2000, 700, 2700)
    asked = [prompts[length] for length in lengths]
    expected = [length + new for length in lengths if length > DECODE_BOUND for new in range(1, NEW)]
    dense = answers(engines["dense"], asked)[1]
    found, launched = {}, {}
    for how in ("eager", "captured"):
        reset_stats(engines[f"sparse, {how}"])
        with recorded_choices() as steps:
            found[how] = answers(engines[f"sparse, {how}"], asked)[1]
        assert sorted(steps.chosen) == [(layer, length) for layer in (1, 6) for length in expected], how
        assert serving_stats(engines[f"sparse, {how}"]).failures == 0, how
        launched[how] = steps.mixed
    assert launched["eager"] == launched["captured"] > 0
    from_dense = {how: apart(one, dense) for how, one in found.items()}
    assert min(from_dense.values()) > SPARSE_FROM_DENSE, from_dense
    assert apart(found["eager"], found["captured"]) < SPARSE_FROM_DENSE
