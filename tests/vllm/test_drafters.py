"""Speculation by others beside a plan, which verifies what was drafted: each row is a step of the plan's decode."""

import os
import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import write_eagle
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_engine import (
    BUDGET,
    DECODE_BOUND,
    PAGES,
    Oracle,
    generate,
    make_engine,
    preemptions,
    tokens_and_logprobs,
    tokens_of,
)
from vllm_replay import assert_replayed, recorded

from sparsekv.bench.serve import by_look_up
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import BlockSparse, fraction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.paged.metrics import ServingStats
from sparsekv.runtime.vllm.engine_host import serving_stats
from sparsekv.runtime.vllm.internals import layers_so_far

Prompts = dict[int, list[int]]
Drafters = dict[str, dict[str, Any]]
Alone = tuple[list[list[int]], ServingStats]  # answers, and what was counted
NGRAM = by_look_up(3)
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NEW = 16  # tokens of an answer
DRAFTER = os.environ.get("FUZZ_DRAFTER", "ngram")
FUZZ_FIRST, FUZZ_COUNT = (
    int(os.environ.get(name, default)) for name, default in (("FUZZ_FIRST", 0), ("FUZZ_COUNT", 20))
)


def engine(folder: str, options: dict[str, Any], **settings: Any) -> Any:
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM 0.32 looks through all modules, and fails at this one
    try:
        settings = {"enable_prefix_caching": False} | settings
        return make_engine(folder, additional_config={"sparsekv": options}, **settings)
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def accepted(llm: Any, count: str = "accepted_tokens") -> int:
    """Tokens of drafts; "draft_tokens" with the rejected ones."""
    name = f"vllm:spec_decode_num_{count}"
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


@pytest.fixture(scope="module")
def repeated(prompts: Prompts) -> list[list[int]]:
    """Prompts of mixed lengths that repeat themselves, so that drafts are accepted; two grow into another bucket."""
    return [(prompts[200] * 12)[:length] for length in (1600, 300, 1525, 90, DECODE_BOUND - 11)]


@pytest.fixture(scope="module")
def retriever(reference: LoadedModel) -> str:
    """The model of the plan."""
    return str(reference.model.name_or_path)


@pytest.fixture(scope="module")
def alone(retriever: str, plan_file: Path, repeated: list[list[int]], kept_engines: list[Any]) -> Alone:
    """The plan without a drafter, prompts one at a time."""
    llm = engine(retriever, {"plan": str(plan_file)})
    kept_engines.append(llm)
    return [tokens_of(generate(llm, [prompt], NEW)[0]) for prompt in repeated], serving_stats(llm)


@pytest.fixture(scope="module")
def eagle(reference: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter of one layer, which vLLM numbers behind the model's own."""
    return str(write_eagle(reference.model.config, tmp_path_factory.mktemp("eagle")))


@pytest.fixture(scope="module")
def mimo(reference: LoadedModel, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model as MiMo, with biases of 0 and a layer of multi-token prediction (MTP), which vLLM numbers behind the
    model's own. The layer drafts what follows the last token in a prompt: its attention and MLP add nothing to that."""
    config, weights = deepcopy(reference.model.config), reference.model.state_dict()
    config.architectures, config.num_nextn_predict_layers = ["MiMoForCausalLM"], 1
    embedded_TD = weights["model.embed_tokens.weight"][prompts[200]]
    last_TD = torch.nn.functional.rms_norm(embedded_TD[:-1], embedded_TD.shape[1:], eps=config.rms_norm_eps)
    next_DD = torch.linalg.lstsq(last_TD, embedded_TD[1:], driver="gelsd").solution.T
    for name, x in tuple(weights.items()):
        if ".layers.0." in name:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace("layers.0.", "mtp_layers.0.")] = torch.zeros_like(x) if adds else x
    for name, x in tuple(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace("weight", "bias")] = torch.zeros(len(x))
    for norm in ("token", "hidden", "final"):
        weights[f"model.mtp_layers.0.{norm}_layernorm.weight"] = torch.ones(len(next_DD))
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat((torch.zeros_like(next_DD), next_DD), 1)
    folder = tmp_path_factory.mktemp("mimo")
    config.save_pretrained(folder)
    reference.tokenizer.save_pretrained(folder)
    save_file({name: x.clone() for name, x in weights.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def drafters(retriever: str, eagle: str) -> Drafters:
    """What drafts. The draft model is the model itself, each of whose layers has the name and the shape of one of the
    plan's."""
    return {
        "ngram": NGRAM,
        "suffix": {"method": "suffix", "num_speculative_tokens": 3},
        "draft_model": {"method": "draft_model", "model": retriever, "num_speculative_tokens": 3},
        "eagle": {"method": "eagle", "model": eagle, "num_speculative_tokens": 3},
        "mtp": MTP,
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "layers"), [("ngram", 0), ("suffix", 0), ("draft_model", 12), ("eagle", 1), ("mtp", 1)]
)
def test_answers_are_those_without_a_drafter_at_the_same_cuts(
    method: str, layers: int, retriever: str, plan_file: Path, alone: Alone, mimo: str, drafters: Drafters,
    repeated: list[list[int]], kept_engines: list[Any],
) -> None:  # fmt: skip
    """One at a time: drafts take rows of a step, so that prompts together would be cut elsewhere."""
    if method == "suffix":
        pytest.importorskip("arctic_inference", reason="suffix decoding is by arctic-inference")
    model = mimo if method == "mtp" else retriever
    step = BUDGET + (method == "draft_model")  # of which vLLM leaves one to each request's drafts
    beside = engine(model, {"plan": str(plan_file)}, speculative_config=drafters[method], max_num_batched_tokens=step)
    kept_engines.append(beside)
    attending = [layer.impl for layer in layers_so_far(beside.llm_engine.vllm_config).values()]
    assert [getattr(impl, "plan_host", None) is None for impl in attending] == [False] * 12 + [True] * layers
    answers, plain = alone
    assert [tokens_of(generate(beside, [prompt], NEW)[0]) for prompt in repeated] == answers
    least = {"draft_model": len(repeated) * NEW // 2, "eagle": -1}  # which is random
    assert accepted(beside) > least.get(method, len(repeated))
    stats = serving_stats(beside)
    assert stats.sparse_tokens == plain.sparse_tokens > 3000
    assert stats.tiles_computed == plain.tiles_computed
    assert stats.decode_sparse >= plain.decode_sparse > 2 * NEW  # drafts that were rejected, too
    assert (stats.decode_left, stats.failures) == (0, 0)


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
    most: int = drafters[DRAFTER]["num_speculative_tokens"]
    drafter = drafters[DRAFTER] | {"num_speculative_tokens_per_batch_size": [(1, 3, most), (4, 8, 1)]}
    model = mimo if DRAFTER == "mtp" else retriever
    settings = {"enable_prefix_caching": True, "num_gpu_blocks_override": 3 * PAGES}
    kept_engines.append(engine(model, {"plan": str(path)}, **settings))
    settings |= {"max_num_batched_tokens": BUDGET + 8 * most, "speculative_config": drafter}
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
    assert accepted(pair[1], "draft_tokens" if DRAFTER == "eagle" else "accepted_tokens") > 0  # eagle's are random
    for name, output in answers[1].items():
        (tokens, logprobs), (expected, of_expected) = map(tokens_and_logprobs, (output, answers[0][name]))
        assert tokens == expected
        assert logprobs == pytest.approx(of_expected, abs=2e-3)


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
