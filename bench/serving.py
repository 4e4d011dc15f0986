"""Requests through an engine of vLLM in this process, so many at once, and when their tokens came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv.plans.errors import BackendError
from sparsekv.runtime.vllm import internals as vllm


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds of one clock."""

    given: float  # to the engine
    first: float  # token
    last: float


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that were served together, all with answers of the same length."""

    timings: tuple[Timing, ...]
    answer: int  # tokens

    @property
    def first_seconds(self) -> tuple[float, ...]:
        """Up to the first token of each request, from when it was given to the engine."""
        return tuple(one.first - one.given for one in self.timings)

    @property
    def token_seconds(self) -> tuple[float, ...]:
        """Between two tokens of each request's answer, on average; empty where answers are of one token."""
        return tuple((one.last - one.first) / (self.answer - 1) for one in self.timings) if self.answer > 1 else ()

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        span = max(one.last for one in self.timings) - min(one.given for one in self.timings)
        return len(self.timings) * self.answer / span


def serve(llm: Any, prompts: Sequence[Sequence[int]], answer: int, at_once: int) -> Served:
    """Serves all prompts, a new one as soon as one of `at_once` is answered.

    Args:
        llm: a `vllm.LLM`.
        prompts: tokens.
        answer: tokens of every answer, whatever the model says.
        at_once: requests that the engine has at a time.

    Raises:
        BackendError: the engine lost a request.
    """
    engine, asked = llm.llm_engine, vllm.greedy(answer)
    waiting = deque((str(number), list(prompt)) for number, prompt in enumerate(prompts))
    given: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and len(given) - len(last) < at_once:
                name, prompt = waiting.popleft()
                given[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": prompt}, asked)
            outputs, now = engine.step(), time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    last[output.request_id] = now
    except BaseException:
        engine.abort_request([name for name in given if name not in last])  # the next call uses these names again
        raise
    if given.keys() != last.keys():
        raise BackendError(f"expected {len(given)} answers of vLLM's engine, found {len(last)}; its log says why")
    return Served(tuple(Timing(given[name], first[name], last[name]) for name in given), answer)
