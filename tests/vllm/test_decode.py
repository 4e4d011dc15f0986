"""Decode by a plan in vLLM's engine, held against the transformers host given the same steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm_engine import BUDGET, DECODE_BOUND, Oracle, chunks_of, generate, make_engine, same, tokens_of
from vllm_replay import assert_replayed, plan_host_of, recorded

import sparsekv.runtime.vllm.internals as internals
from sparsekv.plans.files import write_plan
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.attention_backend import SparseBuilder
from sparsekv.runtime.vllm.engine_host import serving_stats

Prompts = dict[int, list[int]]
LONG = 44  # tokens of an answer, by which one of 700 grows beyond the bound of decode


@pytest.fixture
def as_captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps as a GPU computes them in captured graphs: single rows of prompts are among those that decode, and segments
    are looked at whatever the lengths are."""
    builders, step = [], SparseBuilder._step

    def captured_step(self: Any, *args: Any) -> Any:
        builders.append(self)
        self._graph_rows = 64
        return step(self, *args)

    monkeypatch.setattr(internals.platform, "captures", True)
    monkeypatch.setattr(SparseBuilder, "_step", captured_step)
    yield
    assert builders
    for builder in builders:
        builder._graph_rows = 0


def test_answers_at_once_of_mixed_lengths_are_those_of_the_transformers_host(
    engine: Any, sparse: Oracle, plan: Plan, reference: LoadedModel, prompts: Prompts
) -> None:
    """One stays below the bound of decode, one grows beyond it."""
    asked = [prompts[length] for length in (200, 700, 1500, 2000)]
    outputs = generate(engine, asked, LONG)
    cuts = chunks_of([len(prompt) for prompt in asked], LONG)
    answers = [sparse(prompt, ends, LONG) for prompt, ends in zip(asked, cuts, strict=True)]
    assert [same(output, answer) for output, answer in zip(outputs, answers, strict=True)] == [True] * 4
    stats = serving_stats(engine)
    expected = sum(length > DECODE_BOUND for prompt in asked for length in range(len(prompt) + 1, len(prompt) + LONG))
    assert 2 * (LONG - 1) < expected < 3 * (LONG - 1)
    assert (stats.decode_sparse, stats.decode_left) == (expected, 0)
    assert stats.decode_dense == 4 * (LONG - 1) - expected
    without = Oracle(reference.model, plan.model_copy(update={"decode": None}))
    assert not same(outputs[-1], without(asked[-1], cuts[-1], LONG)), "the choice leaves nothing out"


@pytest.mark.parametrize(
    ("cut", "beside", "graphs"), [(513, (), False), (1023, (1100,), True), (1531, (700, 1100), False)]
)
def test_the_last_row_of_a_cut_prompt_attends_to_everything(
    engine: Any, sparse: Oracle, prompts: Prompts, cut: int, beside: tuple[int, ...], graphs: bool, request: Any
) -> None:
    """A row that is left over, alone in its step or beside others that decode."""
    if graphs:
        request.getfixturevalue("as_captured")
    asked, inner = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True), engine.llm_engine
    with recorded(engine) as recording:
        for number, length in enumerate(beside):
            inner.add_request(str(number), {"prompt_token_ids": prompts[length]}, asked)
        while beside and not any(rows.length > max(beside) for rows in recording):
            inner.step()
        inner.add_request("cut", {"prompt_token_ids": prompts[2700][:cut]}, asked)
        while inner.has_unfinished_requests():
            inner.step()
    assert [rows.length for rows in recording if rows.prompt and len(rows.tokens_T) == 1] == [cut]
    assert_replayed(sparse, recording)


@pytest.mark.parametrize(("cached", "graphs"), [(768, False), (1536, True)])
def test_a_prefix_hit_that_leaves_one_row_attends_to_everything(
    engine: Any, sparse: Oracle, prompts: Prompts, cached: int, graphs: bool, request: Any
) -> None:
    if graphs:
        request.getfixturevalue("as_captured")
    asked = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with recorded(engine) as recording:
        for end in (cached, cached + 1):
            (output,) = engine.generate([{"prompt_token_ids": prompts[2700][:end]}], asked, use_tqdm=False)
    assert output.num_cached_tokens == cached
    assert [rows.length for rows in recording if rows.prompt and len(rows.tokens_T) == 1] == [cached + 1]
    assert_replayed(sparse, recording)


def test_rows_that_the_scratch_has_no_room_for_are_dense_and_counted(
    engine: Any, plan: Plan, reference: LoadedModel, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = plan_host_of(engine).decode
    monkeypatch.setattr(
        decode, "_state", type(decode._state)(plan_host_of(engine).program.segments, scratch=torch.empty(8))
    )
    (output,) = generate(engine, [prompts[1100]])
    without = Oracle(reference.model, plan.model_copy(update={"decode": None}))
    assert same(output, without(prompts[1100], range(BUDGET, 1100, BUDGET)))
    stats = serving_stats(engine)
    assert (stats.decode_sparse, stats.decode_dense, stats.decode_left) == (0, 7, 7)


@pytest.fixture(scope="module")
def covering(reference: LoadedModel, plan: Plan, tmp_path_factory: pytest.TempPathFactory, kept_engines: Any) -> Any:
    """An engine with a plan of decode alone, whose budgets cover every context of up to 2,000 tokens."""
    segment = Segment(
        filter=0, layers=(1, 2, 5), budget=DecodeBudget(tokens=1964), sink=4, recent=32,
        heads={1: (1, 0), 2: (0, 0), 5: (1, 1)},
    )  # fmt: skip
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    path = tmp_path_factory.mktemp("covering") / "plan.yaml"
    write_plan(plan.model_copy(update={"prefill": None, "decode": decode}), path)
    config = {"sparsekv": {"plan": str(path)}}
    engine = make_engine(str(reference.model.name_or_path), additional_config=config, disable_log_stats=True)
    kept_engines.append(engine)
    return engine


def test_budgets_that_cover_the_context_give_exactly_what_vllm_gives(
    covering: Any, plain: Any, prompts: Prompts
) -> None:
    asked = [prompts[length] for length in (200, 1100)]
    for engine in (covering, plain):  # what others asked of them would cut these prompts elsewhere
        assert engine.reset_prefix_cache()
    for ours, theirs in zip(generate(covering, asked), generate(plain, asked), strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        assert ours.outputs[0].cumulative_logprob == theirs.outputs[0].cumulative_logprob
    assert serving_stats(covering).decode_sparse == 0


def test_head_maps_choose_as_in_the_transformers_host(covering: Any, reference: LoadedModel, prompts: Prompts) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with recorded(covering) as recording:
        covering.generate([{"prompt_token_ids": prompts[2700]}], asked, use_tqdm=False)
    assert serving_stats(covering).decode_sparse == 5
    segment = plan_host_of(covering).program.layers[1].role.segment
    assert segment.heads == "per_kv_head"
    loaded = plan_of(covering)
    assert_replayed(Oracle(reference.model, loaded), recording)


def plan_of(engine: Any) -> Plan:
    from sparsekv.plans.files import load_plan

    config = engine.llm_engine.vllm_config.additional_config
    return load_plan(Path(config["sparsekv"]["plan"]))
