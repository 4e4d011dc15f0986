"""The decode bench on tiny models: attention alone and whole tokens, by plans and dense."""

from dataclasses import replace

import pytest
import torch
from emulated_graphs import emulate
from host_pages import page_on_the_host
from tiny_models import SHARED, tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment

import sparsekv
from sparsekv.bench import token_runs
from sparsekv.bench.decode import ATTENTION, TOKEN, bench_decode, check_decode
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.step_attention import StepAttention, fill
from sparsekv.bench.token_runs import OURS, UNMODIFIED, DecodeBench, DecodeRuns, Forced, Run
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.placement import layouts_of

LENGTH, BUDGET = 256, 20
TIMES = {UNMODIFIED: 9.0, OURS: 6.0, "plan": 2.0}


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(context=1024)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


@pytest.fixture(scope="module")
def plan(subject) -> Plan:
    return plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), BUDGET)))


def rows_of(subject, plans, **options):
    plans = {"plan": plans} if isinstance(plans, Plan) else plans
    bench = DecodeBench(**{"lengths": (LENGTH,), "repeats": 1, "new_tokens": 32} | options)
    check_decode(subject.info, plans, bench)
    return list(bench_decode(subject, plans, "by hand", bench))


@pytest.fixture
def taking(monkeypatch):
    """Every way takes so long a token, the next repeat one longer, without running anything."""
    ran = []

    def put(milliseconds, **others):
        def run(self, way, length, batch):
            ran.append(way)
            ms = milliseconds[way] if not callable(milliseconds) else milliseconds(way, batch)
            if isinstance(ms, Exception):
                raise ms
            return Run(ms + ran.count(way) - 1, **others.get(way, {}))

        monkeypatch.setattr(DecodeRuns, "run", run)
        return ran

    return put


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_case_has_a_row_of_attention_and_one_of_tokens(subject, plan):
    attention, token = (row.data() for row in rows_of(subject, plan, batches=(2,)))
    for data in (attention, token):
        assert (data["length"], data["batch"], data["selector"], data["window"]) == (LENGTH, 2, "last", 1)
        assert (data["backend"], data["weights"], data["plan"], data["layers"]) == ("cpu", "random", "by hand", 3)
        assert data["replay_ms"] is data["dense_replay_ms"] is None  # nothing is captured on a CPU
        assert data["note"] == "weights are random"
        assert data["dense_ms"] == data["dense_peers_ms"][data["dense_kernel"]] or data is attention
    assert (attention["name"], token["name"]) == (ATTENTION, TOKEN)
    torchs = {"torch SDPA", "torch SDPA, heads of a group as rows"}
    assert attention["dense_peers_ms"].keys() == {"sparsekv dense", *torchs}
    assert token["dense_peers_ms"].keys() == {UNMODIFIED, OURS}
    assert (attention["unmodified_ms"], token["unmodified_ms"]) == (None, token["dense_peers_ms"][UNMODIFIED])


def test_rates_count_the_keys_and_values_that_attention_reads(subject, plan, taking):
    taking(TIMES)
    (data, _) = (row.data() for row in rows_of(subject, plan, batches=(2,)))
    cached = 3 * 2 * LENGTH  # layers, rows
    attended = 2 * (LENGTH + 2 * (2 + BUDGET + 3))  # a filter layer, two with sinks and recent tokens
    token_bytes = 2 * 2 * 32 * 4  # keys and values, KV heads, head size, float32
    assert data["density"] == pytest.approx(attended / cached)
    assert data["gbytes_per_second"] == pytest.approx(attended * token_bytes / data["sparse_ms"] / 1e6)
    assert data["dense_gbytes_per_second"] == pytest.approx(cached * token_bytes / data["dense_ms"] / 1e6)
    assert data["tflops"] == pytest.approx(attended * 4 * 4 * 32 / data["sparse_ms"] / 1e9)


def test_the_share_of_tokens_is_what_a_run_counts(subject, plan):
    attention, token = rows_of(subject, plan)
    with sparsekv.apply(subject.model, plan) as handle:
        for steps, row in ((1, attention), (32, token)):
            cache = handle.new_cache(LENGTH)
            fill(cache.layers, LENGTH - steps, layouts_of(subject.model), seed=0)
            handle.reset_stats()
            for _ in range(steps):
                subject.model(torch.ones((1, 1), dtype=torch.long), past_key_values=cache)
            assert row.density == handle.stats().decode_share


def test_ratios_are_medians_of_runs_in_turn_against_the_fastest_way_to_run_dense(subject, plan, taking):
    ran = taking(TIMES, **{OURS: {"replay_ms": 5.0}, "plan": {"replay_ms": 1.0}})
    (_, row) = rows_of(subject, plan, repeats=3)
    assert (row.own["unmodified_ms"], row.dense_ms, row.sparse_ms, row.speedup) == (10.0, 7.0, 3.0, 7 / 3)
    assert (row.own["dense_replay_ms"], row.own["replay_ms"], row.peers.fastest) == (5.0, 1.0, OURS)
    one = [UNMODIFIED, OURS, "plan"]
    assert ran == one + one[::-1] + one


@pytest.mark.parametrize(
    ("family", "own"),
    [("llama", {}), ("mistral", {"sliding_window": 100}), (SHARED, {"global_head_dim": 32})],
    ids=["plain", "windows", "shared keys"],
)
def test_every_dense_kernel_computes_what_the_runtime_computes(family, own):
    model = tiny_model(family, **own)
    layouts = tuple(replace(layout, batch=2) for layout in layouts_of(model))
    calls = StepAttention(info_of(model), layouts, LENGTH, "cpu", 1).dense()
    expected, *others = (torch.stack(call()) for call in calls.values())
    assert expected.shape == (3, 2, 4, 1, 32)
    for found in others:
        torch.testing.assert_close(found, expected)


# --- one run, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [UNMODIFIED, OURS, "plan"])
def test_the_tokens_that_are_timed_are_all_but_those_that_warm_up_and_the_last_has_the_length(
    subject, plan, way, monkeypatch
):
    lengths = []

    def clock(self, cache, batch, begin):
        timed(self, cache, batch, lambda: (lengths.append(cache.get_seq_length()), begin()))
        lengths.append(cache.get_seq_length())
        return 2.0

    timed = DecodeRuns.token_ms
    monkeypatch.setattr(DecodeRuns, "token_ms", clock)
    settings, attention = subject.model.generation_config, subject.model.config._attn_implementation
    run = DecodeRuns(subject, {"plan": plan}, DecodeBench((LENGTH,), new_tokens=16)).run(way, LENGTH, 2)
    assert lengths == [LENGTH - 16, LENGTH]
    assert (run.stats is None) == (way == UNMODIFIED)
    assert run.stats is None or (run.stats.decode_share < 1) == (way == "plan")
    assert subject.model.generation_config is settings
    assert subject.model.config._attn_implementation == attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
@pytest.mark.parametrize(
    ("options", "offload"),
    [({}, ()), ({"batches": (2,)}, (1,)), ({"exact": True, "acceptance": 0.9, "kv_dtype": "fp8"}, ())],
    ids=["", "rows, offloaded", "exact in 8 bits"],
)
def test_steps_that_are_captured_over_pages_have_their_times(monkeypatch, options, offload):
    """As on CUDA, where caches are in virtual memory."""
    emulate(monkeypatch)
    pool = page_on_the_host(monkeypatch)
    for name in ("WARM_UP_TOKENS", "WARM_UP_EXACT"):
        monkeypatch.setattr(token_runs, name, 6)
    model = tiny_model(layers=2, head_dim=16, heads=2, kv_heads=1, context=2048)
    plan = plan_for(model, decode=decode_plan(segment(0, (1,), 12, sink=4, recent=10), offload=offload))
    subject = BenchModel(model, info_of(model), "tiny", "random")
    rows = rows_of(subject, {"plan": plan}, lengths=(150,), new_tokens=4, backend="triton", **options)
    for row in rows:
        assert not any(word in row.note for word in ("captured", "out of", "Error", "ended")), row.note
        assert row.peers.refused == {}
        assert min(row.sparse_ms, row.dense_ms) > 0
    token = rows[1].own
    assert (token["replay_ms"] > 0, token["dense_replay_ms"] > 0) == (True, True)
    assert ("map" in pool.driver.calls, pool.used) == (True, 0)


@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
def test_a_forced_share_of_drafts_counts(chance):
    judge, scores = Forced(chance, 0), torch.randn(20000, 3, 5)
    verdict = judge.judge(torch.zeros(20000, 2, dtype=torch.int64), scores)
    assert verdict.accepted_B.float().mean() == pytest.approx(chance + chance**2, abs=0.02)
    row = int(verdict.accepted_B.argmax())
    assert verdict.next_B[row] == scores[row, verdict.accepted_B[row]].argmax()
