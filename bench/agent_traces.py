"""Captured sessions of coding agents, in the public format of kv-cache-tester (Weka), which AIPerf replays too.

A trace has no texts, but for each request its time, the lengths of prompt and answer, and an id for each block of its
prompt. Equal ids are equal tokens: here those that a generator seeded with the id draws. The traces that ship are of
tools/build_agent_traces.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from sparsekv.bench.turns import Session, Turn
from sparsekv.plans.errors import UsageError

SHIPPED = Path(__file__).with_name("data") / "agents"


class TraceRequest(BaseModel):
    """A request, as it was captured.

    Attributes:
        t: seconds from the beginning of the session.
        hash_ids: of the prompt's blocks; the last may be longer than what is left of the prompt, and tokens behind it
            are this request's own.
        api_time: seconds that the server took.
        think_time: seconds of the agent before the request.
    """

    type: Literal["n", "s"]
    t: float = Field(ge=0)
    prompt: int = Field(alias="in", ge=1)
    answer: int = Field(alias="out", ge=0)
    hash_ids: tuple[int, ...] = ()
    api_time: float | None = None
    think_time: float | None = None


class Subagent(BaseModel):
    """Requests of an agent that another one started, and waits for."""

    type: Literal["subagent"]
    requests: tuple[Entry, ...] = ()


Entry = Annotated[TraceRequest | Subagent, Field(discriminator="type")]


class Trace(BaseModel):
    """The capture of a session.

    Attributes:
        block_size: tokens of a block.
        hash_id_scope: whether equal ids in other traces are equal tokens.
    """

    id: str
    block_size: int = Field(gt=0)
    hash_id_scope: Literal["local", "global"] = "local"
    requests: tuple[Entry, ...] = Field(min_length=1)


def read_traces(path: Path) -> tuple[Trace, ...]:
    """The traces of a file: one, a list of them, or one a line (`.jsonl`); or of the `.json` files of a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    try:
        found = tuple(trace for file in files for trace in _traces(file))
    except (OSError, ValueError) as error:
        reason = error.errors()[0] if isinstance(error, ValidationError) else error
        raise UsageError(
            f"expected traces of agents as kv-cache-tester writes them in {path}, found {reason}"
        ) from None
    if not found:
        raise UsageError(f"expected a folder with traces of agents (*.json), found none in {path}")
    return found


def _traces(file: Path) -> tuple[Trace, ...]:
    text = file.read_text()
    data = [json.loads(line) for line in text.splitlines() if line] if file.suffix == ".jsonl" else json.loads(text)
    return TypeAdapter(tuple[Trace, ...]).validate_python(data if isinstance(data, list) else [data])


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Agents that replay traces, each with tokens of its own where there are more agents than traces.

    Attributes:
        think: seconds that an agent thinks at most.
    """

    traces: tuple[Trace, ...]
    agents: int = 1
    think: float = 1.0

    @property
    def new(self) -> None:
        return None

    @property
    def longest(self) -> int:
        return max(session.longest for session in self.sessions(2, 0))

    def sessions(self, vocabulary: int, seed: int) -> tuple[Session, ...]:
        copies = max(self.agents, len(self.traces))
        return tuple(
            _session(trace.requests, _Tokens(vocabulary, trace.block_size, _scope(trace, seed, copy)), self.think)
            for copy, trace in enumerate(islice(cycle(self.traces), copies))
        )


def _scope(trace: Trace, seed: int, copy: int) -> str:
    return str(seed) if trace.hash_id_scope == "global" else f"{seed} {copy}"


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of the blocks of a scope."""

    vocabulary: int
    block: int
    scope: str

    def prompt(self, request: TraceRequest, start: int) -> tuple[int, ...]:
        """The tokens of a prompt from that of number `start` on."""
        first = start // self.block
        blocks = [token for name in request.hash_ids[first:] for token in self._drawn(name, self.block)]
        tail = request.prompt - first * self.block - len(blocks)
        own = self._drawn(f"{request.t} {request.hash_ids[-1:]}", max(0, tail))
        return tuple([*blocks, *own][start - first * self.block : request.prompt - first * self.block])

    def _drawn(self, name: object, length: int) -> list[int]:
        source = random.Random(f"{self.scope} {name}")
        return [source.randrange(1, self.vocabulary) for _ in range(length)]


def _session(entries: Sequence[Entry], tokens: _Tokens, think: float) -> Session:
    steps: list[Turn | Session] = []
    before: TraceRequest | None = None
    for entry in entries:
        if isinstance(entry, Subagent):
            steps.append(_session(entry.requests, tokens, think))
            continue
        shared = _shared(before, entry, tokens.block)
        paused = min(think, _thought(before, entry))
        steps.append(Turn(tokens.prompt(entry, shared), max(1, entry.answer), shared, paused))
        before = entry
    return Session(tuple(steps))


def _shared(before: TraceRequest | None, request: TraceRequest, block: int) -> int:
    """Leading tokens that a prompt has as the one before."""
    if before is None:
        return 0
    pairs = zip(before.hash_ids, request.hash_ids, strict=False)
    blocks = sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))
    return min(blocks * block, before.prompt, request.prompt)


def _thought(before: TraceRequest | None, request: TraceRequest) -> float:
    if before is None:
        return 0.0
    if request.think_time is not None:
        return request.think_time
    return max(0.0, request.t - before.t - (before.api_time or 0.0))
