"""Sessions of agents, as far as they need no vLLM: what is asked when, what is timed, and rows of dense and sparse."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsekv.bench import turns
from sparsekv.bench.agent_traces import SHIPPED, TraceLoad, read_traces
from sparsekv.bench.harness import Row
from sparsekv.bench.turns import DENSE, SPARSE, Played, Session, Turn, TurnLoad, TurnTime, play
from sparsekv.plans.errors import BackendError


class Engine:
    """An engine that answers every request it has with one token a step."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.asked: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], answer: int) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.left[name], self.asked[name] = answer, [len(self.prompts)] * answer
        self.most = max(self.most, len(self.left))

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def abort_request(self, names: list[str]) -> None:
        assert names == []

    def step(self) -> list[SimpleNamespace]:
        self.left = {name: left - 1 for name, left in self.left.items()}
        told = [
            SimpleNamespace(
                request_id=name,
                finished=not left,
                num_cached_tokens=1,
                outputs=[SimpleNamespace(token_ids=self.asked[name])],
            )
            for name, left in self.left.items()
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return told


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(turns, "greedy", lambda tokens: tokens)
    return Engine()


def played(engine: Engine, *sessions: Session, agents: int = 1) -> Played:
    return play(SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True), sessions, agents)


def test_a_turn_goes_on_from_the_prompt_before_and_its_answer(engine: Engine) -> None:
    found = played(engine, Session((Turn((7, 8), 2), Turn((9,), 1), Turn((5,), 1, shared=1))))
    assert engine.prompts == [[7, 8], [7, 8, 1, 1, 9], [7, 5]]
    assert [(turn.agent, turn.turn, turn.context, turn.cached) for turn in found.turns] == [
        ((0,), 0, 2, 1),
        ((0,), 1, 5, 1),
        ((0,), 2, 2, 1),
    ]
    assert [turn.token is None for turn in found.turns] == [False, True, True]


def test_no_more_agents_play_at_once_than_asked_for(engine: Engine) -> None:
    sessions = [Session((Turn((at,), 3),)) for at in range(5)]
    assert len(played(engine, *sessions, agents=2).sessions) == 5
    assert engine.most == 2


def test_a_prompt_waits_for_the_agent_to_think_and_its_first_token_is_counted_from_there(engine: Engine) -> None:
    start = time.perf_counter()
    found = played(engine, Session((Turn((1,), 1), Turn((2,), 1, think=0.2))))
    assert time.perf_counter() - start >= found.sessions[0] >= 0.2
    assert found.turns[1].first < 0.2


def test_whole_sessions_warm_up_twice_and_nobody_pauses(engine: Engine) -> None:
    session = Session((Turn((1,), 1), Session((Turn((2,), 1, think=60.0),)), Turn((3,), 1, think=60.0)))
    turns.warm_up(SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True), [session], 1)
    assert [len(prompt) for prompt in engine.prompts] == [1, 1, 3] * 2


def test_an_engine_that_keeps_its_prompts_is_not_timed(engine: Engine) -> None:
    with pytest.raises(BackendError, match="prefix cache"):
        play(SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: False), [Session((Turn((1,), 1),))], 1)
    assert not engine.prompts


def test_hits_and_new_tokens_are_those_of_the_plans_engine() -> None:
    dense, sparse = (Played((TurnTime((0,), 0, 100, cached, 1.0, 0.1),), (1.0,)) for cached in (20, 50))
    row = Row(name="turns", length=100, device="cpu", dtype="float32")
    found = turns._filled(row, turns.Measured({DENSE: [dense], SPARSE: [sparse]})).data()
    assert (found["hits"], found["dense_hits"], found["turns"][0]["new"]) == (0.5, 0.2, 50)


def test_subagents_start_together_and_the_next_turn_waits_for_both(engine: Engine) -> None:
    below = Session((Turn((5,), 2), Turn((6,), 2)))
    found = played(engine, Session((Turn((1,), 1), below, below, Turn((2,), 1))))
    assert engine.prompts[1:3] == [[5], [5]]
    assert engine.prompts[-1] == [1, 1, 2]
    assert [turn.agent for turn in found.turns] == [(0,), (0, 1), (0, 2), (0, 1), (0, 2), (0,)]


def test_a_load_has_a_prompt_and_turns_of_its_own_for_each_agent() -> None:
    load = TurnLoad(context=10, new=3, turns=2, answer=4, agents=2)
    first, second = load.sessions(100, 0)
    assert [len(step.new) for step in first.steps if isinstance(step, Turn)] == [10, 3, 3]
    assert first != second
    assert first.longest == load.longest == 10 + 2 * 3 + 3 * 4
    assert load.sessions(100, 0) == (first, second)


def times(*first: float, token: float = 0.01) -> Played:
    each = (TurnTime((0,), at, 100 * (at + 1), 90, seconds, token) for at, seconds in enumerate(first))
    return Played(tuple(each), (sum(first),))


def test_turns_are_compared_in_pairs_and_the_first_of_a_session_apart() -> None:
    found = turns._compared({DENSE: [times(9.0, 2.0, 8.0, 4.0)], SPARSE: [times(1.0, 1.0, 2.0, 2.0)]})
    assert found["gain"] == pytest.approx(16 ** (1 / 3))
    assert found["gain_low"] < 2.0 < found["gain"] < found["gain_high"]
    assert found["session_gain"] == pytest.approx(23.0 / 6.0)
    assert turns._compared({SPARSE: [times(1.0, 2.0, 3.0)]})["gain"] is None
    twice = turns._compared({DENSE: [times(9.0, 2.0, 8.0, 4.0)] * 2, SPARSE: [times(1.0, 1.0, 2.0, 2.0)] * 2})
    assert twice == pytest.approx(found), "a repeat of a turn is no turn more"
    assert list(turns._milliseconds([times(9.0, 2.0, 4.0, 3.0)])) == pytest.approx([9000, 3000, 10, 18000])


# --- traces -----------------------------------------------------------------------------------------------------------


def trace(*requests: dict[str, object], scope: str = "local") -> dict[str, object]:
    return {"id": "a", "models": ["m"], "block_size": 4, "hash_id_scope": scope, "requests": list(requests)}


def request(t: float, prompt: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "model": "m", "in": prompt, "out": 2, "hash_ids": ids} | more


def prompts(engine: Engine, load: TraceLoad) -> list[list[int]]:
    played(engine, *load.sessions(1000, 0))
    return engine.prompts


Read = Callable[..., TraceLoad]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def from_data(*traces: dict[str, object]) -> TraceLoad:
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, traces)))
        return TraceLoad(read_traces(tmp_path / "trace.jsonl"))

    return from_data


def test_equal_ids_of_a_trace_are_equal_tokens_and_lengths_are_as_captured(read: Read, engine: Engine) -> None:
    load = read(trace(request(0, 8, [1, 2]), request(0, 14, [1, 2, 3, 4]), request(0, 10, [1, 3])))
    first, second, third = prompts(engine, load)
    assert [len(one) for one in (first, second, third)] == [8, 14, 10]  # 14 amid a block, 10 with two of its own behind
    assert second[:8] == first
    assert second[8:12] == third[4:8] != first[4:8]
    assert load.longest == 16


def test_equal_ids_of_two_traces_are_equal_tokens_where_their_scope_is_global(read: Read, engine: Engine) -> None:
    for scope, equal in (("local", False), ("global", True)):
        engine.prompts.clear()
        one, other = prompts(engine, read(*[trace(request(0, 8, [1, 2]), scope=scope)] * 2))
        assert (one == other) is equal


def test_agents_beyond_the_traces_have_tokens_of_their_own(read: Read) -> None:
    load = read(trace(request(0, 8, [1, 2])))
    first, second = TraceLoad(load.traces, agents=2).sessions(1000, 0)
    assert first.longest == second.longest
    assert first != second


def test_an_agent_thinks_as_captured_up_to_the_cap(read: Read) -> None:
    load = read(
        trace(
            request(0, 4, [1], api_time=2.0),
            request(2.5, 4, [1], think_time=0.25, api_time=1.0),
            request(4.0, 4, [1]),  # half a second behind the answer
            request(99.0, 4, [1]),
        )
    )
    (session,) = load.sessions(1000, 0)
    assert [step.think for step in session.steps] == [0.0, 0.25, 0.5, 1.0]  # type: ignore[union-attr]


def test_requests_of_a_subagent_are_a_session_below(read: Read) -> None:
    below = {"t": 0, "type": "subagent", "agent_id": "b", "status": "completed", "requests": [request(0, 4, [9])]}
    (session,) = read(trace(request(0, 4, [1]), below, request(1, 8, [1, 2]))).sessions(1000, 0)
    _, subagent, last = session.steps
    assert isinstance(subagent, Session)
    assert isinstance(last, Turn)
    assert (len(subagent.steps), last.shared, len(last.new)) == (1, 4, 4)


def test_the_traces_that_ship_are_those_that_the_script_makes_with_the_lengths_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from build_agent_traces import made_traces

    assert [json.loads(file.read_text()) for file in sorted(SHIPPED.iterdir())] == list(made_traces())
    lengths = [one.prompt for trace in read_traces(SHIPPED) for one in trace.requests if one.type != "subagent"]
    assert sum(length > 65536 for length in lengths) / len(lengths) == pytest.approx(0.88, abs=0.01)
    assert sum(length > 131072 for length in lengths) / len(lengths) == pytest.approx(0.61, abs=0.01)
    sessions = TraceLoad(read_traces(SHIPPED)).sessions(2, 0)
    new = sum(len(step.new) for session in sessions for step in session.steps if isinstance(step, Turn))
    assert 1 - new / sum(lengths) == pytest.approx(0.9, abs=0.01)
