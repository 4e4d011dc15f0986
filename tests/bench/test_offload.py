"""The bench of decode from host memory, on tiny models."""

from collections.abc import Iterator

import pytest
import torch
from kv_stores import rows
from tiny_models import tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment

from sparsekv.bench.decode import check_decode
from sparsekv.bench.harness import Row
from sparsekv.bench.offload import LinkRate, OffloadRun, OffloadRuns, bench_offload, link_rate
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.token_runs import DecodeBench
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.stores.pinned import HostMemory

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LENGTH = 300
ON_CPU = pytest.mark.skipif(CUDA, reason="its twin for a GPU runs there")


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(context=1024, head_dim=64, dtype=torch.bfloat16 if CUDA else torch.float32).to(DEVICE)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


def plan_of(subject, budget=20, hot=16, **options):
    decode = decode_plan(segment(0, (1, 2), budget, **options), offload=(1, 2), hot=hot)
    return plan_for(subject.model, decode=decode)


def iterated(subject, mode="always", plan=None, **options) -> Iterator[Row]:
    bench = DecodeBench(**{"lengths": (LENGTH,), "repeats": 1, "new_tokens": 16} | options)
    plans = {"plan": plan or plan_of(subject)}
    check_decode(subject.info, plans, bench)
    return bench_offload(subject, plans, "by hand", bench, mode)


def row_of(subject, *args, **options) -> dict[str, object]:
    (row,) = iterated(subject, *args, **options)
    return row.data()


@ON_CPU
def test_a_case_has_a_row_with_both_times_and_what_was_fetched(subject):
    data = row_of(subject, batches=(2,))
    assert (data["length"], data["batch"], data["mode"], data["host_layers"]) == (LENGTH, 2, "always", 2)
    assert 0 < data["misses"] <= 2 * (2 + 20)
    assert 0 < data["miss_share"] <= 1
    assert data["link_200_tokens_us"] is data["device_replay_ms"] is data["replay_slowdown"] is None
    assert data["note"] == "weights are random"


@pytest.mark.gpu
def test_there_is_no_replay_from_host_memory_which_would_fetch_nothing(subject):
    data = row_of(subject)
    assert min(data["link_gbytes_per_second"], data["link_200_tokens_us"]) > 0
    assert data["device_replay_ms"] > 0
    assert data["offloaded_replay_ms"] is data["replay_slowdown"] is None


@pytest.fixture
def timed(monkeypatch):
    """Modes take so long, without running anything."""
    memories: list[HostMemory] = []
    stats = RunStats(0, 0, 0, 0, 0, 0, host_steps=4, host_tokens_chosen=88, host_tokens_fetched=22)

    def put(**times):
        def run(self, mode, length, batch):
            if isinstance(times[mode], Exception):
                raise times[mode]
            self.memory.give(self.memory.take(100, torch.device("cpu")), torch.device("cpu"))
            memories.append(self.memory)
            link = LinkRate(1024, 50.0, 20.0) if mode != "never" else None
            return OffloadRun(times[mode], times[mode] / 2, None, stats, "", 2 * (mode != "never"), link)

        monkeypatch.setattr(OffloadRuns, "run", run)
        return memories

    return put


def test_bytes_and_ratios(subject, timed):
    timed(never=4.0, always=5.0)
    data = row_of(subject)
    assert (data["slowdown"], data["replay_slowdown"], data["misses"], data["miss_share"]) == (1.25, 1.25, 5.5, 0.25)
    assert data["fetched_bytes"] == 5.5 * 2 * 1024
    kv_heads = subject.info.attention[0].kv_heads
    assert kv_heads > 1
    each = row_of(subject, plan=plan_of(subject, heads="per_kv_head"))  # a miss brings one KV head's
    assert each["fetched_bytes"] == 5.5 * 2 * 1024 / kv_heads
    data = row_of(subject, "never")
    assert (data["device_ms"], data["host_layers"], data["offloaded_ms"]) == (4.0, 0, None)


def test_a_length_that_the_device_cannot_hold_is_timed_from_host_memory(subject, timed):
    timed(never=torch.OutOfMemoryError("CUDA out of memory"), auto=5.0)
    data = row_of(subject, "auto")
    assert (data["device_ms"], data["offloaded_ms"], data["slowdown"]) == (None, 5.0, None)
    assert "out of memory" in data["note"]


@pytest.mark.parametrize("on_gpu", [pytest.param(False, marks=ON_CPU), pytest.param(True, marks=pytest.mark.gpu)])
def test_the_rate_of_the_link_is_that_of_whole_tokens_and_leaves_the_cache_alone(on_gpu, monkeypatch):
    host_CBPGD = torch.randn(50, 1, 2, 8, 128).bfloat16().pin_memory() if on_gpu else None
    if host_CBPGD is None:  # fewer tokens than are fetched, and few launches of an interpreted kernel
        monkeypatch.setattr("sparsekv.bench.offload._MANY", 64)
        monkeypatch.setattr("sparsekv.bench.offload._LISTS", 2)
        host_CBPGD = rows(5, 0).permute(3, 1, 0, 2, 4).contiguous()
    before = host_CBPGD.clone()
    rate = link_rate(host_CBPGD, DEVICE)
    assert rate.row_bytes == (4096 if on_gpu else 2 * 3 * 4 * 4)
    assert min(rate.gbytes_per_second, rate.few_us) > 0
    assert torch.equal(host_CBPGD, before)
