"""The bench of decode from host memory: on tiny models, and the lists that it puts in place of choices."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plans_samples import model_info
from tiny_models import tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment

from sparsekv.kernels.decode.selection import Selection
from sparsekv.planner.bench.decode_bench import DecodeBench, check_decode
from sparsekv.planner.bench.link import LinkRate, link_rate
from sparsekv.planner.bench.offload_bench import OffloadRow, OffloadRun, OffloadRuns, bench_offload
from sparsekv.planner.bench.random_model import BenchModel, HandDecode
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.stats import RunStats

MissRate: Callable = pytest.importorskip("sparsekv.planner.bench.miss_rate").MissRate
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LENGTH = 300


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(context=1024, head_dim=64, dtype=torch.bfloat16 if CUDA else torch.float32).to(DEVICE)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


def plans_of(subject):
    return {"plan": plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), 20), offload=(1, 2), hot=16))}


def rows_of(subject, mode="always", miss_rate=None, **options) -> list[OffloadRow]:
    bench = DecodeBench(**{"lengths": (LENGTH,), "repeats": 1, "new_tokens": 16} | options)
    check_decode(subject.info, plans_of(subject), bench)
    return list(bench_offload(subject, plans_of(subject), "by hand", bench, mode, miss_rate))


def test_a_case_has_a_row_with_both_times_and_what_was_fetched(subject):
    if CUDA:
        pytest.skip("its twin below runs there")
    (row,) = rows_of(subject, batches=(2,))
    data = row.as_data()
    assert (data["length"], data["batch"], data["mode"], data["host_layers"]) == (LENGTH, 2, "always", 2)
    assert data["slowdown"] == data["offloaded_ms"] / data["device_ms"]
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


def timed(times, monkeypatch):
    """Modes take so long, without running anything."""
    stats = RunStats(0, 0, 0, 0, 0, 0, host_steps=4, host_tokens_chosen=88, host_tokens_fetched=22)

    def run(self, mode, plan, length, batch):
        if isinstance(times[mode], Exception):
            raise times[mode]
        on_host = mode != "never"
        link = LinkRate(1024, 50.0, 20.0) if on_host else None
        return OffloadRun(times[mode], times[mode] / 2, 2 * on_host, stats, link, "")

    monkeypatch.setattr(OffloadRuns, "run_mode", run)


def test_bytes_and_ratios(subject, monkeypatch):
    timed({"never": 4.0, "always": 5.0}, monkeypatch)
    (row,) = rows_of(subject)
    assert (row.slowdown, row.replay_slowdown, row.misses, row.miss_share) == (1.25, 1.25, 5.5, 0.25)
    assert row.fetched_bytes == 5.5 * 2 * 1024


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


@pytest.mark.gpu
def test_the_rate_of_the_link_is_that_of_whole_tokens():
    rows_PBGRD = torch.zeros(2, 1, 8, 4096, 128, dtype=torch.bfloat16, device=DEVICE)
    host_CBPGD = torch.randn(16384, 1, 2, 8, 128).bfloat16().pin_memory()
    rate = link_rate(rows_PBGRD, host_CBPGD)
    assert rate.row_bytes == 4096
    assert rows_PBGRD[:, :, :, :2048].any(-1).all()


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
