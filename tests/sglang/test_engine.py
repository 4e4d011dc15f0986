"""Whether a plan gives in an engine of SGLang what it gives in the transformers host, however requests come."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from sglang_engine import BUDGET, NEW, SLOTS, Asked, Engine
from vllm_engine import Oracle

from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(f"{length} {seed}").choices(range(1, 128), k=length)


def assert_same(request: Asked, oracle: Oracle) -> None:
    cached = [start for start in request.starts[:1] if start]  # by chance another prompt begins with the same token
    answer = oracle(request.prompt, [*cached, *request.cuts[0][:-1]], request.new)
    assert request.tokens == answer.tokens
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


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_at_once_are_each_answered_as_alone(
    engine: Engine, planned: Any, sparse: Oracle, seed: int
) -> None:
    """Steps have chunks of several prompts, sparse and dense, beside rows that decode, of which some choose."""
    random = Random(seed)
    requests = [
        Asked(prompt_of(random.randrange(30, 1200), seed), random.randrange(2, 24), at=random.randrange(20))
        for _ in range(7)
    ]
    engine.answer(requests, overlap=bool(seed % 2))
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
    engine: Engine, sparse: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
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
