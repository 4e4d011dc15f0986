"""The prefill bench on tiny models: dense and sparse of the same model."""

from dataclasses import replace

import pytest
import torch
from host_pages import page_on_the_host
from tiny_models import tiny_model
from tiny_plans import every_head, info_of, plan_for

from sparsekv.bench.prefill import SPARSE, PrefillBench, PrefillRuns, bench_prefill
from sparsekv.bench.random_model import BenchModel
from sparsekv.plans.patterns import AShape, tokens

STATIC = AShape(sink=tokens(64), window=tokens(64))
THEIRS, OURS = "transformers, SDPA", "sparsekv dense"
FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(layers=2, context=1024)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


@pytest.fixture(scope="module")
def plan(subject):
    return plan_for(subject.model, every_head(subject.model, STATIC))


def rows_of(subject, plan, **options):
    bench = PrefillBench(**{"lengths": (512,), "repeats": 1} | options)
    return list(bench_prefill(subject, plan, "static", bench))


@pytest.fixture
def changed(monkeypatch):
    """Runs prefills, and gives back what `change` makes of (way, ids, layers, run), or raises what it raises."""
    real = PrefillRuns.run

    def put(change):
        def run(self, way, ids_1S, layers=None):
            return change(way, ids_1S, layers, real(self, way, ids_1S, layers))

        monkeypatch.setattr(PrefillRuns, "run", run)

    return put


def test_a_row_has_both_times_the_density_and_every_way_to_run_dense(subject, plan):
    (data,) = (row.data() for row in rows_of(subject, plan, repeats=3))
    assert 0 < data["density"] < 1
    assert data["tflops"] > 0
    assert data["dense_peers_ms"].keys() == {THEIRS, OURS}
    assert data["dense_ms"] == min(data["dense_peers_ms"].values())
    assert (data["weights"], data["plan"], data["note"]) == ("random", "static", "weights are random")
    assert data["kv_bytes_device"] == 2 * 2 * 2 * 512 * 32 * 4  # k and v, layers, heads, tokens, size, bytes
    assert data["dense_peak_bytes"] is data["peak_ratio"] is None
    (pieces,) = rows_of(subject, plan, chunk=256)
    assert pieces.density == pytest.approx(data["density"])


@pytest.mark.parametrize(
    ("sparse", "sizes"), [("always", {256}), ("never", {512}), ("prefill=128x512 decode=never", {256})]
)
def test_a_prompt_that_is_dense_throughout_is_not_cut(subject, plan, sparse, sizes):
    seen = set()
    note = subject.model.model.layers[0].register_forward_pre_hook(lambda layer, args: seen.add(args[0].shape[1]))
    runs = PrefillRuns(subject.model, plan, PrefillBench(lengths=(512,), chunk=256, sparse=sparse))
    runs.run(SPARSE, runs.prompt(512))
    note.remove()
    assert seen == sizes


@pytest.mark.parametrize(("fits", "ran_whole"), [(True, OURS), (False, THEIRS)])
def test_of_a_very_long_prompt_the_way_that_is_fastest_on_a_part_and_runs_on_all_is_timed(
    subject, plan, changed, fits, ran_whole
):
    ran = []

    def ours_is_faster(way, ids, layers, run):
        if way == SPARSE:
            return run
        ran.append((way, ids.shape[1], layers))
        if layers is None and way == OURS and not fits:
            raise FULL
        return run if layers is None else replace(run, milliseconds=layers * (50.0 if way == OURS else 80.0))

    changed(ours_is_faster)
    (row,) = rows_of(subject, plan, ranked_from=512)
    assert list(row.peers.timed_ms) == [ran_whole]
    assert row.peers.refused.keys() == {THEIRS, OURS} - {ran_whole}
    whole = [OURS] if fits else [OURS, THEIRS]
    parts = [(way, 128, layers) for way in (THEIRS, OURS) for layers in (1, 2)]
    assert list(dict.fromkeys(ran)) == parts + [(way, 512, None) for way in whole]


def test_a_row_names_the_backend_that_ran_and_why_torch_built_the_indices(subject, plan, changed):
    changed(lambda way, ids, layers, run: replace(run, backend="slower", builder_failed="no kernel image"))
    (row,) = rows_of(subject, plan)
    assert row.backend == "slower"
    assert "no kernel image" in row.note


def test_a_sparse_run_that_fails_leaves_the_dense_times(subject, plan, changed):
    def failing(way, ids, layers, run):
        if way == SPARSE:
            raise FULL
        return run

    changed(failing)
    (row,) = rows_of(subject, plan)
    assert row.sparse_ms is None
    assert row.dense_ms > 0
    assert "out of memory" in row.note


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Keys and values are in virtual memory, and kernels are compiled by parts of prompts and models."""
    monkeypatch.setattr(PrefillRuns, "compiles", True)
    monkeypatch.setattr("sparsekv.bench.prefill._WARM_UP_TOKENS", 64)
    return page_on_the_host(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"chunk": 200}, {"dense_layers": 1}, {"dense_layers": 1, "chunk": 200}, {"ranked_from": 256},
        {"kv_host_layers": 1}, {"kv_host_layers": 2, "dense_layers": 1},
    ],
    ids=str,
)  # fmt: skip
def test_every_way_runs_in_virtual_memory_whatever_part_of_the_model_runs(as_on_cuda, subject, plan, changed, options):
    changed(lambda way, ids, layers, run: replace(run, milliseconds=10.0 * layers) if layers else run)
    (row,) = rows_of(subject, plan, **options)
    assert all("times the time of" in why for why in row.peers.refused.values()), row.peers.refused
    assert min(row.sparse_ms, row.dense_ms) > 0, row.note
    assert as_on_cuda.used == 0
    assert ("map" in as_on_cuda.driver.calls) == (options.get("kv_host_layers") != 2)


@pytest.mark.parametrize("way", [SPARSE, OURS])
def test_layers_go_to_the_host_in_every_way_and_have_their_room_before_the_clock_starts(
    subject, plan, monkeypatch, way
):
    from sparsekv.runtime.stores.pinned import HostMemory

    running, taken, real = [], [], HostMemory.take

    def take(self, nbytes, device):
        taken.append(bool(running))
        return real(self, nbytes, device)

    monkeypatch.setattr(HostMemory, "take", take)
    hook = subject.model.register_forward_pre_hook(lambda *call: running.append(1))
    runs = PrefillRuns(subject.model, plan, PrefillBench((1,), kv_host_layers=2))
    runs.run(way, torch.ones(1, 1280, dtype=torch.long), layers=1)  # of contexts beyond the hot set
    hook.remove()
    assert running
    assert taken
    assert not any(taken)
