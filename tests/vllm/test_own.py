"""The half of `bench own` in vLLM: two engines in turn, and the figures that are asked for."""

from typing import Any

from engines_here import engine_here

from sparsekv.bench.own_vllm import Engines, OwnPrompts, OwnRequest, OwnTurns, named
from sparsekv.bench.serve import DENSE, SPARSE
from sparsekv.plans.schema import Plan


def test_every_figure_that_is_asked_for_has_a_value_a_repeat_and_what_the_plan_computed(
    engine: Any, plain: Any, plan: Plan, prompts: dict[int, list[int]]
) -> None:
    request = OwnRequest(
        model="", plan="", device="cpu", dtype="float32", backend="auto", longest=2048, step_tokens=512, repeats=2
    )
    engines = Engines({DENSE: engine_here(plain), SPARSE: engine_here(engine)}, plan, request)
    text = tuple(prompts[1100][:800])
    load = OwnPrompts(length=800, answer=4, prompts=(text, text[::-1]))
    found = [*engines.requests(load)]
    assert [figure.key for figure in found] == [figure.key for figure in named(load)]
    for figure in found:
        assert not figure.failed
        assert len(figure.dense) == len(figure.plan) == 2
        assert min(*figure.dense, *figure.plan) > 0
    first, token, _ = found
    assert 0 < first.share < 1
    assert 0 < token.share < 1
    assert first.note.startswith("sparse prefill from 0 tokens")


def test_a_turn_computes_its_own_tokens_behind_the_session_so_far(
    engine: Any, plain: Any, plan: Plan, prompts: dict[int, list[int]]
) -> None:
    request = OwnRequest(
        model="", plan="", device="cpu", dtype="float32", backend="auto", longest=2048, step_tokens=512, repeats=1
    )
    engines = Engines({DENSE: engine_here(plain), SPARSE: engine_here(engine)}, plan, request)
    text = tuple(prompts[700])
    load = OwnTurns(answer=3, repeats=1, agents=((text[:512], text[512:588]), (text[1:513], text[588:664])))
    found = [*engines.played(load)]
    assert [figure.key for figure in found] == [figure.key for figure in named(load)]
    (cold, turn, session) = found
    assert (cold.length, turn.length, turn.new) == (512, 512 + 3 + 76, 76)
    assert max(turn.dense[0], cold.dense[0]) < session.dense[0]
    assert session.share is not None
