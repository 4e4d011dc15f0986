"""`sparsekv bench serve --turns`: sessions of agents through vLLM's engine, by a plan and without one.

A prompt of a session begins with the one before and its answer, which the engine has cached (prefix caching is on), so
that a turn computes its new tokens alone. Tokens are random, answers have a fixed length, and times are the client's:
from when a prompt is given (when the answer before came, and the agent has thought) to its first token, by token, and
of a whole session.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from typing import Any, Protocol

from scipy.stats import ttest_1samp

from sparsekv.bench.harness import Columns, Row, number
from sparsekv.bench.serve import DENSE, SPARSE, Load, Measured, ServeBench, ServedModel, by_engines, facts_of, noting
from sparsekv.bench.vllm_engines import Engine, forget_prompts, greedy
from sparsekv.planner.progress import Progress, StageStep
from sparsekv.plans.errors import BackendError
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.settings import preset_vllm

COLUMNS: Columns = {
    "longest": ("length", number("d")),
    "new": ("new", number("d")),
    "agents": ("agents", number("d")),
    "turns": ("turn_count", number("d")),
    "hits dense": ("dense_hits", number(".3f")),
    "sparse    ": ("hits", number(".3f")),
    "density": ("density", number(".3f")),
    "cold s dense": ("dense_cold_ms", number(".2f", 1e3)),
    "sparse": ("cold_ms", number(".2f", 1e3)),
    "turn ms dense": ("dense_ms", number(".0f")),
    "sparse ": ("sparse_ms", number(".0f")),
    "gain": ("gain", number(".2f")),
    "from": ("gain_low", number(".2f")),
    "to": ("gain_high", number(".2f")),
    "token ms dense": ("dense_token_ms", number(".2f")),
    "sparse  ": ("token_ms", number(".2f")),
    "session s dense": ("dense_session_ms", number(".2f", 1e3)),
    "sparse   ": ("session_ms", number(".2f", 1e3)),
    "session gain": ("session_gain", number(".2f")),
}
_CONFIDENCE = 0.95
WARM_UPS = 2  # graphs are captured when a size of chunks comes the second time
_OURS = ("cold_ms", "sparse_ms", "token_ms", "session_ms")
_IDLE = 1e-3  # seconds until it is asked again whether an agent has thought to the end


# --- sessions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of a session.

    Attributes:
        new: the tokens behind what the prompt shares with the session so far.
        answer: tokens of the answer.
        shared: leading tokens of the session so far (the prompt before and its answer) with which the prompt begins;
            None takes all.
        think: seconds between the answer before and this prompt.
    """

    new: tuple[int, ...]
    answer: int
    shared: int | None = None
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of an agent, one after the other.

    A session among them is of a subagent: it starts with the answer before it, beside other subagents there, and the
    next turn waits for them.
    """

    steps: tuple[Turn | Session, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, of subagents too."""
        context, most = 0, 0
        for step in self.steps:
            if isinstance(step, Session):
                most = max(most, step.longest)
            else:
                context = (context if step.shared is None else step.shared) + len(step.new) + step.answer
                most = max(most, context)
        return most


class SessionLoad(Protocol):
    """Sessions for an engine, of which it has `agents` at a time."""

    @property
    def agents(self) -> int: ...

    @property
    def new(self) -> int | None:
        """Tokens of every turn but the first, where all have as many."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""

    def sessions(self, vocabulary: int, seed: int) -> tuple[Session, ...]: ...


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Agents with equal sessions, all at once.

    Attributes:
        context: tokens of the first prompt.
        new: tokens of each turn behind it.
        turns: behind the first prompt.
        answer: tokens of every answer.
    """

    context: int
    new: int
    turns: int
    answer: int
    agents: int = 1

    @property
    def longest(self) -> int:
        return self.context + self.turns * self.new + (self.turns + 1) * self.answer

    def sessions(self, vocabulary: int, seed: int) -> tuple[Session, ...]:
        source = random.Random(seed)

        def turn(length: int) -> Turn:
            return Turn(tuple(source.randrange(1, vocabulary) for _ in range(length)), self.answer)

        lengths = (self.context, *[self.new] * self.turns)
        return tuple(Session(tuple(map(turn, lengths))) for _ in range(self.agents))


# --- the client -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnTime:
    """One turn by the client's clock, in seconds.

    Attributes:
        agent: the number of its session, followed by those of subagents below it.
        context: tokens of its prompt, of which the engine had `cached`.
        token: between two tokens of the answer, on average; None of an answer of one.
    """

    agent: tuple[int, ...]
    turn: int
    context: int
    cached: int
    first: float
    token: float | None


@dataclass(frozen=True, slots=True)
class Played:
    """Sessions that were played together.

    Attributes:
        sessions: seconds of each, from its first prompt to its last token.
    """

    turns: tuple[TurnTime, ...]
    sessions: tuple[float, ...]


@dataclass
class _Request:
    """A request in the engine, and the future of its end."""

    ended: asyncio.Future[None]
    first: float = 0.0
    last: float = 0.0
    cached: int = 0
    answer: list[int] = field(default_factory=list)


class _Client:
    """Requests to an engine of this process."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._requests: dict[str, _Request] = {}
        self._asked = 0

    async def ask(self, prompt: Sequence[int], answer: int) -> _Request:
        request, name = _Request(asyncio.get_running_loop().create_future()), str(self._asked)
        self._asked += 1
        self._requests[name] = request
        self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy(answer))
        await request.ended
        return request

    def step(self) -> bool:
        """Computes a step of the requests; False where there are none."""
        if not self._requests:
            return False
        outputs, now = self._engine.step(), time.perf_counter()
        for output in outputs:
            request = self._requests[output.request_id]
            request.first = request.first or now
            if output.finished:
                request.last, request.cached = now, output.num_cached_tokens or 0
                request.answer = list(output.outputs[0].token_ids)
                del self._requests[output.request_id]
                request.ended.set_result(None)
        if self._requests and not self._engine.has_unfinished_requests():
            raise BackendError(f"expected {len(self._requests)} more answers of vLLM's engine; its log says why")
        return True

    def abort(self) -> None:
        self._engine.abort_request(list(self._requests))


def play(llm: Any, sessions: Sequence[Session], agents: int) -> Played:
    """Plays sessions, a new one as soon as one of `agents` has ended, with nothing cached before."""
    forget_prompts(llm)
    return asyncio.run(_play(_Client(llm), sessions, agents))


def warm_up(llm: Any, sessions: Sequence[Session], agents: int) -> None:
    """Plays sessions without pauses until nothing of them is compiled or captured any more."""
    for _ in range(WARM_UPS):
        play(llm, [*map(_without_pauses, sessions)], agents)


def _without_pauses(session: Session) -> Session:
    steps = (_without_pauses(step) if isinstance(step, Session) else replace(step, think=0.0) for step in session.steps)
    return Session(tuple(steps))


async def _play(client: _Client, sessions: Sequence[Session], agents: int) -> Played:
    waiting, turns, seconds = deque(enumerate(sessions)), list[TurnTime](), dict[int, float]()

    async def agent() -> None:
        while waiting:
            at, session = waiting.popleft()
            start = time.perf_counter()
            seconds[at] = await _run(client, session, (at,), start, turns) - start

    playing = asyncio.gather(*(agent() for _ in range(agents)))
    try:
        while not playing.done():
            await asyncio.sleep(0 if client.step() else _IDLE)
        await playing
    finally:
        client.abort()  # the next client uses these names again
    return Played(tuple(turns), tuple(seconds[at] for at in range(len(sessions))))


async def _run(client: _Client, session: Session, agent: tuple[int, ...], start: float, turns: list[TurnTime]) -> float:
    """Plays a session from a time on, appends its turns, and returns the time of its end."""
    history, now, below = list[int](), start, list[asyncio.Task[float]]()
    for at, step in enumerate(session.steps):
        if isinstance(step, Session):
            below.append(asyncio.create_task(_run(client, step, (*agent, at), now, turns)))
            continue
        now = max([now, *[await each for each in below]])
        below.clear()
        given = now + step.think
        if step.think:
            await asyncio.sleep(max(0.0, given - time.perf_counter()))
        prompt = [*history[: step.shared], *step.new]
        request = await client.ask(prompt, step.answer)
        token = (request.last - request.first) / (step.answer - 1) if step.answer > 1 else None
        turns.append(TurnTime(agent, at, len(prompt), request.cached, request.first - given, token))
        history, now = prompt + request.answer, request.last
    return max([now, *[await each for each in below]])


# --- rows -------------------------------------------------------------------------------------------------------------


def bench_turns(
    model: ServedModel,
    plan: Plan,
    words: str,
    loads: Sequence[SessionLoad],
    bench: ServeBench,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Plays every load by both engines, and gives its row as soon as it is known.

    A row's `length` is its longest context. `dense_ms` and `sparse_ms` are medians over the turns behind the first of a
    session, `cold_ms` over the first, up to the first token; `token_ms` is between tokens of an answer, whatever else
    the engine does then. `gain` is the geometric mean of dense over sparse, with its 95% interval over
    turns, each a mean over its repeats; `hits` and `dense_hits` are the shares of prompt tokens that each engine had
    cached. `turns` has each turn, as medians over the repeats; its `new` tokens are those of the plan's engine.

    Args:
        words: says what the plan is, for the rows.
        bench: settings of both engines; its loads are replaced by these.
    """
    preset_vllm()
    most = max(load.longest for load in loads)
    bench = replace(bench, loads=tuple(Load(most, 0, load.agents) for load in loads), prefix_caching=True)
    with (progress or Progress()).stage("turns", total=(2 if bench.alone else 1) * len(loads)) as step:
        each = partial(_each, loads=loads, model=model, bench=bench)
        for load, found in by_engines(model, plan, bench, loads, each, step):
            row = Row(
                name="turns",
                length=load.longest,
                backend=bench.backend,
                device=device_name(bench.device),
                dtype=dtype_name(bench.dtype),
                own={"new": load.new, "agents": load.agents, "failures": 0} | facts_of(model, bench, words),
                note=model.note,
            )
            yield _filled(row, found)


def _each(
    engines: Mapping[str, Engine],
    step: StageStep,
    *,
    loads: Sequence[SessionLoad],
    model: ServedModel,
    bench: ServeBench,
) -> Iterator[Measured[Played]]:
    for load in loads:
        step.advance(0, note=f"{load.agents} of {format_length(load.longest)}")
        found, sessions = Measured[Played](), load.sessions(model.vocabulary, bench.seed)
        with noting(found):
            for engine in engines.values():
                engine(warm_up, sessions, load.agents)
            found.take_turns(engines, partial(_played, engines, sessions, load.agents), bench.repeats)
        yield found
        step.advance()


def _played(engines: Mapping[str, Engine], sessions: Sequence[Session], agents: int, way: str) -> Played:
    played: Played = engines[way](play, sessions, agents)
    return played


def _filled(row: Row, found: Measured[Played]) -> Row:
    for way, runs in found.turns.items():
        names = (name if way == SPARSE else f"dense_{name.removeprefix('sparse_')}" for name in _OURS)
        row = row.plus(**dict(zip(names, _milliseconds(runs), strict=True)))
    row = found.filled(row).plus(**_compared(found.turns), turns=list(_turns(found.turns)))
    for way, runs in found.turns.items():
        every = [turn for run in runs for turn in run.turns]
        hits = sum(turn.cached for turn in every) / sum(turn.context for turn in every)
        row = row.plus(turn_count=len(runs[0].turns), **{"hits" if way == SPARSE else "dense_hits": hits})
    return row


def _milliseconds(runs: Sequence[Played]) -> Iterator[float | None]:
    """Medians over all turns: the first of sessions, the others, between tokens; and of sessions."""
    every = [turn for run in runs for turn in run.turns]
    yield _median(turn.first for turn in every if not turn.turn)
    yield _median(turn.first for turn in every if turn.turn)
    yield _median(turn.token for turn in every if turn.token is not None)
    yield _median(seconds for run in runs for seconds in run.sessions)


def _median(seconds: Iterable[float]) -> float | None:
    each = list(seconds)
    return statistics.median(each) * 1e3 if each else None


def _compared(runs: Mapping[str, Sequence[Played]]) -> dict[str, float | None]:
    """Dense over sparse: of the turns behind the first, each a mean over its repeats, with an interval; and of whole
    sessions."""
    pairs = list(zip(runs.get(DENSE, ()), runs.get(SPARSE, ()), strict=False))
    repeats = defaultdict[Any, list[float]](list)
    for both in pairs:
        for dense, sparse in zip(*(sorted(run.turns, key=_place) for run in both), strict=True):
            if sparse.turn:
                repeats[_place(sparse)].append(log(dense.first / sparse.first))
    turns = [statistics.mean(logs) for logs in repeats.values()]
    sessions = [log(sum(dense.sessions) / sum(sparse.sessions)) for dense, sparse in pairs]
    gains = dict.fromkeys(("gain", "gain_low", "gain_high", "session_gain"))
    if len(turns) > 1:
        interval = ttest_1samp(turns, 0.0).confidence_interval(_CONFIDENCE)
        gains |= {"gain": exp(statistics.mean(turns)), "gain_low": exp(interval.low), "gain_high": exp(interval.high)}
    return gains | ({"session_gain": exp(statistics.mean(sessions))} if sessions else {})


def _place(turn: TurnTime) -> tuple[tuple[int, ...], int]:
    return turn.agent, turn.turn


def _turns(runs: Mapping[str, Sequence[Played]]) -> Iterator[dict[str, Any]]:
    """Each turn as JSON data, its times as medians over the repeats, its new tokens by the plan where that ran."""
    by_way = {way: [sorted(run.turns, key=_place) for run in each] for way, each in runs.items()}
    for at, turn in enumerate(by_way.get(SPARSE, by_way.get(DENSE, [[]]))[0]):
        same = {way: [run[at] for run in each] for way, each in by_way.items()}
        data: dict[str, Any] = {"agent": list(turn.agent), "turn": turn.turn, "context": turn.context}
        data["new"] = turn.context - turn.cached
        data |= {f"{way}_ms": _median(one.first for one in each) for way, each in same.items()}
        yield data
