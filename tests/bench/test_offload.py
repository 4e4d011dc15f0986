"""The bench of decode from host memory: on tiny models, and the lists that it puts in place of choices."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from kv_stores import rows
from plans_samples import model_info
from tiny_models import tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment

from sparsekv.bench.decode import DecodeBench, check_decode
from sparsekv.bench.link import LinkRate, link_rate
from sparsekv.bench.offload import (
    OffloadRow,
    OffloadRun,
    OffloadRuns,
    bench_offload,
    check_miss_rate,
)
from sparsekv.bench.random_model import BenchModel, HandDecode
from sparsekv.kernels.decode.selection import Selection
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.stores.pinned import HostMemory

MissRate: Callable = pytest.importorskip("sparsekv.bench.miss_rate").MissRate
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LENGTH = 300


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(context=1024, head_dim=64, dtype=torch.bfloat16 if CUDA else torch.float32).to(DEVICE)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


def plans_of(subject):
    return {"plan": plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), 20), offload=(1, 2), hot=16))}


def iterated(subject, mode="always", miss_rate=None, plans=None, **options) -> Iterator[OffloadRow]:
    bench, plans = (
        DecodeBench(**{"lengths": (LENGTH,), "repeats": 1, "new_tokens": 16} | options),
        plans or plans_of(subject),
    )
    check_decode(subject.info, plans, bench)
    return bench_offload(subject, plans, "by hand", bench, mode, miss_rate)


def rows_of(subject, *args, **options) -> list[OffloadRow]:
    return list(iterated(subject, *args, **options))


def test_a_case_has_a_row_with_both_times_and_what_was_fetched(subject):
    if CUDA:
        pytest.skip("its twin below runs there")
    (row,) = rows_of(subject, batches=(2,))
    data = row.as_data()
    assert (data["length"], data["batch"], data["mode"], data["host_layers"]) == (LENGTH, 2, "always", 2)
    assert 0 < data["misses"] <= 2 * (2 + 20)
    assert 0 < data["miss_share"] <= 1
    assert data["link_200_tokens_us"] is data["device_replay_ms"] is data["replay_slowdown"] is None
    assert data["note"] == "weights are random"


@pytest.mark.gpu
def test_a_stated_share_of_the_choice_is_fetched(subject):
    (row,) = rows_of(subject, miss_rate=0.2, new_tokens=64)
    assert row.misses == pytest.approx(4, abs=0.1)
    assert row.fetched_bytes == pytest.approx(row.misses * 2 * 2 * 2 * 64 * 2)
    assert min(row.replay_slowdown, row.link.gbytes_per_second, row.link.few_us) > 0


@pytest.mark.gpu
def test_without_a_miss_rate_there_is_no_replay_from_host_memory(subject):
    (row,) = rows_of(subject)
    assert row.device_replay_ms > 0
    assert row.offloaded_replay_ms is row.replay_slowdown is None


def timed(times, monkeypatch):
    """Modes take so long, without running anything."""
    memories: list[HostMemory] = []
    stats = RunStats(0, 0, 0, 0, 0, 0, host_steps=4, host_tokens_chosen=88, host_tokens_fetched=22)

    def run(self, mode, plan, length, batch):
        if isinstance(times[mode], Exception):
            raise times[mode]
        self.memory.give(self.memory.take(100, torch.device("cpu")), torch.device("cpu"))
        memories.append(self.memory)
        on_host = mode != "never"
        link = LinkRate(1024, 50.0, 20.0) if on_host else None
        return OffloadRun(times[mode], times[mode] / 2, 2 * on_host, stats, link, "")

    monkeypatch.setattr(OffloadRuns, "run_mode", run)
    return memories


def test_bytes_and_ratios(subject, monkeypatch):
    timed({"never": 4.0, "always": 5.0}, monkeypatch)
    (row,) = rows_of(subject)
    assert (row.slowdown, row.replay_slowdown, row.misses, row.miss_share) == (1.25, 1.25, 5.5, 0.25)
    assert row.fetched_bytes == 5.5 * 2 * 1024


def test_where_kv_heads_choose_for_themselves_a_miss_brings_one_of_them(subject, monkeypatch):
    timed({"never": 4.0, "always": 5.0}, monkeypatch)
    part = segment(0, (1, 2), 20, heads="per_kv_head")
    plan = plan_for(subject.model, decode=decode_plan(part, offload=(1, 2)))
    (row,) = rows_of(subject, plans={"plan": plan})
    assert row.fetched_bytes == 5.5 * 2 * 1024 / subject.info.attention[0].kv_heads
    assert subject.info.attention[0].kv_heads > 1


def test_memory_is_free_when_nobody_asks_for_the_other_rows(subject, monkeypatch):
    memories = timed({"never": 4.0, "always": 5.0}, monkeypatch)
    rows = iterated(subject, lengths=(LENGTH, LENGTH + 1))
    next(rows)
    assert memories[0].free_bytes == 100
    rows.close()
    assert memories[0].free_bytes == 0


def test_an_error_of_the_device_ends_the_bench(subject, monkeypatch):
    timed({"never": 4.0, "always": torch.AcceleratorError("CUDA error: illegal address")}, monkeypatch)
    (row,) = rows_of(subject, lengths=(LENGTH, LENGTH + 1), repeats=2)
    assert (row.length, row.device_ms, row.offloaded_ms) == (LENGTH, 4.0, None)
    assert "--offload always: AcceleratorError: CUDA error: illegal address" in row.note


@pytest.mark.parametrize(("budget", "hot", "length"), [(130, 140, 300), (20, 350, 380)])
def test_lengths_with_too_few_tokens_to_draw_new_ones_from_are_refused(subject, budget, hot, length):
    """256 can be drawn: fewer than two choices, or than there are slots."""
    plan = plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), budget), offload=(1, 2), hot=hot))
    bench = DecodeBench((length,), new_tokens=16)
    with pytest.raises(UsageError, match=f"found 256 at {length}"):
        check_miss_rate(subject.info, {"plan": plan}, bench)
    check_miss_rate(subject.info, {"plan": plan}, replace(bench, lengths=(600,)))


def test_a_length_that_the_device_cannot_hold_is_timed_from_host_memory(subject, monkeypatch):
    timed({"never": torch.OutOfMemoryError("CUDA out of memory"), "auto": 5.0}, monkeypatch)
    (row,) = rows_of(subject, "auto")
    assert (row.device_ms, row.offloaded_ms, row.slowdown) == (None, 5.0, None)
    assert row.measured
    assert "on the device: out of memory" in row.note


def test_without_offload_there_is_one_time(subject, monkeypatch):
    timed({"never": 4.0}, monkeypatch)
    (row,) = rows_of(subject, "never")
    assert (row.device_ms, row.host_layers, row.link) == (4.0, 0, None)


@pytest.mark.skipif(CUDA, reason="its twin below runs there")
def test_the_rate_of_the_link_leaves_the_cache_alone():
    """With fewer tokens than are fetched."""
    host_CBPGD = rows(5, 0).permute(3, 1, 0, 2, 4).contiguous()
    before = host_CBPGD.clone()
    rate = link_rate(host_CBPGD, DEVICE, at_once=1024)
    assert rate.row_bytes == 2 * 3 * 4 * 4
    assert min(rate.gbytes_per_second, rate.few_us) > 0
    assert torch.equal(host_CBPGD, before)


@pytest.mark.gpu
def test_the_rate_of_the_link_is_that_of_whole_tokens():
    host_CBPGD = torch.randn(50, 1, 2, 8, 128).bfloat16().pin_memory()
    rate = link_rate(host_CBPGD, DEVICE)
    assert rate.row_bytes == 4096
    assert min(rate.gbytes_per_second, rate.few_us) > 0


@pytest.mark.skipif(CUDA, reason="with a GPU the kernel runs there")
@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_a_list_keeps_its_other_tokens_and_has_none_twice(share):
    part = segment(0, (1, 2), 16, sink=3, recent=5)
    filters = Program.of(None, decode_plan(part), model_info(layers=3, heads=2, kv_heads=1)).layers[0].filters
    counts = 16, 10
    choice = Selection(torch.zeros(2, 1, 16, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), 3, 5)
    swap, seen = MissRate(share, 200), [[], []]
    for _ in range(9):
        found = swap(filters, choice)
        assert (found.sink, found.recent, found.counts_B) == (3, 5, choice.counts_B)
        for lists, count, row in zip(seen, counts, found.chosen_BgN[:, 0], strict=True):
            listed = set(row[:count].tolist())
            assert len(listed) == count
            assert (min(listed) >= 3, max(listed) < 200 - 5) == (True, True)
            assert (row[count:] == -1).all()
            new = listed.difference(*lists[-3:])
            if lists:
                assert len(new) == -(-count * round(1000 * share) // 1000)
            lists.append(listed)


def test_plans_made_by_hand_permit_what_follows_to_be_offloaded(subject):
    hand = HandDecode(tokens(20), (0,), offload=True)
    (plan,) = hand.plans(subject.info, LENGTH)[0].values()
    assert (plan.decode.offload.layers, plan.decode.offload.hot) == ((1, 2), tokens(4096))
    (plan,) = replace(hand, budget=fraction(0.5)).plans(subject.info, 100_000)[0].values()
    assert plan.decode.offload.hot == tokens(100_000)
    assert HandDecode(tokens(20), (0,)).plans(subject.info, LENGTH)[0]["last"].decode.offload is None
