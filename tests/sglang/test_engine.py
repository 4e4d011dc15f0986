"""Whether a plan gives in an engine of SGLang what it gives in the transformers host, however requests come."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_engine import BUDGET, NEW, SLOTS, Asked, Engine, plan_of, prompt_of
from vllm_engine import Oracle

from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan


def assert_same(request: Asked, oracle: Oracle) -> None:
    cached = [start for start in request.starts[:1] if start]  # by chance another prompt begins with the same token
    answer = oracle(request.prompt, [*cached, *request.cuts[0][:-1]], request.new)
    assert request.tokens == answer.tokens
    if request.with_logprobs:
        assert request.logprobs == pytest.approx(answer.logprobs, abs=1e-3)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [200, 700, 1100, 2000])
def test_an_answer_is_that_of_the_transformers_host(
    engine: Engine, planned: Any, sparse: Oracle, length: int, overlap: bool
) -> None:
    (request,) = engine.answer([Asked(prompt_of(length))], overlap)
    assert request.cuts == [[*range(BUDGET, length, BUDGET), length]]
    assert_same(request, sparse)
    counts = planned.plan_host.counters.read()
    assert (counts.sparse_tokens, counts.dense_tokens) == ((length, 0) if length > BUDGET else (0, length))
    assert counts.decode_sparse == (NEW - 1 if length > 740 else 0)
    assert counts.failures == 0


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_at_once_are_each_answered_as_alone(
    engine: Engine, planned: Any, sparse: Oracle, seed: int
) -> None:
    """Steps have chunks of several prompts, sparse and dense, beside rows that decode, of which some choose."""
    random = Random(seed)
    requests = [
        Asked(prompt_of(random.randrange(30, 1200), seed), random.randrange(2, 24), at=random.randrange(20))
        for _ in range(7)
    ]
    for request in requests:
        request.with_logprobs = seed < 1
    engine.answer(requests, overlap=bool(seed % 2))
    assert bool(engine.mixed) == (seed > 0)
    for request in requests:
        assert_same(request, sparse)
    counts = planned.plan_host.counters.read()
    assert counts.decode_sparse
    assert counts.decode_dense
    assert counts.sparse_tokens
    assert counts.dense_tokens


def test_a_prompt_that_goes_on_from_a_cached_one_is_prefilled_by_the_plan_from_there(
    engine: Engine, sparse: Oracle
) -> None:
    first = Asked(prompt_of(900))
    engine.answer([first])
    second = Asked([*first.prompt, *prompt_of(700, 1)])
    engine.answer([second])
    assert second.starts == [900]
    answer = sparse(second.prompt, [*first.cuts[0], *second.cuts[0][:-1]])
    assert second.tokens == answer.tokens
    assert second.logprobs == pytest.approx(answer.logprobs, abs=1e-3)


def test_a_request_that_is_retracted_goes_on_as_it_is_computed_again(
    engine: Engine, planned: Any, sparse: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "plan_mixes", False)  # else a single row of a prompt may choose
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 9)
    requests = engine.answer([Asked(prompt_of(length), 12) for length in (900, 1100)])
    (again,) = (request for request in requests if request.req.retraction_count)
    (other,) = (request for request in requests if not request.req.retraction_count)
    assert_same(other, sparse)
    whole, made = [*again.prompt, *again.tokens], [cuts[-1] - len(again.prompt) for cuts in again.cuts]
    assert len(made) > 1
    done: list[int] = []
    for start, cuts, first, end in zip(again.starts, again.cuts, made, [*made[1:], again.new], strict=True):
        done = [*(cut for cut in done if cut <= start), *cuts]  # what was cached was cut before
        answer = sparse(whole[: done[-1]], done[:-1], end - first)
        assert again.tokens[first:end] == answer.tokens


def test_requests_that_are_taken_back_leave_the_others_and_the_slots_alone(engine: Engine, sparse: Oracle) -> None:
    requests = [Asked(prompt_of(1500), 60, aborted=2), Asked(prompt_of(900), 20), Asked(prompt_of(800), 60, aborted=9)]
    engine.answer(requests)
    assert_same(requests[1], sparse)
    assert len(requests[2].tokens) < 60
    engine.scheduler.flush_cache()
    assert engine.scheduler.token_to_kv_pool_allocator.available_size() == SLOTS


def test_a_dense_plan_changes_nothing(engine: Engine, plan: Plan, tmp_path: Path) -> None:
    """Not a bit: all rows go to SGLang's own methods."""
    dense = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, dense=True),))
    with pytest.warns(PlanWarning, match="dense at every length"):
        ours = engine.backend(plan.model_copy(update={"prefill": dense, "decode": None}), tmp_path)
    answers = []
    for backend in (ours, engine.backend(None, tmp_path / "none")):
        engine.use(backend)
        answers.append([(r.tokens, r.logprobs) for r in engine.answer([Asked(prompt_of(n)) for n in (300, 900, 1300)])])
    assert answers[0] == answers[1]


def test_prompts_that_sglang_makes_up_are_neither_planned_nor_counted(engine: Engine, planned: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=[600], extend_prefix_lens_cpu=[0])
    batch.req_pool_indices, batch.rids = torch.tensor([1]), None
    assert planned._begin(batch, captured=False) is None
    counts = planned.plan_host.counters
    assert (counts.read().sparse_tokens, counts.read().dense_tokens) == (0, 0)
    batch.rids = ["a request"]
    assert planned._begin(batch, captured=False) is not None
    assert counts.read().sparse_tokens == 600


def test_rows_that_are_left_to_flash_attention_are_given_by_its_metadata(
    engine: Engine, planned: Any, sparse: Oracle
) -> None:
    """As on a GPU, but for graphs: parts of a step, and lengths of 0 where ours computes a row."""
    from sglang_paged import PagedBackend

    from sparsekv.runtime.sglang.planned_backend import OnCuda, with_methods

    ours = with_methods(PagedBackend(engine.runner), OnCuda)
    vars(ours).update(plan_of(planned))
    engine.use(ours)
    lengths = (900, 200, 1100, 60, 730)
    requests = [
        Asked(prompt_of(length), 20, at=number // 3, with_logprobs=False) for number, length in enumerate(lengths)
    ]
    for request in engine.answer(requests):
        assert_same(request, sparse)
    assert planned.plan_host.counters.read().decode_sparse


def test_pages_of_several_tokens_are_found_by_slots(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv.runtime.sglang.planned_backend import OnCpu

    page, order = 16, Random(0).sample(range(60), 60)
    slots_P = torch.tensor([place * page + token for place in order for token in range(page)], dtype=torch.int32)
    monkeypatch.setattr(planned, "plan_page", page)
    monkeypatch.setattr(planned.req_to_token_pool, "req_to_token", slots_P[None])
    table_BP = OnCpu.table(planned, SimpleNamespace(req_pool_indices=torch.tensor([0])), 100)
    assert table_BP.tolist() == [order[:7]]
    k_TGD, v_TGD = torch.randn(2, 10 * page, 2, 32)
    pool = SimpleNamespace(get_key_buffer=lambda layer: k_TGD, get_value_buffer=lambda layer: v_TGD)
    monkeypatch.setattr(planned, "token_to_kv_pool", pool)
    both = planned.pages(SimpleNamespace(layer_id=1, tp_k_head_num=2, head_dim=32))
    for x_NGSD, x_TGD in zip(both, (k_TGD, v_TGD), strict=True):
        assert torch.equal(x_NGSD.transpose(1, 2).flatten(0, 1), x_TGD)
        assert x_NGSD.data_ptr() == x_TGD.data_ptr()


def test_a_step_that_is_captured_computes_anew_what_follows_from_its_lengths(
    engine: Engine, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang runs it before, with the same metadata: what that left behind would be constants of the graph."""
    from sglang_paged import PagedBackend

    from sparsekv.runtime.core.pays import Pays, Thresholds
    from sparsekv.runtime.sglang.planned_backend import OnCuda, with_methods

    graph, eager = (with_methods(PagedBackend(engine.runner), OnCuda) for _ in range(2))
    vars(graph).update(plan_of(planned))
    vars(eager).update(plan_of(planned))
    table, torch_random = engine.runner.req_to_token_pool.req_to_token, torch.Generator().manual_seed(0)
    table[1:3, :1000] = (torch.randperm(2000, generator=torch_random).int() + 1).view(2, 1000)
    for layer in range(2):
        for x in planned.token_to_kv_pool.get_kv_buffer(layer):
            x.copy_(torch.randn(x.shape, generator=torch_random))
    layers = [module for module in engine.runner.model.modules() if type(module).__name__ == "RadixAttention"][:2]
    q_BD = torch.randn(2, 4 * 32, generator=torch_random)

    def batch(lengths: list[int]) -> Any:
        lengths_B = torch.tensor(lengths)
        mode = SimpleNamespace(is_decode=lambda: True)
        return SimpleNamespace(
            forward_mode=mode, seq_lens=lengths_B, seq_lens_cpu=lengths_B, req_pool_indices=torch.tensor([1, 2])
        )

    def run(backend: Any, step: Any) -> list[torch.Tensor]:
        return [backend.forward_decode(q_BD, None, None, layer, step, False) for layer in layers]

    captured = batch([900, 800])
    graph.init_forward_metadata_out_graph(captured, True)
    static = graph.forward_metadata
    graph.init_forward_metadata_in_graph(captured)
    run(graph, captured)
    captured.seq_lens.copy_(torch.tensor([700, 1000]))  # the first row attends to everything now
    static.cache_seqlens_int32.copy_(captured.seq_lens)
    planned.plan_host.decode.begin(static.cache_seqlens_int32, (), static.page_table, None, rows=2)
    graph.init_forward_metadata_in_graph(captured)
    again = run(graph, captured)
    eager.init_forward_metadata(batch([700, 1000]))
    for replayed, expected in zip(again, run(eager, batch([700, 1000])), strict=True):
        assert torch.allclose(replayed, expected, atol=1e-5)
    step, dense = graph.plan_step, PagedBackend(engine.runner)
    monkeypatch.setattr(planned.plan_host, "pays", Pays(decode=Thresholds((2,), (1001,))))
    graph.init_forward_metadata_out_graph(captured)
    graph.plan_step, graph.forward_metadata = step, static  # of the graph, which computes all rows dense now
    graph.init_forward_metadata_in_graph(captured)
    dense.init_forward_metadata(captured)
    for replayed, expected in zip(run(graph, captured), run(dense, captured), strict=True):
        assert torch.allclose(replayed, expected, atol=1e-5)
