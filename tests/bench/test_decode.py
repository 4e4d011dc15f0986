"""The decode bench on tiny models: attention alone and whole tokens, by plans and dense."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment

import sparsekv
from sparsekv.bench.decode import (
    ATTENTION,
    OURS,
    TOKEN,
    UNMODIFIED,
    DecodeBench,
    DecodeRuns,
    Run,
    bench_decode,
    check_decode,
)
from sparsekv.bench.random_model import BenchModel, HandDecode, describe_named
from sparsekv.bench.step_attention import StepAttention, fill
from sparsekv.plans.errors import PlanMismatchError, PromptError, UnsupportedError, UsageError
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.stores.store import Layout

LENGTH, BUDGET = 256, 20


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    model = tiny_model(context=1024)
    return BenchModel(model, info_of(model), "tiny", "random", "weights are random")


@pytest.fixture(scope="module")
def plan(subject) -> Plan:
    return plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), BUDGET)))


def rows_of(subject, plans, runs=DecodeRuns, **options):
    plans = {"plan": plans} if isinstance(plans, Plan) else plans
    bench = DecodeBench(**{"lengths": (LENGTH,), "repeats": 1, "new_tokens": 32} | options)
    check_decode(subject.info, plans, bench)
    return list(bench_decode(subject, plans, "by hand", bench, runs=runs))


def taking(milliseconds, **others):
    """Every way takes so long a token, the next repeat one longer, without running anything."""
    ran = []

    class Timed(DecodeRuns):
        def run(self, way, length, batch):
            ran.append(way)
            ms = milliseconds[way]
            if isinstance(ms, Exception):
                raise ms
            return Run(ms + ran.count(way) - 1, **others.get(way, {}))

    return Timed, ran


TIMES = {UNMODIFIED: 9.0, OURS: 6.0, "plan": 2.0}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_case_has_a_row_of_attention_and_one_of_tokens_with_the_keys_that_scripts_rely_on(subject, plan):
    attention, token = (row.as_data() for row in rows_of(subject, plan, batches=(2,)))
    for data in (attention, token):
        assert list(data)[:9] == [
            "name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device"
        ]  # fmt: skip
        assert (data["length"], data["batch"], data["selector"], data["window"]) == (LENGTH, 2, "last", 1)
        assert (data["backend"], data["weights"], data["plan"], data["layers"]) == ("cpu", "random", "by hand", 3)
        assert data["speedup"] == pytest.approx(data["dense_ms"] / data["sparse_ms"])
        assert data["replay_ms"] is data["dense_replay_ms"] is None  # nothing is captured on a CPU
        assert data["note"] == "weights are random"
    assert (attention["name"], token["name"]) == (ATTENTION, TOKEN)
    torchs = {"torch SDPA", "torch SDPA, heads of a group as rows"}
    assert attention["dense_peers_ms"].keys() == {"sparsekv dense", *torchs}
    assert attention["unmodified_ms"] is None
    assert token["dense_peers_ms"].keys() == {UNMODIFIED, OURS}
    assert token["unmodified_ms"] == token["dense_peers_ms"][UNMODIFIED]
    assert token["dense_ms"] == min(token["dense_peers_ms"].values())


def test_rates_count_the_keys_and_values_that_attention_reads(subject, plan):
    (row, _) = rows_of(subject, plan, batches=(2,), runs=taking(TIMES)[0])
    cached = 3 * 2 * LENGTH  # layers, rows
    attended = 2 * (LENGTH + 2 * (2 + BUDGET + 3))  # a filter layer, two with sinks and recent tokens
    token_bytes = 2 * 2 * 32 * 4  # keys and values, KV heads, head size, float32
    assert row.density == pytest.approx(attended / cached)
    assert row.gbytes_per_second == pytest.approx(attended * token_bytes / row.sparse_ms / 1e6)
    assert row.dense_gbytes_per_second == pytest.approx(cached * token_bytes / row.dense_ms / 1e6)
    assert row.tflops == pytest.approx(attended * 4 * 4 * 32 / row.sparse_ms / 1e9)


def test_the_share_of_tokens_is_what_a_run_counts(subject, plan):
    attention, token = rows_of(subject, plan)
    with sparsekv.apply(subject.model, plan) as handle:
        for steps, row in ((1, attention), (33, token)):
            cache = handle.new_cache(LENGTH)
            fill(cache.layers, LENGTH - steps, layouts_of(subject.model), seed=0)
            handle.reset_stats()
            for _ in range(steps):
                subject.model(torch.ones((1, 1), dtype=torch.long), past_key_values=cache)
            assert row.density == handle.stats().decode_share


def test_ratios_are_medians_against_the_fastest_way_to_run_dense(subject, plan):
    replays = {OURS: {"replay_ms": 5.0}, "plan": {"replay_ms": 1.0}}
    runs, _ = taking(TIMES, **replays)
    (_, row) = rows_of(subject, plan, runs, repeats=3)
    assert (row.unmodified_ms, row.dense_ms, row.sparse_ms, row.speedup) == (10.0, 7.0, 3.0, 7 / 3)
    assert (row.dense_replay_ms, row.replay_ms) == (5.0, 1.0)
    assert row.dense_peers.fastest == OURS


def test_runs_alternate(subject, plan):
    runs, ran = taking(TIMES)
    rows_of(subject, plan, runs, repeats=3)
    one = [UNMODIFIED, OURS, "plan"]
    assert ran == one + one[::-1] + one


def test_every_length_batch_and_selector_has_its_rows(subject):
    hand = HandDecode(tokens(BUDGET), (0,), ("last", "uniform", "exponential"), 4)
    plans, words = hand.plans(subject.info, LENGTH)
    runs, _ = taking({UNMODIFIED: 1.0, OURS: 1.0} | dict.fromkeys(plans, 1.0))
    rows = rows_of(subject, plans, runs, lengths=(LENGTH, 128), batches=(1, 2))
    cases = [(row.length, row.batch, row.name, row.selector, row.window) for row in rows]
    assert cases == [
        (length, batch, name, selector, window)
        for length in (LENGTH, 128)
        for batch in (1, 2)
        for name in (ATTENTION, TOKEN)
        for selector, window in (("last", 1), ("uniform", 4), ("exponential", 4))
    ]
    assert all(row.sparse_ms > 0 for row in rows)
    assert words == f"made by hand: filter layers 0 choose {BUDGET}; 4 sinks, 128 recent"


@pytest.mark.parametrize("window", [None, 100])
def test_every_dense_kernel_computes_what_the_runtime_computes(window):
    model = tiny_model() if window is None else tiny_model("mistral", sliding_window=window)
    layouts = tuple(replace(layout, batch=2) for layout in layouts_of(model))
    expected, *others = (
        torch.stack(call()) for call in StepAttention(info_of(model), layouts, LENGTH, "cpu", 1).dense().values()
    )
    assert expected.shape == (3, 2, 4, 1, 32)
    for found in others:
        torch.testing.assert_close(found, expected)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_in_memory_is_said_and_the_next_case_is_timed(subject, plan):
    class Small(DecodeRuns):
        def run(self, way, length, batch):
            if batch > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Run(TIMES[way])

    full, _, next_ = [
        row for row in rows_of(subject, plan, Small, batches=(2, 1)) if row.name == TOKEN or row.batch == 1
    ]
    assert (full.batch, full.sparse_ms, full.dense_ms, full.unmodified_ms) == (2, None, None, None)
    assert full.note == f"weights are random; {LENGTH}, batch 2, token, by the plan: out of memory"
    assert full.dense_peers.refused == {UNMODIFIED: "out of memory", OURS: "out of memory"}
    assert (next_.batch, next_.sparse_ms) == (1, 2.0)


def test_keys_that_do_not_fit_leave_the_rows_of_tokens(subject, plan):
    runs, _ = taking(TIMES)
    attention, token = rows_of(
        BenchModel(subject.model, subject.info.model_copy(update={"context_length": 1 << 50}), "tiny", "random"),
        plan,
        runs,
        lengths=(1 << 45,),
    )
    assert attention.sparse_ms is None
    assert "out of memory" in attention.note
    assert token.sparse_ms == 2.0


def test_keys_that_host_memory_cannot_hold_are_not_written():
    layouts = [Layout(1, 8, 128, torch.float32, torch.device("cpu"))] * 32
    with pytest.raises(MemoryError):
        fill((), 131072, layouts, 0, available=lambda: 25 << 30)


def test_without_the_unmodified_model_ratios_are_against_what_ran(subject, plan):
    runs, _ = taking(TIMES | {UNMODIFIED: torch.OutOfMemoryError("CUDA out of memory")})
    (_, row) = rows_of(subject, plan, runs)
    assert (row.unmodified_ms, row.dense_ms, row.speedup) == (None, 6.0, 3.0)


def test_steps_that_are_not_captured_are_told_with_the_reason(subject, plan):
    runs, _ = taking(TIMES, plan={"why_not": "the selector looks back"}, **{OURS: {"why_not": "a hook"}})
    (_, row) = rows_of(subject, plan, runs)
    assert "dense steps are not captured: a hook" in row.note
    assert "steps by the plan are not captured: the selector looks back" in row.note


def test_a_plan_that_offloads_says_that_attention_alone_does_not(subject):
    plan = plan_for(subject.model, decode=decode_plan(segment(0, (1, 2), BUDGET), offload=(2,)))
    attention, token = rows_of(subject, plan, taking(TIMES)[0])
    assert "all keys on the device" in attention.note
    assert "all keys on the device" not in token.note


# --- one run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [UNMODIFIED, OURS, "plan"])
def test_a_token_is_the_difference_of_many_and_one_and_the_last_has_the_length(subject, plan, way):
    lengths = []

    class Timed(DecodeRuns):
        def seconds(self, cache, batch, tokens):
            super().seconds(cache, batch, tokens)
            lengths.append(cache.get_seq_length())
            return 5.0 + 0.002 * tokens

    settings, attention = subject.model.generation_config, subject.model.config._attn_implementation
    run = Timed(subject, {"plan": plan}, DecodeBench((LENGTH,), new_tokens=16)).run(way, LENGTH, 2)
    assert run.milliseconds == pytest.approx(2.0)
    assert lengths == [LENGTH - 18, LENGTH - 17, LENGTH]
    assert (run.density is None) == (way == UNMODIFIED)
    assert run.density is None or (run.density < 1) == (way == "plan")
    assert subject.model.generation_config is settings
    assert subject.model.config._attn_implementation == attention


def test_tokens_that_took_no_time_are_no_measurement(subject, plan):
    class Disturbed(DecodeRuns):
        def seconds(self, cache, batch, tokens):
            return 1.0

    (_, row) = rows_of(subject, plan, Disturbed)
    assert row.sparse_ms is None
    assert "took no longer than one" in row.note


# --- plans made by hand, and what is refused --------------------------------------------------------------------------


def test_filters_by_hand_choose_for_all_layers_up_to_the_next():
    info = describe_named("llama3-8b", random_weights=True)
    plans, _ = HandDecode(filters=(0, 8, 18)).plans(info, 1 << 17)
    (bucket,) = plans["last"].decode.lengths
    layers = {one.filter: one.layers for one in bucket.segments}
    assert layers == {0: tuple(range(1, 8)), 8: tuple(range(9, 18)), 18: tuple(range(19, 32))}
    assert {(one.budget.tokens, one.sink, one.recent) for one in bucket.segments} == {(2048, 4, 128)}


@pytest.mark.parametrize(
    ("name", "filters"), [("llama3-8b", [2, 8, 18]), ("qwen2.5-7b-1m", [2, 7, 15]), ("tiny-retriever", [2, 4, 6])]
)
def test_without_filters_given_three_layers_by_depth_choose(name, filters):
    plans, _ = HandDecode().plans(describe_named(name, random_weights=True), 1 << 17)
    assert [one.filter for one in plans["last"].decode.lengths[0].segments] == filters


def test_a_budget_that_is_a_share_is_bounded_at_the_longest_context(subject):
    plans, _ = HandDecode(fraction(0.1)).plans(subject.info, 1000)
    (one,) = plans["last"].decode.lengths[0].segments
    assert (one.budget.fraction, one.budget.at_most) == (0.1, 100)
    assert (one.filter, one.layers) == (1, (2,))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"selectors": ("median",)}, "median"),
        ({"selectors": ("last", "uniform")}, "--window"),
        ({"window": 8}, "--window"),
        ({"selectors": ("uniform",), "window": 1 << 20}, "window of 1 to 1024"),
    ],
)
def test_selectors_and_windows_that_mean_nothing_are_refused(options, word):
    with pytest.raises(UsageError, match=word):
        HandDecode(**options)


@pytest.mark.parametrize(("filters", "found"), [((3,), "3"), ((2,), "2"), ((0, 1, 2), "0-2"), ((0, 7), "7")])
def test_filter_layers_that_are_not_there_or_choose_for_none_are_refused(subject, filters, found):
    with pytest.raises(UsageError, match=f"layers 0-2 .* found {found};"):
        HandDecode(filters=filters).plans(subject.info, LENGTH)


def test_a_model_with_one_layer_cannot_be_sparse():
    with pytest.raises(UsageError, match="found none"):
        HandDecode().plans(info_of(tiny_model(layers=1)), LENGTH)


def test_a_case_that_cannot_be_timed_is_refused(subject, plan):
    with pytest.raises(PromptError, match="1024"):
        rows_of(subject, plan, lengths=(2048,))
    with pytest.raises(UsageError, match="38 tokens or more"):
        rows_of(subject, plan, lengths=(37,))
    with pytest.raises(UsageError, match="at least one"):
        rows_of(subject, plan, batches=())
    with pytest.raises(UsageError, match="decode phase"):
        rows_of(subject, plan_for(subject.model))
    with pytest.raises(PlanMismatchError):
        rows_of(subject, plan_for(tiny_model(layers=4), decode=plan.decode))


def test_a_plan_whose_filter_layer_sees_a_window_alone_is_refused():
    windowed = tiny_model("mistral", sliding_window=64)
    with pytest.raises(UnsupportedError, match="sliding"):
        rows_of(
            BenchModel(windowed, info_of(windowed), "tiny", "random"),
            plan_for(windowed, decode=decode_plan(segment(0, (1, 2), BUDGET))),
        )
