"""Requests that are timed, and the rows of `bench serve`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_here import engine_here

from sparsekv.bench import serve as serving
from sparsekv.bench.serve import SPARSE, Load, ServeBench, ServedModel, bench_serve, serve
from sparsekv.bench.turns import Session, Turn, TurnLoad, bench_turns, play
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.vllm.engine_host import serving_stats


def test_no_more_requests_than_asked_for_run_at_once_and_all_are_answered(
    engine: Any, prompts: dict[int, list[int]]
) -> None:
    asked = [prompts[200][shift:] for shift in range(5)]
    served = serve(engine, asked, answer=3, at_once=2)
    ordered = sorted(served.timings, key=lambda one: one.given)
    assert len(ordered) == 5
    assert all(one.given < one.first < one.last for one in ordered)
    assert all(later.given >= min(one.last for one in ordered[:n]) for n, later in enumerate(ordered[2:], 1))
    assert served.tokens_per_second == pytest.approx(15 / (max(o.last for o in ordered) - ordered[0].given))


def test_a_turn_finds_the_pages_of_the_prompt_before_and_of_its_answer(
    engine: Any, prompts: dict[int, list[int]]
) -> None:
    first, second = tuple(prompts[700][:380]), tuple(prompts[700][380:600])
    played = play(engine, [Session((Turn(first, 4), Turn(second, 2), Turn(second, 2, shared=128)))], 1)
    assert [(turn.context, turn.cached) for turn in played.turns] == [(380, 0), (604, 384 - 128), (348, 128)]


DELAY = 0.3  # seconds


class Delaying:
    """An engine whose steps take longer."""

    def __init__(self, llm: Any, seconds: float) -> None:
        self._llm, self.llm_engine = llm, Delayed(llm.llm_engine, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class Delayed:
    """An engine whose steps take longer, by which its times are told from another one's."""

    def __init__(self, engine: Any, seconds: float = DELAY) -> None:
        self._engine, self._seconds = engine, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        time.sleep(self._seconds)
        return self._engine.step()


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_has_the_times_of_each_engine_and_the_density_of_the_sparse_one(
    engine: Any, plain: Any, reference: LoadedModel, plan: Plan, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(prompt=6 * 128 - 8, answer=2, at_once=2, requests=2)  # 120 rows behind five cached pages are sparse
    bench = ServeBench((load,), torch.device("cpu"), torch.float32, repeats=2, alone=alone, quantization="fp8")
    model = ServedModel("", reference.info, reference.model.config.vocab_size, "tiny-retriever", random=False)
    slow = SimpleNamespace(llm_engine=Delayed(plain.llm_engine))

    @contextmanager
    def started(way: str, *_: Any) -> Iterator[Any]:
        yield engine_here(engine if way == SPARSE else slow)

    monkeypatch.setattr(serving, "served_engine", started)
    (row,) = (row.data() for row in bench_serve(model, plan, "given", bench))
    assert (row["note"], row["failures"], row["backend"], row["weights"]) == ("", 0, "cpu", "loaded, fp8")
    assert min(row["dense_ms"], row["dense_token_ms"]) >= 1e3 * DELAY
    assert row["dense_tokens_per_second"] <= 2 * load.answer / (2 * DELAY)
    assert min(row["sparse_ms"], row["token_ms"], row["tokens_per_second"]) > 0
    stats = serving_stats(engine)  # since the requests before the first that is timed
    assert 0 < row["density"] == stats.prefill_density < 1


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_has_the_turns_of_both_engines_side_by_side(
    engine: Any, plain: Any, reference: LoadedModel, plan: Plan, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ServeBench((), torch.device("cpu"), torch.float32, repeats=2, alone=alone)
    model = ServedModel("", reference.info, reference.model.config.vocab_size, "tiny-retriever", random=False)
    slow = Delaying(plain, 0.05)

    @contextmanager
    def started(way: str, *_: Any) -> Iterator[Any]:
        yield engine_here(engine if way == SPARSE else slow)

    monkeypatch.setattr("sparsekv.bench.serve.served_engine", started)
    load = TurnLoad(context=512, new=192, turns=2, answer=3, agents=2)
    (row,) = (row.data() for row in bench_turns(model, plan, "given", [load], bench))
    assert (row["note"], row["failures"], row["backend"], row["length"]) == ("", 0, "cpu", load.longest)
    assert min(row["dense_ms"], row["dense_cold_ms"], row["dense_token_ms"]) >= 50
    assert min(row["sparse_ms"], row["cold_ms"], row["token_ms"], row["session_ms"]) > 0
    assert row["gain_low"] <= row["gain"] <= row["gain_high"]
    assert [(one["agent"], one["turn"]) for one in row["turns"]] == [
        ([at], turn) for at in (0, 1) for turn in (0, 1, 2)
    ]
    assert 0 < row["density"] < 1
    assert 0.5 < row["hits"] < 0.7
    assert 0.5 < row["dense_hits"] < 0.7
