"""The rule of where a plan is faster, in vLLM's engine: steps outside of it are vLLM's own."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operators import Operators
from plans_samples import counts
from vllm_engine import BUDGET, CROSSOVER, NEW, Oracle, generate, make_engine, same
from vllm_replay import plan_host_of

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import PLAIN, KeyView, Scales, Softmax
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import mandatory_density
from sparsekv.runtime.core.pays import ALWAYS, NEVER, Pays, Thresholds
from sparsekv.runtime.core.program import Rank
from sparsekv.runtime.core.timed_layers import Place, Timers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.paged import timed_kernels
from sparsekv.runtime.paged.step_rows import DecodeRows
from sparsekv.runtime.paged.timed_kernels import EngineLayers
from sparsekv.runtime.vllm import attention_backend, engine_host, internals
from sparsekv.runtime.vllm.devices import OnCpu
from sparsekv.runtime.vllm.engine_host import serving_stats
from sparsekv.runtime.vllm.settings import read_options

Prompts = dict[int, list[int]]


@pytest.fixture
def host(engine: Any) -> Iterator[Any]:
    """The plan of the engine, whose rule a test sets."""
    found = plan_host_of(engine)
    before = found.pays
    yield found
    found.pays = before


def test_where_nothing_pays_all_steps_are_dense(engine: Any, host: Any, dense: Oracle, prompts: Prompts) -> None:
    host.pays = NEVER
    asked = [prompts[1100], prompts[1500]]
    outputs = generate(engine, asked)
    assert [same(output, dense(prompt, ())) for output, prompt in zip(outputs, asked, strict=True)] == [True, True]
    stats = serving_stats(engine)
    assert host.decodes_dense
    assert (stats.prefill_density, stats.sparse_tokens, stats.decode_sparse) == (1.0, 0, 0)
    assert stats.decode_dense == len(asked) * (NEW - 1)


def test_a_report_tells_no_token_of_the_step_that_begins(
    engine: Any, host: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens alone, and beside a prompt."""
    begun, given, told = [], attention_backend.decoded_dense, set()

    def decoded_dense(*of: Any) -> int | None:
        begun[:] = host.counters.read().decode_dense, given(*of)
        return begun[1]

    def report(prefilling: bool) -> None:
        assert host.counters.read().decode_dense == begun[0]
        told.add((prefilling, bool(begun[1])))

    host.pays = NEVER
    monkeypatch.setattr(OnCpu, "captures", True)
    monkeypatch.setattr(attention_backend, "decoded_dense", decoded_dense)
    monkeypatch.setattr(host, "report", report)
    generate(engine, [prompts[200], prompts[1100]])
    assert told >= {(True, True), (False, True)}


@pytest.mark.parametrize("captures", [False, True])
def test_steps_that_are_dense_are_vllms_own_but_for_a_call_a_layer(
    engine: Any, plain: Any, host: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """Chunks, a chunk beside a token, and tokens."""
    host.pays = NEVER
    monkeypatch.setattr(OnCpu, "captures", captures)  # of which steps that decode are told in a shorter way
    seen = {}
    for llm in (engine, plain):
        for _ in range(2):
            assert llm.reset_prefix_cache()
            with Operators() as seen[llm]:
                sys.setprofile(seen[llm].called)
                try:
                    generate(llm, [prompts[200], prompts[1100]])
                finally:
                    sys.setprofile(None)
    layers, steps = len(host.program.layers), seen[engine].calls["SparseBuilder.build"]
    more = seen[engine].counts - seen[plain].counts
    reads = ("resolve_conj.default", "resolve_neg.default", "detach.default", "to.dtype_layout")  # on the host
    assert more.keys() <= {f"aten.{name}" for name in reads}
    assert more.total() <= 5 * 4 * steps  # numbers of requests, not tensors of layers
    assert not seen[plain].counts - seen[engine].counts
    assert steps > NEW
    often = {name.partition(":")[0] for name, count in seen[engine].calls.items() if count >= layers * steps}
    # Where an engine of this process evicts, what it follows steps by looks for the layers of every other one.
    assert {name for name in often if not name.startswith("_planned")} == {"SparseImpl.forward"}
    assert seen[engine].calls["SparseImpl.forward"] == layers * steps


def test_chunks_are_sparse_from_the_context_and_the_rows_of_the_rule(engine: Any, host: Any, prompts: Prompts) -> None:
    host.pays = Pays(prefill=Thresholds((BUDGET,), (2 * BUDGET,)))
    generate(engine, [prompts[2000]])
    ends = [*range(BUDGET, 2000, BUDGET), 2000]
    sparse = [end for end in ends if end % BUDGET == 0 and end >= 2 * BUDGET]
    stats = serving_stats(engine)
    assert stats.sparse_tokens == len(sparse) * BUDGET > 0
    assert stats.dense_tokens == 2000 - stats.sparse_tokens > 0


def test_rows_decode_sparse_from_the_context_of_so_many_rows(engine: Any, host: Any, prompts: Prompts) -> None:
    host.pays = Pays(decode=Thresholds((1, 2), (1 << 20, 1500)))
    generate(engine, [prompts[2000]])
    alone = serving_stats(engine)
    assert (alone.decode_sparse, alone.decode_dense) == (0, NEW - 1)
    generate(engine, [prompts[1100], prompts[2000]])
    mixed = serving_stats(engine).since(alone)
    assert (mixed.decode_sparse, mixed.decode_dense) == (0, 2 * (NEW - 1))  # one alone saves too little
    generate(engine, [prompts[1500], prompts[2000], prompts[1100]])
    both = serving_stats(engine).since(alone).since(mixed)
    assert NEW - 1 <= both.decode_sparse <= 2 * (NEW - 1)
    assert both.decode_dense >= NEW - 1
    host.pays = Pays(mixed=Thresholds())  # no step is captured here
    generate(engine, [prompts[2000]])
    assert serving_stats(engine).since(alone).since(mixed).since(both).decode_sparse == 0


def test_rows_that_choose_beside_rows_that_may_not_are_answered_alike(
    engine: Any, host: Any, sparse: Oracle, prompts: Prompts
) -> None:
    """Prompts are sparse as ever, so that only what a row of decode attends to can differ."""
    host.pays = Pays(decode=Thresholds((1,), (1800,)))
    outputs = generate(engine, [prompts[2000], prompts[700]])
    answer = sparse(prompts[2000], range(BUDGET, 2000, BUDGET))
    assert same(outputs[0], answer)


def test_an_engine_is_given_a_rule(
    reference: LoadedModel, plan_file: Path, prompts: Prompts, kept_engines: Any
) -> None:
    options = {"plan": str(plan_file), "sparse": "prefill=2kx256 decode=never"}
    made = make_engine(str(reference.model.name_or_path), additional_config={"sparsekv": options})
    kept_engines.append(made)
    assert plan_host_of(made).pays == Pays(Thresholds((256,), (2048,)), Thresholds())
    generate(made, [prompts[1500]])
    stats = serving_stats(made)
    assert (stats.sparse_tokens, stats.decode_sparse) == (0, 0)


def test_a_rule_is_always_never_or_thresholds() -> None:
    given = {word: read_options({"sparsekv": {"sparse": word}}).pays for word in ("auto", "always", "never")}
    assert given == {"auto": None, "always": ALWAYS, "never": NEVER}
    with pytest.raises(UsageError, match='"sparse": expected always, never, or thresholds'):
        read_options({"sparsekv": {"sparse": "sometimes"}})


CPU = torch.device("cpu")
ONES = Scales(torch.ones(2), torch.ones(2), torch.float32)


@pytest.mark.parametrize("scales", [None, ONES], ids=["16 bits", "8 bits"])
def test_a_measurement_runs_both_kernels_over_the_shares_of_the_plan(
    engine: Any, host: Any, scales: Scales | None
) -> None:
    computed = {1536: counts(4, 0.5), 3072: counts(4, 0.4)}
    seen: list[float] = []

    def launched(launches: Any, device: torch.device) -> list[float]:
        before = host.counters.read()
        for launch in launches:
            launch()
        assert host.counters.read() == before
        seen.append(1.0)
        return [2.0, *[1.0] * (len(launches) - 1)]

    def replayed(launches: Any, device: torch.device) -> list[float]:
        for launch in launches:
            launch()
        return [1e4, *[5e3] * (len(launches) - 1)]  # longer than the program takes

    place, timers = Place("sha256:", 3072, BUDGET, 4, computed), Timers(launched, replayed, launched)
    rule, _ = EngineLayers(host.program, place, timers, host, CPU, 64, scales).rule(60.0)
    assert seen
    # Attention to random bits is peaked: few of them may never come to the share of the plan.
    assert rule.prefill.pays(BUDGET, CROSSOVER + 200 if scales is None else 1536)
    assert not rule.prefill.pays(BUDGET, CROSSOVER)
    assert rule.decode.pays(4, 2048)


def test_chunks_that_run_as_graphs_are_timed_as_such(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk of a size is launched, and one whose capture failed."""
    asked: list[object] = []
    computed: list[int] = []

    class Graphs:
        def attend(self, name: object, q_THD: torch.Tensor, **given: Any) -> torch.Tensor | None:
            asked.append(name)
            return q_THD if len(asked) == 2 else None

    def prefill(layer: Any, q_THD: torch.Tensor, *rest: Any, counted: bool) -> torch.Tensor:
        computed.append(len(asked))
        return q_THD

    def launched(launches: Any, device: torch.device) -> list[float]:
        for launch in (launches[1], launches[1]):
            launch()
        return [3.0, 2.0]

    monkeypatch.setattr(host, "captured", SimpleNamespace(alone=lambda layer: Graphs(), failed=""))
    monkeypatch.setattr(host, "prefill", prefill)
    place = Place("sha256:", 3072, BUDGET, 4, {3072: counts(4, 0.4)})
    layers = EngineLayers(host.program, place, Timers(launched), host, CPU, 64)
    assert layers.prefill_gain(host.program.layers[1], BUDGET, 3072) == 1.5
    assert computed == [3]
    assert asked[0] is not asked[1] is asked[2]


@pytest.mark.parametrize(
    ("on_device", "issued", "gain"),
    [
        ((300, 200), (50, 150), 400 / 600),
        ((500, 200), (50, 150), 500 / 600),
        ((900, 500), (50, 150), 900 / 600),
        ((900, 700), (50, 150), 900 / 700),
        ((150, 200), None, 150 / 200),
    ],
    ids=["program takes longer", "but for dense attention", "but longer than sparse", "device takes longer", "slower"],
)
def test_a_chunk_pays_where_the_longer_of_device_and_program_is_shorter(
    host: Any, monkeypatch: pytest.MonkeyPatch, on_device: tuple[float, ...], issued: tuple[float, ...] | None,
    gain: float,
) -> None:  # fmt: skip
    """The program takes 150 us for the rest of a layer, and in a busy engine twice as long for all of it."""
    timers = Timers(lambda *_: on_device, issued=lambda launches, _: (issued or ())[: len(launches)])
    monkeypatch.setattr(host, "passed", [(400e-6 * layer, 400e-6 * layer + 250e-6) for layer in range(4)])
    layers = EngineLayers(host.program, Place("sha256:", 3072, BUDGET, 4, {}), timers, host, CPU, 64)
    assert layers.layer_gain(lambda: None, lambda: None, torch.ones(8, 4)) == pytest.approx(gain)
    monkeypatch.setattr(host, "passed", [])  # where it is not known
    assert layers.layer_gain(lambda: None, lambda: None, torch.ones(8, 4)) == on_device[0] / on_device[1]
    monkeypatch.setattr(host, "passed", [(0.0, 1.0), (9.0, 10.0)])  # a first step, in which kernels are loaded
    assert layers.program_us == engine_host._MOST_PROGRAM_US


@pytest.mark.parametrize(
    ("longest", "saved", "idle", "gain", "holds_dense"),
    [
        (0.3, 0.3, 0.1, 1.1 / 0.7, False),
        (0.3, -0.05, 0.1, 1.1 / 1.05, False),
        (0.1, 0.1, 0.3, 0.0, False),
        (0.1, 0.1, 0.3, 1 / 0.9, True),
    ],
    ids=["faster", "faster than with idle kernels", "costs more than it saves at most", "two sets of graphs"],
)
def test_decode_kernels_are_captured_where_they_save_more_than_they_cost_idle(
    engine: Any, host: Any, monkeypatch: pytest.MonkeyPatch, longest: float, saved: float, idle: float, gain: float,
    holds_dense: bool,
) -> None:  # fmt: skip
    """Of a layer that takes 1 dense; the engine's kernel has nothing left of what our layers choose for, and is not
    there beside a second set."""
    lengths: list[list[int]] = []

    class Layers(EngineLayers):
        def dense(self, q_THD: Any, pages: Any, of: Any, out_THD: Any, left_B: Any = None) -> Any:
            assert min(of) > 0  # of which the schedule is
            lengths.append([*of] if left_B is None else left_B.tolist())
            return lambda: None

    def replayed(launches: Any, device: torch.device) -> list[float]:
        (whole,), (left,) = (lengths[-1], (0,)) if holds_dense else (lengths[-len(launches)], lengths[-1])
        assert left in (0, whole)
        less = -idle if left else longest if whole == 3072 else saved
        return [1.0, *[1.0 - less * layers_each] * (len(launches) - 1)]

    def issued(launches: Any, device: torch.device) -> list[float]:
        assert launches[0]().whole
        return [0.0]

    timers = Timers(replayed, replayed, issued)
    layers = Layers(host.program, Place("sha256:", 3072, BUDGET, 4, {}), timers, host, CPU, 64)
    monkeypatch.setattr(host, "holds_dense", holds_dense)
    monkeypatch.setattr(Layers, "_products_us", lambda *_: 0.0)
    monkeypatch.setattr(timed_kernels, "_PROGRAM_US", 0.0)
    monkeypatch.setattr(timed_kernels, "_REQUEST_US", 0.0)
    counts = [count for _, count in layers.kinds]
    layers_each = len(layers.program.attending) / sum(counts)
    assert layers.decode_gain(1, 2048) == pytest.approx(gain)
    told = {tuple(of) for of in lengths}
    wanted = {(0,), (128,), (3072,)} | ({(2048,)} if gain else set())
    assert told == ({(2048,)} if holds_dense else wanted)


@pytest.mark.parametrize("holds_dense", [False, True])
@pytest.mark.parametrize(
    ("dense", "ours", "reads"),
    [(20.0, 10.0, 1.0), (400.0, 200.0, 7.0), (300.0, 100.0, 7.0), (50.0, 20.0, 900.0)],
    ids=["small model", "many requests", "shorter than the program", "large model"],
)
def test_a_decode_step_takes_the_longer_of_the_device_and_the_program(
    host: Any, monkeypatch: pytest.MonkeyPatch, dense: float, ours: float, reads: float, holds_dense: bool
) -> None:
    """A step of four requests takes the program 100 us more than an empty one; one that may choose takes it 30 us
    more, and in a busy engine twice as much."""
    shapes: list[tuple[torch.Size, torch.Size]] = []

    def replayed(launches: Any, device: torch.device) -> list[float]:
        if len(launches) > 1:
            return [dense, *[ours] * (len(launches) - 1)]
        shapes.append((launches[0].args[0].shape, launches[0].args[1].shape))
        return [reads]

    program = replace(host.program, rank=Rank(0, 2))
    timers = Timers(replayed, replayed, lambda *_: [30.0])
    layers = EngineLayers(program, Place("sha256:", 3072, BUDGET, 4, {}), timers, host, CPU, 64)
    monkeypatch.setattr(EngineLayers, "agreed", lambda _, measured: measured)
    monkeypatch.setattr(host, "holds_dense", holds_dense)
    every, sparse = len(program.attending), sum(count for _, count in layers.kinds)
    width = 64 * program.attending[0].heads
    monkeypatch.setattr(timed_kernels, "_MOST_WEIGHTS", width * width)  # of twelve, of two ranks
    others = len(program.layers) * (30.0 + reads * 24)
    whole = max(1500.0, others + every * dense)
    chosen = max(1560.0, others + (every - sparse) * dense + sparse * ours)
    idle = 0.0 if holds_dense else max(0.0, chosen - whole)  # the kernels' times are the same where nothing chooses
    saves = holds_dense or whole - chosen > idle
    assert layers.decode_gain(4, 2048) == (pytest.approx((whole + idle) / chosen) if saves else 0.0)
    assert shapes == [((4, width), (width, width))]


def test_decode_beside_prompts_is_priced_by_what_the_program_launches(host: Any) -> None:
    def replayed(launches: Any, device: torch.device) -> list[float]:
        return [1.0] * len(launches)

    def issued(launches: Any, device: torch.device) -> list[float]:
        for launch in launches:  # filter layers first
            launch()
        return [4.0] * len(launches)

    place, timers = Place("sha256:", 3072, BUDGET, 4, {}), Timers(replayed, replayed, issued)
    layers = EngineLayers(host.program, place, timers, host, CPU, 64)
    every, sparse = len(layers.program.attending), sum(count for _, count in layers.kinds)
    assert layers.mixed_gain(1, 2048) == pytest.approx(every / (every + 3.0 * sparse))
    rule, _ = layers.rule(60.0)
    assert rule.mixed == Thresholds()


def test_a_rank_without_memory_answers_the_others(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    layers = EngineLayers(host.program, Place("sha256:", 3072, BUDGET, 4, {}), Timers(), host, CPU, 64)
    monkeypatch.setattr(EngineLayers, "_pages", full)
    assert math.isnan(layers.decode_gain(1, 2048))
    assert math.isnan(layers.prefill_gain(host.program.layers[1], BUDGET, 3072))


def test_ranks_decide_alike_by_the_times_of_the_first_and_stop_where_one_has_no_memory(
    engine: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replayed(launches: Any, device: torch.device) -> list[float]:
        return [1.0, *[2.0] * (len(launches) - 1)]  # here the plan is slower

    def issued(launches: Any, device: torch.device) -> list[float]:
        return [0.0]

    program, timers = replace(host.program, rank=Rank(1, 2)), Timers(replayed, replayed, issued)
    layers = EngineLayers(program, Place("sha256:", 3072, BUDGET, 4, {}), timers, host, CPU, 64)
    monkeypatch.setattr(timed_kernels, "_PROGRAM_US", 0.0)
    monkeypatch.setattr(timed_kernels, "_REQUEST_US", 0.0)
    first = iter(
        [0.0, 8.0, 9.0, 0.0, 10.0, 5.0, 0.0, 10.0, 6.0, 3.0]
    )  # memory, dense, sparse: idle, longest, here; gain
    monkeypatch.setattr(internals, "gather", lambda mine: torch.stack([torch.tensor([next(first)]), mine]))
    assert layers.decode_gain(1, 2048) == 3.0
    assert layers.costs == {1: 1.0}
    monkeypatch.setattr(internals, "gather", lambda mine: torch.stack([torch.tensor([math.nan]), mine]))
    assert math.isnan(layers.decode_gain(1, 2048))


def test_a_rank_whose_heads_are_dense_at_a_context_waits_for_the_others(host: Any) -> None:
    layer = host.program.layers[1]
    layers = EngineLayers(
        host.program, Place("sha256:", 3072, BUDGET, 4, {3072: counts(4, 0.4)}), Timers(), host, CPU, 64
    )
    assert layers.prefill_gain(layer.without_patterns, BUDGET, 3072) == 1.0  # nan on one would be a hint for all


def test_an_engine_measures_once_a_place(
    engine: Any, host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[int] = []

    def timer(launches: Any, device: torch.device) -> list[float]:
        calls.append(len(launches))
        return [1.0] * len(launches)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timed_kernels, "Timers", lambda: Timers(timer, timer, timer))
    rules, seen = [], []
    for place, model in (
        ({}, host.model),
        ({}, host.model),
        ({"computed": {3072: counts(4, 0.3)}}, host.model),
        ({}, "sha256:"),
    ):
        monkeypatch.setattr(host, "model", model)
        monkeypatch.setattr(host, "place", replace(Place("sha256:", 3072, BUDGET, 1, {3072: counts(4, 0.4)}), **place))
        rules.append(timed_kernels.measured_rule(host, CPU, 64, None, PLAIN))
        seen.append(len(calls))
    assert rules[0] == rules[1]
    assert 0 < seen[0] == seen[1] < seen[2] < seen[3]


def test_layers_with_soft_caps_are_timed_with_their_caps(
    engine: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps: list[float] = []

    def prefill(layer: Any, q_THD: torch.Tensor, keys: KeyView, *rest: Any, counted: bool) -> torch.Tensor:
        caps.append(keys.softmax.cap)
        return q_THD

    def attend(self: DecodeRows, *given: Any) -> None:
        caps.append(given[-2].cap)

    monkeypatch.setattr(host, "prefill", prefill)
    monkeypatch.setattr(DecodeRows, "attend", attend)

    def timer(launches: Any, device: torch.device) -> list[float]:
        for launch in launches:
            launch()
        return [1.0] * len(launches)

    place = Place("sha256:", 3072, BUDGET, 4, {3072: counts(4, 0.4)})
    layers = EngineLayers(host.program, place, Timers(timer, timer, timer), host, CPU, 64, softmax=Softmax(3.0))
    layers.prefill_gain(host.program.layers[1], BUDGET, 3072)
    layers.decode_gain(1, 2048)
    assert set(caps) == {3.0}
    assert len(caps) == 1 + 2 * len(layers.kinds)  # idle, and at the longest context, which saves nothing


def test_vllms_kernel_caps_scores(host: Any) -> None:
    q_THD, outputs = torch.full((1, 4, 64), 2.0), {}
    work = EngineLayers(host.program, Place("sha256:", 3072, BUDGET, 4, {}), Timers(), host, CPU, 64)
    pages = work._pages(1, 300, 2)
    for cap in (0.0, 0.5):
        outputs[cap] = torch.empty_like(q_THD)
        replace(work, softmax=Softmax(cap) if cap else PLAIN).dense(q_THD, pages, [300], outputs[cap])()
    k_NGSD, v_NGSD = (x[pages.table_BP[0].long()].transpose(0, 1).flatten(1, 2)[:, :300] for x in pages.pages)
    scores_HS = (0.125 * q_THD[0, :, None] * k_NGSD.repeat_interleave(2, 0)).sum(-1)
    weights_HS = (0.5 * torch.tanh(scores_HS / 0.5)).softmax(-1)
    expected_HD = (weights_HS[..., None] * v_NGSD.repeat_interleave(2, 0)).sum(1)
    torch.testing.assert_close(outputs[0.5][0], expected_HD, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0.0], outputs[0.5], atol=1e-3)


def test_a_layer_of_random_keys_computes_the_share_of_the_plan(engine: Any, host: Any) -> None:
    work = EngineLayers(
        host.program, Place("sha256:", 3072, BUDGET, 4, {3072: counts(4, 0.25)}), Timers(), host, CPU, 64
    )
    layer, chunk = host.program.layers[1], Chunk.uniform(1, 2560, 3072)
    heads = replace(layer, bounds=(), patterns=(tuple(layer.patterns_at(3072)[:1] * 4),))  # lines alone
    q_THD, pages = work._queries(512, heads.heads), work._pages(1, 3072, heads.kv_heads)
    keys = host.scratch.copy(pages.pages, pages.table_BP[0], 3072)
    q_BHTD = q_THD.transpose(0, 1)[None]
    alike = work.alike(heads, q_BHTD, keys.k, chunk, 0.125)
    index = build_index(alike.patterns_at(3072), q_BHTD, keys.k, chunk, layer.tile, scale=0.125)
    whole, here = (mandatory_density(3072, layer.tile, "vertical_slash", past) for past in (0, 2560))
    assert float(density(index, chunk)) == pytest.approx(0.25 - whole + here, rel=0.1)
