"""Speculation by others beside a plan, which verifies what was drafted: each row is a step of the plan's decode."""

import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_drafters import MTP, NGRAM, Drafters, accepted, by_size, engine
from vllm_engine import BUDGET, PAGES, Oracle, generate, preemptions, tokens_and_logprobs, tokens_of
from vllm_replay import assert_replayed, recorded
from vllm_steps import chi_square

from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import BlockSparse, fraction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats

Prompts = dict[int, list[int]]
NEW = 16  # tokens of an answer
DRAFTER = os.environ.get("FUZZ_DRAFTER", "ngram")
COUNTED = "draft_tokens" if DRAFTER == "eagle3" else "accepted_tokens"  # eagle3's are random
FUZZ_FIRST, FUZZ_COUNT = (
    int(os.environ.get(name, default)) for name, default in (("FUZZ_FIRST", 0), ("FUZZ_COUNT", 20))
)


def test_requests_together_that_are_preempted_answer_as_dense(
    mimo: str, plan: Plan, tmp_path: Path, prompts: Prompts, kept_engines: list[Any]
) -> None:
    """A plan whose patterns cover everything computes what dense does, whatever is cut, drafted or computed again.
    Answers grow into a further page, of which there are too few."""
    write_plan(whole(plan), tmp_path / "plan.yaml")
    first = prompts[200]
    asked = [((first[at:] + first[:at]) * 4)[: 633 + at % 3] for at in range(8)]  # that share no page
    found = {}
    for name, options in (("plan", {"plan": str(tmp_path / "plan.yaml")}), ("dense", {"dense": True})):
        few = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 8 * BUDGET}  # all begin together
        llm = engine(mimo, options, speculative_config=MTP, **few)
        kept_engines.append(llm)
        found[name] = [tokens_of(output) for output in generate(llm, asked, NEW)]
        assert preemptions(llm) > 0
        assert accepted(llm) > len(asked)
        if name == "plan":
            assert serving_stats(llm).sparse_tokens > 3000
    assert found["plan"] == found["dense"]


def test_each_verified_row_is_a_decode_step_of_the_plan_with_preemption_and_prefix_hits(
    retriever: str, plan: Plan, reference: LoadedModel, tmp_path: Path, prompts: Prompts, kept_engines: list[Any]
) -> None:
    """Logits of all rows, of drafts that are rejected too. Prefill is dense: a few rows of a prompt are with drafts."""
    decode = plan.model_copy(update={"prefill": None})
    write_plan(decode, tmp_path / "plan.yaml")
    few = {"num_gpu_blocks_override": 21, "max_model_len": 2048, "max_num_batched_tokens": 8 * BUDGET}
    llm = engine(
        retriever, {"plan": str(tmp_path / "plan.yaml")}, speculative_config=NGRAM, enable_prefix_caching=True, **few
    )
    kept_engines.append(llm)
    first, new = prompts[200] * 8, 10
    # Each grows into a further page.
    asked = [first[:1530], first[:1280] + prompts[700][:121], (prompts[200][1:] * 4)[:765]]
    with recorded(llm) as recording:
        generate(llm, asked[:1], new)
        generate(llm, asked, new)
    assert preemptions(llm) > 0
    assert accepted(llm) > 0
    assert serving_stats(llm).decode_sparse > 2 * new
    assert_replayed(Oracle(reference.model, decode), recording)


# --- in the long run, beside one drafter ------------------------------------------------------------------------------

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"frequency_penalty": 0.3, "min_p": 0.1},
    {"structured_outputs": StructuredOutputsParams(regex="[0-9 ]+")},
)


@pytest.fixture(scope="module")
def pair(
    plan: Plan, retriever: str, mimo: str, drafters: Drafters, kept_engines: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Any]:  # fmt: skip
    """Engines without and with a drafter. Prefill is dense, so that it does not matter where prompts are cut; pages
    suffice for all requests, as what is computed again after a preemption is prefill. The scheduler drafts fewer tokens
    for more requests."""
    path = tmp_path_factory.mktemp("decode") / "plan.yaml"
    write_plan(plan.model_copy(update={"prefill": None}), path)
    drafter = by_size(drafters[DRAFTER])
    model = mimo if DRAFTER == "mtp" else retriever
    settings = {"enable_prefix_caching": True, "num_gpu_blocks_override": 3 * PAGES}
    kept_engines.append(engine(model, {"plan": str(path)}, **settings))
    most = BUDGET + 8 * drafter["num_speculative_tokens"]
    settings |= {"max_num_batched_tokens": most, "speculative_config": drafter}
    kept_engines.append(engine(model, {"plan": str(path)}, **settings))
    return kept_engines[-2], kept_engines[-1]


@pytest.mark.fuzz
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(FUZZ_FIRST, FUZZ_FIRST + FUZZ_COUNT))
def test_random_requests_have_the_answers_without_a_drafter(pair: tuple[Any, Any], prompts: Prompts, seed: int) -> None:
    """Ten requests, which come and of which some are cancelled at random steps, between a draft and its verification
    too."""
    source = random.Random(seed)
    asked = {}
    for number in range(10):
        text = prompts[2700][source.randrange(2000) :][: source.randrange(20, 700)]
        prompt = (text * 40)[: source.randrange(60, 2600)]  # it repeats itself, so that drafts are accepted
        kind = {"temperature": 0.0, "max_tokens": source.randrange(1, 40), "ignore_eos": True, "logprobs": 0}
        asked[str(number)] = prompt, SamplingParams(**kind | source.choice(KINDS))
    answers = []
    for llm in pair:
        waiting, inner, ended = list(asked.items()), llm.llm_engine, {}
        while waiting or inner.has_unfinished_requests():
            if waiting and (source.random() < 0.5 or not inner.has_unfinished_requests()):
                name, (prompt, how) = waiting.pop()
                inner.add_request(name, {"prompt_token_ids": prompt}, how)
            ended |= {output.request_id: output for output in inner.step() if output.finished}
            if llm is pair[1] and source.random() < 0.01:
                inner.abort_request([source.choice(sorted(asked))])
        assert llm.reset_prefix_cache(), "pages are still taken"
        answers.append(ended)
        assert not preemptions(llm)
    assert accepted(pair[1], COUNTED) > 0
    for name, output in answers[1].items():
        (tokens, logprobs), (expected, of_expected) = map(tokens_and_logprobs, (output, answers[0][name]))
        assert tokens == expected
        assert logprobs == pytest.approx(of_expected, abs=2e-3)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_sampled_answers_are_distributed_as_without_a_drafter(
    pair: tuple[Any, Any], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chi-square of two samples of 600 answers to a prompt of which the plan is unsure, and dense decode is not."""
    from vllm.v1.sample import rejection_sampler

    def expand(x_B: torch.Tensor, ends_B: torch.Tensor, tokens: int, **replaced: int) -> torch.Tensor:
        x_B = torch.where(x_B == replaced.get("replace_from", 0), replaced.get("replace_to", 0), x_B)
        return x_B.repeat_interleave(ends_B.diff(prepend=ends_B.new_zeros(1)).long())

    # On a CPU vLLM 0.32 writes temperatures of drafted tokens to a copy, and samples by what was in memory.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    prompt, before = prompts[1100], accepted(pair[1], COUNTED)
    sampled = SamplingParams(temperature=1.5, max_tokens=4, ignore_eos=True)
    counts = []
    for llm in pair:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 600, sampled, use_tqdm=False)
        counts.append(Counter(tuple(tokens_of(output)[:3]) for output in outputs))
    assert accepted(pair[1], COUNTED) > before
    square, free = chi_square(*counts)
    print(f"chi-square {square:.1f} of {free} degrees, {accepted(pair[1], COUNTED) - before} {COUNTED}")
    assert free >= 8
    assert square < free + 4.5 * math.sqrt(2 * free)


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
