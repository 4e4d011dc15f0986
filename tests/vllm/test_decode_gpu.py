"""Decode by a plan in captured graphs of vLLM, beside the same plan launched step by step. Needs an NVIDIA GPU."""

from typing import Any

import pytest
from vllm_engine import DECODE_BOUND, NEW, make_engine, tokens_of
from vllm_steps import SPARSE_FROM_DENSE, apart, recorded_choices

from sparsekv.bench.vllm_engines import asking_for_ours
from sparsekv.plans.files import write_plan
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
    """Prefill is dense in all of them: its chunks would depend on their steps."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    write_plan(plan.model_copy(update={"prefill": None}), path)

    def engine(decode: bool, **settings: Any) -> Any:
        config = {"sparsekv": {"plan": str(path), "decode": decode}}
        return make_engine(
            str(reference.model.name_or_path), dtype="bfloat16", additional_config=config,
            num_gpu_blocks_override=1024, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=2 << 30, disable_log_stats=True,
            **asking_for_ours(), **settings,
        )  # fmt: skip

    found = {
        "eager": engine(True),
        "captured": engine(True, enforce_eager=False, compilation_config=CAPTURED),
        "dense": engine(False, enforce_eager=False, compilation_config=CAPTURED),
    }
    kept_engines.extend(found.values())
    return found


def answers(engine: Any, asked: list[list[int]], new: int = NEW) -> list[tuple[list[int], float]]:
    """Tokens and the sum of their log-probabilities."""
    from vllm import SamplingParams

    reset_stats(engine)
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": one} for one in asked], greedy, use_tqdm=False)
    return [(tokens_of(output), output.outputs[0].cumulative_logprob) for output in outputs]


@pytest.mark.parametrize("lengths", [(2700,), (200, 700, 1500), (200, 2000, 700, 2700, 1100)])
def test_a_captured_step_answers_as_one_that_is_launched(
    engines: dict[str, Any], prompts: Prompts, lengths: tuple[int, ...]
) -> None:
    """Batches of 1, 3 and 5 rows, which graphs of 1, 4 and 8 serve."""
    asked = [prompts[length] for length in lengths]
    launched, captured = answers(engines["eager"], asked), answers(engines["captured"], asked)
    assert [tokens for tokens, _ in captured] == [tokens for tokens, _ in launched]
    assert [total for _, total in captured] == pytest.approx([total for _, total in launched], abs=0.1)
    chosen = sum(length > DECODE_BOUND for length in lengths) * (NEW - 1)
    assert serving_stats(engines["captured"]).decode_sparse == chosen


def test_rows_choose_beside_chunks_of_prompts_however_steps_are_run(engines: dict[str, Any], prompts: Prompts) -> None:
    """Nearly all steps that decode for the prompt of 2,000 tokens hold chunks of others."""
    from vllm import SamplingParams

    lengths = (200, 2000, 700, 2700)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=5)
    expected = [length + new for length in lengths if length > DECODE_BOUND for new in range(1, NEW)]
    found, launched = {}, {}
    for name, engine in engines.items():
        assert engine.reset_prefix_cache()
        with recorded_choices() as steps:
            asked = [{"prompt_token_ids": prompts[length]} for length in lengths]
            found[name] = engine.generate(asked, greedy, use_tqdm=False)[1]
        chose = [] if name == "dense" else expected
        assert sorted(steps.chosen) == [(layer, length) for layer in (1, 6) for length in chose], name
        launched[name] = steps.mixed
    assert launched["eager"] == launched["captured"] > launched["dense"] == 0
    from_dense = {name: apart(found[name], found["dense"]) for name in ("eager", "captured")}
    assert min(from_dense.values()) > SPARSE_FROM_DENSE, from_dense
    assert apart(found["eager"], found["captured"]) < SPARSE_FROM_DENSE


def test_rows_below_the_threshold_are_dense_beside_long_ones(engines: dict[str, Any], prompts: Prompts) -> None:
    """vLLM's kernel has no tokens of the rows that choose; it may split the others differently. A logit of bfloat16
    between 8 and 16 has steps of 1/16."""
    asked = [prompts[200], prompts[2700], prompts[700][:300], prompts[2000]]
    captured, dense = answers(engines["captured"], asked), answers(engines["dense"], asked)
    for (tokens, total), (expected, expected_total) in zip(captured[0::2], dense[0::2], strict=True):
        assert tokens == expected
        assert total == pytest.approx(expected_total, abs=1 / 16)
    assert captured[1::2] != dense[1::2]


@pytest.mark.parametrize("cached", [768, 1536, 2048])
def test_the_last_row_of_a_prompt_attends_to_everything_in_a_captured_step(
    engines: dict[str, Any], prompts: Prompts, cached: int
) -> None:
    for name in ("captured", "dense"):
        assert engines[name].reset_prefix_cache()
        answers(engines[name], [prompts[2700][:cached]], 1)
    captured, dense = (answers(engines[name], [prompts[2700][: cached + 1]], 1) for name in ("captured", "dense"))
    assert captured == dense
    assert serving_stats(engines["captured"]).decode_sparse == 0
