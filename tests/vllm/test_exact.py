"""Exact output inside vLLM: what drafts cannot change, by the model runner that GPUs have, whose kernels Triton's
interpreter runs here."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exact_engines import DRAFT, ask, at_random, counted, drafting_as, drafting_plan, exactly, scheduler_of, texts
from vllm_engine import make_engine, preemptions, tokens_and_logprobs, tokens_of
from vllm_steps import recorded_choices

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
on_v2 = pytest.mark.skipif(any(os.environ.get(name) != one for name, one in V2.items()), reason="see the last test")
SMALL = {"max_model_len": 384, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 12}


@pytest.fixture(scope="module")
def path(reference: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    write_plan(drafting_plan(reference.info, 6), path)
    return path


@pytest.fixture(scope="module")
def exact(reference: LoadedModel, path: Path, kept_engines: list[Any]) -> Any:
    llm = make_engine(str(reference.model.name_or_path), additional_config=exactly(path), **SMALL)
    drafting_as(llm, at_random())
    kept_engines.append(llm)
    return llm


@pytest.fixture(scope="module")
def dense(reference: LoadedModel, kept_engines: list[Any]) -> Any:
    config = {"sparsekv": {"dense": True}}
    llm = make_engine(str(reference.model.name_or_path), additional_config=config, disable_log_stats=True, **SMALL)
    kept_engines.append(llm)
    return llm


def same(exact: Any, dense: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """Outputs that are dense attention's, log-probabilities included."""
    found, expected = (ask(llm, prompts, logprobs=1, **sampling) for llm in (exact, dense))
    for one, other in zip(found, expected, strict=True):
        (mine, mine_logprobs), (its, its_logprobs) = tokens_and_logprobs(one), tokens_and_logprobs(other)
        assert mine == its
        assert mine_logprobs == pytest.approx(its_logprobs, abs=1e-3)
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
    return found


@on_v2
def test_greedy_answers_are_dense_attentions(exact: Any, dense: Any) -> None:
    """Prompts of mixed lengths, some cut, one below the length from which decode is sparse."""
    before = counted(exact)
    same(exact, dense, texts(1, (150, 90, 230, 300, 20)), max_tokens=20)
    drafted, accepted = (now - then for now, then in zip(counted(exact), before, strict=True))
    assert 0 < accepted < drafted, "a plan of few tokens drafts some that count, and some that do not"
    assert serving_stats(exact).decode_sparse > drafted / 2


@on_v2
def test_tokens_that_draft_are_counted_and_prompts_that_are_not_complete_are_not(exact: Any) -> None:
    """Such a prompt is in each step of the draft that others draft in, without tokens."""
    prompts = texts(12, (250, 340, 330))
    reset_stats(exact)
    with recorded_choices() as steps:
        ask(exact, prompts, max_tokens=8)
    chosen = sum(layer == 1 for layer, _ in steps.chosen)
    stats = serving_stats(exact)
    assert (stats.decode_sparse, stats.decode_dense) == (chosen, 0)
    assert chosen > 0


@on_v2
def test_answers_are_dense_attentions_after_preemptions(exact: Any, dense: Any) -> None:
    same(exact, dense, texts(2, (121, 122, 123, 124, 125, 126, 127, 120)), max_tokens=24)
    assert preemptions(exact) > 0


@on_v2
def test_what_drafts_wrote_is_not_in_the_prefix_cache(exact: Any, dense: Any) -> None:
    """A block that an answer has filled holds what a pass that attends to everything has written."""
    (prompt,) = texts(3, (110,))
    (first,) = same(exact, dense, [prompt], max_tokens=40)
    longer = [*prompt, *tokens_of(first), 7]
    (again,) = same(exact, dense, [longer], max_tokens=16)
    assert again.num_cached_tokens == 128


@on_v2
def test_answers_end_where_dense_ones_do(exact: Any, dense: Any) -> None:
    prompts = texts(4, (100, 130, 75))
    (found,) = same(exact, dense, prompts[:1], max_tokens=12)
    stop = tokens_of(found)[5]
    same(exact, dense, prompts, max_tokens=12, stop_token_ids=[stop])
    same(exact, dense, prompts, max_tokens=1)
    same(exact, dense, prompts, max_tokens=2)
    text = exact.get_tokenizer().decode(tokens_of(found)[3:5])
    same(exact, dense, prompts, max_tokens=12, stop=[text])


@on_v2
def test_requests_run_up_to_the_longest_length(exact: Any, dense: Any) -> None:
    longest = SMALL["max_model_len"]
    outputs = same(exact, dense, texts(5, (longest - 9, longest - 2)), max_tokens=50)
    assert [len(tokens_of(one)) for one in outputs] == [9, 2]


@on_v2
def test_penalties_count_drafted_tokens_as_generated(exact: Any, dense: Any) -> None:
    prompts = texts(6, (100, 140))
    same(exact, dense, prompts, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2)
    same(exact, dense, prompts, bad_words=["a"], min_tokens=3)


@on_v2
def test_aborted_requests_leave_the_others_as_they_are(exact: Any, dense: Any) -> None:
    from vllm import SamplingParams

    prompts = texts(7, (140, 90, 200))
    expected = [tokens_of(one) for one in ask(dense, prompts, max_tokens=16)]
    engine, answers = exact.llm_engine, {}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    ids = [engine.add_request(f"r{number}", {"prompt_token_ids": one}, params) for number, one in enumerate(prompts)]
    for step in range(200):
        if step == 4:
            engine.abort_request([ids[1]], internal=True)
        answers |= {one.request_id: tokens_of(one) for one in engine.step()}
        if not engine.has_unfinished_requests():
            break
    assert (answers["r0"], answers["r2"]) == (expected[0], expected[2])


@torch.no_grad()
def pair_probabilities(model: Any, prompt: list[int], temperature: float, least: float) -> dict[tuple[int, int], float]:
    """The pairs of next tokens by dense attention whose joint probability is at least `least`, with it."""
    first_V = (model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(-1)
    found: dict[tuple[int, int], float] = {}
    for first in (first_V >= least).nonzero().flatten().tolist():
        second_V = (model(torch.tensor([[*prompt, first]])).logits[0, -1].double() / temperature).softmax(-1)
        both_V = first_V[first] * second_V
        found |= {(first, second): float(both_V[second]) for second in (both_V >= least).nonzero().flatten().tolist()}
    return found


@on_v2
def test_sampled_answers_are_distributed_as_dense_attentions(
    exact: Any, reference: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two tokens of an answer, of which the second may be drafted: the chi-square of a sample, with all that
    is rare together."""
    from triton.language.semantic import TritonSemantic

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *args: None)  # vLLM's hashes wrap
    (prompt,), asked, temperature = texts(11, (100,)), 160, 0.6
    drafting_as(exact, at_random())
    np.random.seed(0)  # vLLM's seeds
    before = counted(exact)
    counts = Counter(
        tuple(tokens_of(one)[:2]) for one in ask(exact, [prompt] * asked, temperature=temperature, max_tokens=3)
    )
    assert counted(exact)[0] > before[0]
    expected = {
        key: asked * share for key, share in pair_probabilities(reference.model, prompt, temperature, 5 / asked).items()
    }
    cells, rare = [(counts[key], mean) for key, mean in expected.items()], asked - sum(expected.values())
    cells.append((asked - sum(count for count, _ in cells), rare))
    free = len(cells) - 1
    assert free >= 8
    assert 5 <= rare <= asked / 2
    assert sum((count - mean) ** 2 / mean for count, mean in cells) < free + 4 * (2 * free) ** 0.5


@on_v2
def test_a_step_that_is_scheduled_before_the_last_one_is_over_changes_nothing(
    reference: LoadedModel, path: Path, dense: Any, kept_engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM schedules on GPUs; for CPUs it turns that off."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.sampling_params import StructuredOutputsParams

    given = CpuPlatform.check_and_update_config

    def ahead(cls: Any, config: Any) -> None:
        given(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(ahead))
    llm = make_engine(str(reference.model.name_or_path), additional_config=exactly(path), **SMALL)
    kept_engines.append(llm)
    drafting_as(llm, at_random())
    same(llm, dense, texts(2, (121, 122, 123, 124, 125, 126, 127, 120)), max_tokens=24)
    assert preemptions(llm) > 0
    same(llm, dense, texts(1, (150, 90, 230, 300, 20)), max_tokens=20)
    shape = StructuredOutputsParams(regex="[0-9]{3}[a-c]{5}")
    same(llm, dense, texts(11, (100, 140)), structured_outputs=shape, ignore_eos=False)
    drafted, accepted = counted(llm)
    assert 0 < accepted < drafted


@on_v2
def test_behind_a_prompt_by_the_plan_the_answer_is_that_of_dense_decode(
    reference: LoadedModel, plan: Plan, tmp_path: Path, prompts: dict[int, list[int]], kept_engines: list[Any]
) -> None:
    whole = drafting_plan(reference.info, 6).model_copy(update={"prefill": plan.prefill})
    write_plan(whole, tmp_path / "plan.yaml")
    model, settings = str(reference.model.name_or_path), SMALL | {"max_model_len": 1024, "num_gpu_blocks_override": 24}
    sparse = {"sparsekv": {"plan": str(tmp_path / "plan.yaml"), "decode": False}}
    behind = make_engine(model, additional_config=exactly(tmp_path / "plan.yaml", exact="decode"), **settings)
    settings["max_num_batched_tokens"] -= (
        1  # of a step vLLM leaves a draft model one of each request, which cuts prompts
    )
    alone = make_engine(model, additional_config=sparse, **settings)
    kept_engines.extend((behind, alone))
    drafting_as(behind, at_random())
    same(behind, alone, [prompts[700]], max_tokens=24)
    assert serving_stats(behind).sparse_tokens == serving_stats(alone).sparse_tokens > 300
    assert counted(behind)[0] > 0


@on_v2
def test_no_drafts_are_asked_for_where_the_plan_is_dense(exact: Any) -> None:
    drafting = scheduler_of(exact).drafting
    own, before = vars(drafting).pop("next"), counted(exact)
    ask(exact, texts(9, (20, 30)))
    drafting.next = own
    assert counted(exact) == before


@on_v2
def test_connectors_see_the_steps_of_the_target_alone(exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.kv_connector import KVConnector

    (runner,) = exact.collective_rpc(lambda worker: worker.model_runner)
    connector, given, seen = KVConnector(), runner.speculator._step, []
    connector.disabled = False
    connector.set_disabled = lambda disabled: setattr(connector, "disabled", disabled)
    monkeypatch.setattr(runner, "kv_connector", connector)
    monkeypatch.setattr(runner.speculator, "_step", lambda *args: [seen.append(connector.disabled), given(*args)])
    ask(exact, texts(12, (100, 140)))
    assert len(seen) > DRAFT
    assert all(seen)
    assert not connector.disabled


@on_v2
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enable_lora": True}, "beside --enable-lora"),
        ({"hf_overrides": {"max_position_embeddings": 65_536}}, "beside --hf-overrides"),
        ({"enable_prompt_embeds": True}, "beside prompts as embeddings"),
    ],
)
def test_what_stands_in_the_way_is_named(
    reference: LoadedModel, path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        make_engine(str(reference.model.name_or_path), additional_config=exactly(path), **SMALL, **settings)


@pytest.mark.skipif(os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1", reason="needs model runner V1")
def test_model_runner_v1_is_refused(reference: LoadedModel, path: Path) -> None:
    with pytest.raises(UnsupportedError, match="model runner V2 for exact output, found V1"):
        make_engine(str(reference.model.name_or_path), additional_config=exactly(path), **SMALL)


def test_what_vllm_would_cut_a_context_to_is_refused() -> None:
    from sparsekv.runtime.vllm.internals import beside_drafts

    parallel = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
    model = SimpleNamespace(
        uses_mrope=False, enable_prompt_embeds=False, supports_multimodal_inputs=False, hf_overrides={},
        max_model_len=4096, original_max_model_len=None,
    )  # fmt: skip
    config = SimpleNamespace(parallel_config=parallel, model_config=model, lora_config=None)
    assert beside_drafts(config) == ()
    model.original_max_model_len = -1  # what fits
    assert beside_drafts(config) == ()
    model.original_max_model_len = 8192
    assert beside_drafts(config) == ("--max-model-len beyond what the model's files say",)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="it is running")
def test_the_model_runner_that_gpus_have_does_all_that() -> None:
    subprocess.run([sys.executable, "-m", "pytest", __file__, "-q", "-m", "not gpu"], check=True, env=os.environ | V2)


assert DRAFT > 1, "a draft of one token never reads what a draft has written"
