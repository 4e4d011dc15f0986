"""Decode by a plan in captured graphs of vLLM, beside the same plan launched step by step. Needs an NVIDIA GPU."""

from typing import Any

import pytest
from vllm_engine import DECODE_BOUND, NEW, gpu_engine, tokens_of
from vllm_steps import check_rows_that_choose

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

pytestmark = pytest.mark.gpu
Prompts = dict[int, list[int]]


@pytest.fixture(scope="module")
def engines(
    reference: LoadedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory, kept_engines: list[Any]
) -> dict[str, Any]:
    """Prefill is dense in all of them: its chunks would depend on their steps."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    write_plan(plan.model_copy(update={"prefill": None}), path)

    def engine(decode: bool, captured: bool) -> Any:
        own = {"plan": str(path), "decode": decode}
        return gpu_engine(str(reference.model.name_or_path), own, captured, num_gpu_blocks_override=1024)

    found = {"eager": engine(True, False), "captured": engine(True, True), "dense": engine(False, True)}
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


def test_a_request_that_begins_to_choose_changes_graphs(engines: dict[str, Any], prompts: Prompts) -> None:
    asked = [prompts[2700][: DECODE_BOUND - NEW // 2]]
    launched, captured = answers(engines["eager"], asked), answers(engines["captured"], asked)
    assert captured[0][0] == launched[0][0]
    assert captured[0][1] == pytest.approx(launched[0][1], abs=0.1)
    assert 0 < serving_stats(engines["captured"]).decode_sparse < NEW - 1


def test_rows_choose_beside_chunks_of_prompts_however_steps_are_run(engines: dict[str, Any], prompts: Prompts) -> None:
    check_rows_that_choose(engines, prompts)


def test_rows_below_the_threshold_are_dense_beside_long_ones(engines: dict[str, Any], prompts: Prompts) -> None:
    """Our kernels compute them, and round elsewhere than vLLM's. A logit of bfloat16 between 8 and 16 has steps of
    1/16."""
    asked = [prompts[200], prompts[2700], prompts[700][:300], prompts[2000]]
    captured, dense = answers(engines["captured"], asked), answers(engines["dense"], asked)
    for (tokens, total), (expected, expected_total) in zip(captured[0::2], dense[0::2], strict=True):
        assert tokens == expected
        assert total == pytest.approx(expected_total, abs=1 / 8)
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
