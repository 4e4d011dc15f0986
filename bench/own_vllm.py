"""The half of `bench own` in vLLM, in the environment that has it: `python -m sparsekv.bench.own_vllm REQUEST FIGURES`.

Two engines take turns, one by the plan and one dense, with half of the device each and prefix caching on; nothing is
cached when a repeat begins. Each figure is a line of FIGURES as soon as it is known.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from sparsekv.bench.harness import in_short, program, repeat_in_turn
from sparsekv.bench.own_file import Name, OwnFigure
from sparsekv.bench.serve import DENSE, SPARSE, Load, ServeBench, Served, serve, served_engine, served_model
from sparsekv.bench.turns import WARM_UPS, Played, Session, Turn, play, warm_up
from sparsekv.bench.vllm_engines import Engine, forget_prompts
from sparsekv.plans.brief import decode_share
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.settings import preset_vllm

Found = TypeVar("Found")
Tokens = tuple[int, ...]


class OwnPrompts(BaseModel):
    """Prompts that are served together, and tokens of each answer; `length` is their nominal one."""

    model_config = ConfigDict(frozen=True)
    length: int
    answer: int
    prompts: tuple[Tokens, ...]


class OwnTurns(BaseModel):
    """Agents that play at once: the tokens of each one's turns, of which the first is its context."""

    model_config = ConfigDict(frozen=True)
    answer: int
    repeats: int
    agents: tuple[tuple[Tokens, ...], ...]

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        lengths = [len(turn) for turn in self.agents[0]]
        return tuple(sum(lengths[: at + 1]) + at * self.answer for at in range(len(lengths)))

    @property
    def sessions(self) -> list[Session]:
        return [Session(tuple(Turn(turn, self.answer) for turn in turns)) for turns in self.agents]


class OwnRequest(BaseModel):
    """All that the other environment is told."""

    model_config = ConfigDict(frozen=True)
    model: str
    plan: str
    device: str
    dtype: str
    backend: str
    longest: int
    step_tokens: int
    repeats: int
    quantization: str | None = None
    sparse: str = "auto"
    prompts: tuple[OwnPrompts, ...] = ()
    turns: tuple[OwnTurns, ...] = ()

    @property
    def loads(self) -> tuple[OwnPrompts | OwnTurns, ...]:
        return (*self.prompts, *self.turns)

    @property
    def bench(self) -> ServeBench:
        most = max((len(part.prompts) for part in self.prompts), default=1)
        most = max(most, *(len(part.agents) for part in self.turns), 1)
        return ServeBench(
            (Load(self.longest, 0, most),),
            torch.device(self.device),
            getattr(torch, self.dtype),
            step_tokens=self.step_tokens,
            backend=self.backend,
            prefix_caching=True,
            quantization=self.quantization,
            sparse=self.sparse,
        )


class Engines:
    """Both engines, and what is timed of them in turn."""

    def __init__(self, engines: Mapping[str, Engine], plan: Plan, request: OwnRequest) -> None:
        from sparsekv.runtime.vllm import internals as vllm

        self.engines, self.plan, self.repeats = engines, plan, request.repeats
        device = device_name(request.bench.device)
        self.facts: dict[str, Any] = {"half": "vllm", "way": f"vLLM {vllm.release}", "device": device}
        self.facts["host"] = (
            f"vLLM {vllm.release}, torch {torch.__version__}, {dtype_name(request.bench.dtype)}, "
            f"steps of {request.step_tokens:,} tokens, {program()}"
        )

    def requests(self, load: OwnPrompts) -> Iterator[OwnFigure]:
        """First token, a token, and output tokens a second of prompts that are served together."""
        at_once = len(load.prompts)

        def run(way: str) -> Served:
            self.engines[way](forget_prompts)
            served: Served = self.engines[way](serve, load.prompts, load.answer, at_once)
            return served

        for way in (*self.engines,) * WARM_UPS:
            run(way)
        turns, counted, note = self._in_turn(run, self.repeats)
        values: dict[Name, Callable[[Served], float | None]] = {
            "first token": lambda run: statistics.median(run.first_seconds) * 1e3,
            "token": lambda run: statistics.median(run.token_seconds) * 1e3 if run.token_seconds else None,
            "tokens/s": lambda run: run.tokens_per_second,
        }
        shares: dict[Name, float | None] = {"first token": counted.prefill_density}
        shares["token"] = self._decode_share(counted, load.length)
        for name, value in values.items():
            facts = {"length": load.length, "at_once": at_once, "share": shares.get(name), "note": note}
            yield self._figure(name, {way: [*map(value, runs)] for way, runs in turns.items()}, counted, facts)

    def played(self, load: OwnTurns) -> Iterator[OwnFigure]:
        """The first token of every turn, and whole sessions."""
        agents = len(load.agents)

        def run(way: str) -> Played:
            played: Played = self.engines[way](play, load.sessions, agents)
            return played

        for engine in self.engines.values():
            engine(warm_up, load.sessions, agents)
        turns, counted, note = self._in_turn(run, load.repeats)
        facts: dict[str, Any] = {"at_once": agents, "note": note}
        for at, context in enumerate(load.contexts):
            first = {way: [_first_ms(one, at) for one in runs] for way, runs in turns.items()}
            own = {"length": context, "turn": at + 1, "new": len(load.agents[0][at])}
            yield self._figure("turn", first, counted, facts | own)
        seconds = {way: [statistics.median(one.sessions) * 1e3 for one in runs] for way, runs in turns.items()}
        facts |= {"length": load.contexts[-1], "turn": len(load.contexts), "share": counted.prefill_density}
        yield self._figure("session", seconds, counted, facts)

    def _in_turn(self, run: Callable[[str], Found], repeats: int) -> tuple[dict[str, list[Found]], Any, str]:
        """Repeats of each engine, what the plan's engine counted, and its rule or what ended the repeats."""
        from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

        sparse = self.engines[SPARSE]
        sparse(reset_stats)
        turns = {way: [run(way)] for way in (DENSE, SPARSE)}
        ended = repeat_in_turn(turns, run, repeats)
        return turns, sparse(serving_stats), ended or sparse(rule_of)

    def _decode_share(self, counted: Any, length: int) -> float:
        """The share of cached tokens that was read, over all decoded tokens."""
        decoded = counted.decode_sparse + counted.decode_dense
        sparse = counted.decode_sparse / decoded if decoded else 0.0
        return 1.0 - sparse * (1.0 - (decode_share(self.plan, length).computed or 1.0))

    def _figure(self, name: Name, runs: Mapping[str, Sequence[float | None]], counted: Any, facts: Any) -> OwnFigure:
        failed = f"{counted.failures} chunks of a layer ran dense after an error" if counted.failures else ""
        if not failed and None in (*runs[DENSE], *runs[SPARSE]):
            failed = "requests never decoded together"
        values: dict[str, Any] = {} if failed else {"dense": tuple(runs[DENSE]), "plan": tuple(runs[SPARSE])}
        return OwnFigure(name=name, failed=failed, **self.facts, **facts, **values)


def _first_ms(played: Played, turn: int) -> float:
    """The median over agents."""
    return statistics.median(one.first for one in played.turns if one.turn == turn) * 1e3


def rule_of(llm: Any) -> str:
    """Where an engine is sparse, in words."""
    rule: str = llm.apply_model(_rule)[0]
    return rule


def _rule(model: Any) -> str:
    from sparsekv.runtime.vllm.engine_host import plan_host

    host = plan_host(model)
    return host.pays.told if host else ""


def named(load: OwnPrompts | OwnTurns) -> tuple[OwnFigure, ...]:
    """The figures of a load, without values."""
    if isinstance(load, OwnPrompts):
        names: tuple[Name, ...] = ("first token", "token", "tokens/s")
        facts: dict[str, Any] = {"half": "vllm", "length": load.length, "at_once": len(load.prompts)}
        return tuple(OwnFigure(name=name, **facts) for name in names[: 1 if load.answer < 2 else 3])
    facts = {"half": "vllm", "at_once": len(load.agents)}
    turns = [OwnFigure(name="turn", length=n, turn=at, **facts) for at, n in enumerate(load.contexts, 1)]
    return (*turns, OwnFigure(name="session", length=load.contexts[-1], turn=len(load.contexts), **facts))


def measure(request: OwnRequest, add: Callable[[OwnFigure], None]) -> None:
    plan = load_plan(Path(request.plan))
    with (
        served_model(request.model, False, request.longest) as model,
        served_engine(SPARSE, model, plan, request.bench) as sparse,  # first: it refuses what cannot be served
        served_engine(DENSE, model, plan, request.bench) as dense,
    ):
        engines = Engines({DENSE: dense, SPARSE: sparse}, plan, request)
        for load in request.loads:
            left = {figure.key: figure for figure in named(load)}
            try:
                for figure in engines.requests(load) if isinstance(load, OwnPrompts) else engines.played(load):
                    add(figure)
                    del left[figure.key]
            except Exception as error:  # out of memory; the engine's own
                for figure in left.values():
                    add(figure.model_copy(update={"failed": in_short(error)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=Path, help="a file of an OwnRequest")
    parser.add_argument("figures", type=Path, help="where the figures go")
    args = parser.parse_args()
    preset_vllm()
    with args.figures.open("a") as file:

        def add(figure: OwnFigure) -> None:
            file.write(figure.model_dump_json() + "\n")
            file.flush()

        measure(OwnRequest.model_validate_json(args.request.read_bytes()), add)


if __name__ == "__main__":
    main()
