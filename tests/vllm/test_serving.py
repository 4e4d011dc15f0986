"""Requests that are timed, and the rows of `bench serve`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsekv.bench import serve as serving
from sparsekv.bench.serve import SPARSE, Load, ServeBench, ServedModel, bench_serve, serve
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


DELAY = 0.3  # seconds


class Delayed:
    """An engine whose steps take longer, by which its times are told from another one's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        time.sleep(DELAY)
        return self._engine.step()


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_has_the_times_of_each_engine_and_the_density_of_the_sparse_one(
    engine: Any, plain: Any, reference: LoadedModel, plan: Plan, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(prompt=6 * 128 - 8, answer=2, at_once=2, requests=2)  # 120 rows behind five cached pages are sparse
    bench = ServeBench((load,), torch.device("cpu"), torch.float32, repeats=2, alone=alone)
    model = ServedModel("", reference.info, reference.model.config.vocab_size, "tiny-retriever", random=False)
    slow = SimpleNamespace(llm_engine=Delayed(plain.llm_engine))

    @contextmanager
    def started(way: str, *_: Any) -> Iterator[Any]:
        yield engine if way == SPARSE else slow

    monkeypatch.setattr(serving, "_engine", started)
    monkeypatch.setattr(serving, "_elsewhere", lambda run, *args: run(*args))
    (row,) = (row.data() for row in bench_serve(model, plan, "given", bench))
    assert (row["note"], row["failures"], row["backend"]) == ("", 0, "cpu")
    assert min(row["dense_ms"], row["dense_token_ms"]) >= 1e3 * DELAY
    assert row["dense_tokens_per_second"] <= 2 * load.answer / (2 * DELAY)
    assert min(row["sparse_ms"], row["token_ms"], row["tokens_per_second"]) > 0
    stats = serving_stats(engine)  # since the requests before the first that is timed
    assert 0 < row["density"] == stats.prefill_density < 1
