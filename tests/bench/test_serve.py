"""bench serve, as far as it needs no vLLM: engines, and when requests come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsekv.bench import serve as serving
from sparsekv.bench.serve import ALWAYS, DENSE, SPARSE, Load, ServeBench, serve, served_engine
from sparsekv.plans.files import load_plan


def test_engines_have_room_for_the_longest_request_and_for_all_that_come_at_once() -> None:
    bench = ServeBench((Load(1000, 10), Load(500, 600, 8, 16)), torch.device("cpu"), torch.float32, step_tokens=2048)
    assert bench.engine["max_model_len"] == 1100
    assert bench.engine["max_num_seqs"] == 8
    assert "gpu_memory_utilization" not in bench.engine
    assert "kv_cache_memory_bytes" not in bench.engine
    assert "compilation_config" not in bench.engine


@pytest.mark.parametrize("at_once", [1, 3, 8, 300])
@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("step", [300, 8192])
def test_engines_capture_short_prompts_as_an_engine_of_many_requests_does(
    at_once: int, drafted: int, step: int
) -> None:
    """Rows up to 512 are padded by less than 8 or 16, and every number of requests that decodes finds a graph."""
    load = Load(1000, 10, at_once)
    bench = ServeBench((Load(8, 1), load), torch.device("cuda"), torch.bfloat16, step_tokens=step, drafted=drafted)
    sizes = bench.engine["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted({*sizes})
    assert sizes[-1] == min(step, 512)
    for rows in range(1, sizes[-1] + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < (16 if rows > 248 else 8 if rows > 4 else 2)
    tokens = at_once * (1 + drafted)
    assert tokens in sizes or tokens > sizes[-1]


def test_both_engines_quantise_their_weights_by_the_name_that_is_given() -> None:
    bench = ServeBench((Load(8, 1),), torch.device("cpu"), torch.float32)
    assert bench.engine["quantization"] is None
    assert replace(bench, quantization="fp8_per_channel").engine["quantization"] == "fp8_per_channel"


def test_the_plan_is_executed_where_the_bench_says_or_always(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    told: list[dict[str, object]] = []

    @contextmanager
    def started(way: str, folder: str, settings: dict[str, Any]) -> Iterator[None]:
        told.append(settings["additional_config"]["sparsekv"])
        yield None

    monkeypatch.setattr(serving, "engine_elsewhere", started)
    monkeypatch.setattr(serving, "asking_for_ours", dict)
    model: Any = SimpleNamespace(folder="m", random=False)
    plan = load_plan(folder / "sparsekv.yaml")
    bench = ServeBench((Load(8, 1),), torch.device("cpu"), torch.float32)
    for way, sparse in ((SPARSE, "auto"), (SPARSE, "never"), (ALWAYS, "never"), (DENSE, "never")):
        with served_engine(way, model, plan, replace(bench, sparse=sparse)):
            pass
    assert [one.get("sparse") for one in told] == ["auto", "never", "always", None]
    assert [one.get("dense") for one in told] == [None, None, None, True]


class OneAStep:
    """An engine that answers one request a step with a token."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.most = 0

    def add_request(self, name: str, prompt: object, asked: object) -> None:
        self.waiting.append(name)
        self.most = max(self.most, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[SimpleNamespace]:
        answer = SimpleNamespace(token_ids=[1])
        return [SimpleNamespace(request_id=self.waiting.pop(0), outputs=[answer], finished=True)]


def test_prompts_are_given_when_their_time_has_come_or_as_many_at_a_time_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparsekv.bench.serve.greedy", lambda tokens: tokens)
    engine, prompts = OneAStep(), [[1, 2]] * 6
    found = serve(SimpleNamespace(llm_engine=engine), prompts, 1, 6, [0.0, 0.05, 0.05, 0.05, 0.1, 0.1])
    assert engine.most >= 3
    assert len(found.timings) == 6
    assert max(one.last for one in found.timings) - min(one.given for one in found.timings) >= 0.1
    engine = OneAStep()
    serve(SimpleNamespace(llm_engine=engine), prompts, 1, 2)
    assert engine.most == 2


class OnePromptAStep:
    """An engine that computes one prompt a step, beside a token of each answer that has begun."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.waiting: list[str] = []
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: object, asked: object) -> None:
        self.waiting.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.left)

    def step(self) -> list[SimpleNamespace]:
        if self.waiting:
            self.left[self.waiting.pop(0)] = self.answer
        told = [SimpleNamespace(request_id=name, finished=left == 1) for name, left in self.left.items()]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return told


@pytest.mark.parametrize(("prompts", "answer", "timed"), [(3, 6, 3), (6, 6, 6), (3, 3, 0), (1, 6, 5)])
def test_a_token_is_timed_while_as_many_decode_as_are_to_be_at_once(
    prompts: int, answer: int, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.bench.serve.greedy", lambda tokens: tokens)
    found = serve(SimpleNamespace(llm_engine=OnePromptAStep(answer)), [[1, 2]] * prompts, answer, 3)
    assert len(found.token_seconds) == timed
