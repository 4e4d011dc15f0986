"""The plan's decode in captured graphs of vLLM with a drafter and without one. Needs an NVIDIA GPU."""

import math
from collections import Counter
from typing import Any

import pytest
from vllm_drafters import accepted, count_drafts
from vllm_engine import DECODE_BOUND, NEW, gpu_engine, tokens_of
from vllm_steps import SPARSE_FROM_DENSE, apart, chi_square, likely_answers

from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

pytestmark = pytest.mark.gpu
Prompts = dict[int, list[int]]
DRAFTED = 3


@pytest.fixture(scope="module")
def engines(
    reference: LoadedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory, kept_engines: list[Any]
) -> dict[str, Any]:
    """Prefill is dense in all of them: its chunks would depend on their steps. The model drafts for itself, dense."""
    path, model = tmp_path_factory.mktemp("plan") / "plan.yaml", str(reference.model.name_or_path)
    write_plan(plan.model_copy(update={"prefill": None}), path)
    itself = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTED}
    look_up = {
        "method": "ngram_gpu", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip

    def engine(drafter: dict[str, Any] | None, captured: bool = True, decode: bool = True) -> Any:
        settings = {} if drafter is None else {"speculative_config": drafter}
        own = {"plan": str(path), "decode": decode, "sparse": "always"}
        return gpu_engine(model, own, captured, num_gpu_blocks_override=1024, disable_log_stats=False, **settings)

    found = {
        "alone": engine(None),
        "itself": engine(itself),
        "launched": engine(itself, captured=False),
        "look-up": engine(look_up),
        "dense": engine(None, decode=False),
    }
    kept_engines.extend(found.values())
    count_drafts(found["itself"])
    return found


@pytest.mark.parametrize("lengths", [(2700,), (200, 2000, 700), (200, 2000, 700, 2700, 1100)])
@pytest.mark.parametrize("name", ["itself", "launched", "look-up"])
def test_a_verified_row_chooses_as_a_step_of_its_own(
    engines: dict[str, Any], prompts: Prompts, name: str, lengths: tuple[int, ...]
) -> None:
    """Which tokens an answer ends in is decided by rounding: compared is how sure the model is of those before."""
    asked = [prompts[length] for length in lengths]
    at = lengths.index(2000) if 2000 in lengths else 0
    reset_stats(engines[name])
    found, alone, dense = (likely_answers(engines[by], asked) for by in (name, "alone", "dense"))
    print(name, lengths, [tokens_of(one) == tokens_of(other) for one, other in zip(found, alone, strict=True)])
    assert apart(found[at], alone[at]) < SPARSE_FROM_DENSE
    if lengths[at] == 2000:  # whose answer the plan loses
        assert apart(found[at], dense[at]) > SPARSE_FROM_DENSE
    stats = serving_stats(engines[name])
    assert stats.decode_sparse >= sum(length > DECODE_BOUND for length in lengths) * (NEW - 1)
    assert (stats.decode_left, stats.failures) == (0, 0)


def test_sampled_answers_are_distributed_as_without_a_drafter(engines: dict[str, Any], prompts: Prompts) -> None:
    """The chi-square of two samples of 2,000 answers, which those of dense decode fail."""
    from vllm import SamplingParams

    sampled = SamplingParams(temperature=1.5, max_tokens=4, ignore_eos=True)
    asked = [{"prompt_token_ids": prompts[1100]}] * 2000
    counts = {
        name: Counter(tuple(tokens_of(output)[:3]) for output in engines[name].generate(asked, sampled, use_tqdm=False))
        for name in ("itself", "alone", "dense")
    }
    assert accepted(engines["itself"], "draft_tokens") > accepted(engines["itself"]) > 100
    (square, free), (far, freely) = (chi_square(counts[name], counts["alone"]) for name in ("itself", "dense"))
    print(f"chi-square {square:.1f} of {free} degrees; of dense decode {far:.1f} of {freely}")
    assert free >= 5
    assert square < free + 4.5 * math.sqrt(2 * free)
    assert far > freely + 20 * math.sqrt(2 * freely)
