"""`apply(sparse=...)`: chunks and steps outside the rule are those of a plan that is dense there."""

import copy
import math
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_graphs import emulate
from plans_samples import counts
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, drops, every_head, info_of, plan_for, segment
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import Softmax
from sparsekv.kernels.tiles import Chunk, computed_tiles
from sparsekv.planner.evaluation.predictions import divergence
from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.patterns import VerticalSlash, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket
from sparsekv.plans.schema import LayerCounts
from sparsekv.runtime.core import timed_layers
from sparsekv.runtime.core.pays import ALWAYS, NEVER, Pays, Thresholds
from sparsekv.runtime.core.prefill import DenseLayers
from sparsekv.runtime.core.program import Program, Rank
from sparsekv.runtime.core.timed_layers import Place, Timers
from sparsekv.runtime.hf import timed_model
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import CACHE_NAME
from sparsekv.runtime.hf.plan_engine import PlanEngine
from sparsekv.runtime.hf.timed_model import ModelLayers, measured_rule

PATTERN = VerticalSlash(vertical=tokens(16), slash=tokens(16), max_tiles=tokens(64))
CHUNK = 80
LAST = segment(0, (1, 2, 3), 12)
OLDER = segment(0, (1, 2, 3), 12, selector="uniform", window=5)


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=4)


def prefill_plan(model, dense_up_to=0, sparse_up_to=4096):
    plan = every_head(model, PATTERN)
    dense = (PrefillBucket(up_to=dense_up_to, dense=True),) if dense_up_to else ()
    sparse = plan.lengths[0].model_copy(update={"up_to": sparse_up_to})
    return plan.model_copy(update={"lengths": (*dense, sparse, plan.lengths[0])})


def decode_lengths(some, dense_up_to=0):
    sparse = DecodeBucket(up_to=None, segments=(some,))
    dense = (DecodeBucket(up_to=dense_up_to, dense=True),) if dense_up_to else ()
    return DecodePlan(lengths=(*dense, sparse))


def logits(model, plan, prompt, new, **how):
    """Of each chunk of a prompt, and of each token behind it."""
    with apply(model, plan, **how) as handle:
        seen, cache = [], None
        for chunk in prompt.split(CHUNK, 1):
            found, cache = steps(model, chunk, new[:, :0], cache)
            seen.append(found)
        for token in new.split(1, 1):
            found, cache = steps(model, token, new[:, :0], cache)
            seen.append(found)
        return torch.cat(seen, 1), handle.stats()


@pytest.mark.parametrize("seed", range(2))
def test_dense_up_to_a_context_and_sparse_behind_it_is_a_plan_with_such_buckets(model, seed):
    at = random.Random(seed).randrange(CHUNK, 430)
    prompt, new = random_tokens(1, 400, seed), random_tokens(1, 30, seed + 10)
    parts = plan_for(model, prefill_plan(model, at), decode_lengths(LAST, at))
    rule = f"prefill={at + 1}x1 decode={at + 1}x1"
    whole = plan_for(model, prefill_plan(model), decode_lengths(LAST))
    expected, counts = logits(model, parts, prompt, new, sparse="always")
    found, seen = logits(model, whole, prompt, new, sparse=rule)
    assert torch.equal(found, expected)
    assert seen == counts
    dense, _ = logits(model, whole, prompt, new, sparse="never")
    short = sum(end <= at for end in [*range(CHUNK, 401, CHUNK), *range(401, 431)])
    assert torch.equal(found[:, :short], dense[:, :short])
    assert not torch.equal(found, dense)


def test_dense_up_to_any_context_and_sparse_behind_it_loses_no_more_than_sparse_always(model):
    """Quality is measured with sparse always on; hosts run dense where that is faster."""
    lines = VerticalSlash(vertical=tokens(100), slash=tokens(40), max_tiles=tokens(192))
    plan = plan_for(model, every_head(model, lines), decode_lengths(segment(0, (1, 2, 3), 150)))
    rng, always, auto = random.Random(0), [], []
    for seed in range(4):
        prompt, new = random_tokens(1, 400, seed), random_tokens(1, 8, seed + 10)
        rules = (f"prefill={at}x1 decode={at}x1" for at in rng.sample(range(CHUNK, 408), 2))
        dense, most, *less = (
            logits(model, plan, prompt, new, sparse=how)[0][:, -9:] for how in ("never", "always", *rules)
        )
        lost = [divergence(dense.log_softmax(-1), found.log_softmax(-1)).item() for found in (most, *less)]
        always.append(lost[0])
        auto.append(max(lost[1:]))
    assert 1e-4 < np.mean(always) < 0.5
    assert np.mean(auto) <= np.mean(always)


def test_a_dense_step_remembers_its_queries_for_sparse_ones(model):
    prompt, new = random_tokens(1, 40), random_tokens(1, 20, 1)
    parts, whole = (plan_for(model, None, decode_lengths(OLDER, at)) for at in (50, 0))
    expected, _ = logits(model, parts, prompt, new, sparse="always")
    found, _ = logits(model, whole, prompt, new, sparse="prefill=never decode=51x1")
    assert torch.equal(found, expected)


def test_rows_and_chunks_that_are_too_small_are_dense(model):
    plan = plan_for(model, prefill_plan(model), decode_lengths(LAST))
    prompt, new = random_tokens(2, 160), random_tokens(2, 4, 1)
    rule = f"prefill=1x{CHUNK + 1} decode=1x3"
    assert torch.equal(*(logits(model, plan, prompt, new, sparse=one)[0] for one in (rule, "never")))
    rule = f"prefill=1x{CHUNK} decode=1x2"
    assert torch.equal(*(logits(model, plan, prompt, new, sparse=one)[0] for one in (rule, "always")))


def test_layers_that_evict_or_are_in_host_memory_run_as_planned(model):
    prompt, new = random_tokens(1, 80), random_tokens(1, 6, 1)
    evicting = plan_for(model, None, None, drops((0, 1, 2, 3), 20))
    host = plan_for(model, None, decode_plan(LAST, offload=(1, 2, 3)))
    for plan, how in ((evicting, {}), (host, {"offload": "always"})):
        found, expected = (logits(model, plan, prompt, new, sparse=one, **how)[0] for one in ("never", "always"))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma2"])
def test_dense_layers_of_a_prompt_give_what_the_engine_gives_when_each_of_them_is_asked(architecture, monkeypatch):
    kinds = ["full_attention", "sliding_attention"] * 2
    model = tiny_model(architecture, layers=4, layer_types=kinds, sliding_window=50)
    evicting = plan_for(model, prefill_plan(model), None, drops((2,), 40))
    choosing = plan_for(
        model, prefill_plan(model, 100), decode_lengths(segment(0, (2,), 12, selector="uniform", window=5))
    )
    prompt, new = random_tokens(2, 170), random_tokens(2, 4, 1)
    seen, real = [], DenseLayers.attend
    monkeypatch.setattr(DenseLayers, "attend", lambda *of: seen.append(of[1]) or real(*of))
    for plan, left_out in ((evicting, 2), (choosing, 0)):
        for rule in ("never", "prefill=150x1 decode=never", "always"):
            seen.clear()
            found = logits(model, plan, prompt, new, sparse=rule)
            assert left_out not in seen
            assert bool(seen) == (architecture in ("llama", "gemma3_text") and (plan is choosing or rule != "always"))
            with monkeypatch.context() as without:
                without.setattr(PlanEngine, "_dense_layers", lambda *of: None)
                expected = logits(model, plan, prompt, new, sparse=rule)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]


def python_calls(model, handle=None):
    """Functions that a prompt of few tokens calls, over a cache that is new."""
    counts, before = [], sys.getprofile()
    for _ in range(2):
        cache = DynamicCache(config=model.config) if handle is None else handle.new_cache(16)
        events = Counter()
        sys.setprofile(lambda frame, event, of, events=events: events.update((event,)))
        try:
            with torch.no_grad():
                model(random_tokens(1, 16), **{CACHE_NAME: cache})
        finally:
            sys.setprofile(before)
        counts.append(events["call"])
    return min(counts)


@pytest.mark.parametrize("how", [{"sparse": "never"}, {"prefill": False}], ids=str)
def test_a_layer_of_a_dense_prompt_calls_hardly_more_functions_than_in_transformers(how):
    """Of a short prompt, the device waits for the program."""
    own, ours = [], []
    for layers in (4, 12):
        model = tiny_model(layers=layers)
        own.append(python_calls(model))
        with apply(model, plan_for(model, prefill_plan(model)), **how) as handle:
            ours.append(python_calls(model, handle))
    assert (ours[1] - ours[0]) / 8 < (own[1] - own[0]) / 8 + 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
def test_captured_steps_go_from_dense_to_sparse_over_one_cache(model, monkeypatch):
    prompt, new, rule = random_tokens(1, 40), random_tokens(1, 8, 1), "prefill=never decode=45x1"
    plan = plan_for(model, None, decode_lengths(LAST))
    expected, _ = logits(model, plan, prompt, new, sparse=rule)
    emulate(monkeypatch)
    with apply(model, plan, backend="triton", sparse=rule) as handle:
        found, cache = steps(model, prompt, new[:, :4])
        again = copy.deepcopy(cache)
        more, _ = steps(model, new[:, 4:5], new[:, 5:], cache)
        assert (handle.steps.replayed, handle.steps.captures, handle.steps.why_not) == (8, 2, "")
        copied, _ = steps(model, new[:, 4:5], new[:, 5:], again)
    for rest in (more, copied):
        torch.testing.assert_close(torch.cat((found, rest), 1), expected, rtol=1e-3, atol=1e-4)


def test_steps_that_need_older_queries_are_captured_neither_dense(model, monkeypatch):
    emulate(monkeypatch)
    plan = plan_for(model, None, decode_lengths(OLDER))
    with (
        apply(model, plan, backend="triton", sparse="never") as handle,
        pytest.warns(UserWarning, match="older queries"),
    ):
        steps(model, random_tokens(1, 30), random_tokens(1, 2, 1))
    assert handle.steps.replayed == 0


def work_on(model, launched, replayed, backend="cpu", rank=None, sparse_up_to=4096):
    plan = plan_for(model, prefill_plan(model, 200, sparse_up_to), decode_lengths(LAST, 300))
    program = Program.of(plan.prefill, plan.decode, plan.model, rank)
    place = Place("sha256:", 1024, 512, 4, {1024: counts(4, 0.5)})
    timers, device = Timers(launched, replayed), torch.device("cpu")
    return ModelLayers(program, place, timers, info_of(model), device, torch.float32, backend, float8=False)


def test_a_measurement_runs_dense_and_sparse_kernels_of_a_layer(model):
    seen = []

    def launched(launches, device):
        outs = [launch() for launch in launches]
        seen.append([out.shape for out in outs])
        assert not torch.allclose(*outs)
        return [2.0, 1.0]

    def replayed(launches, device):
        dense, choosing, following = (launch() for launch in launches)
        torch.testing.assert_close(dense, choosing)  # the filter layer attends to everything
        assert dense.shape == following.shape
        assert not torch.allclose(dense, following)
        return [1.0, 1.5, 0.5]

    rule, _ = work_on(model, launched, replayed).rule(60.0)
    assert seen
    assert rule.prefill.pays(512, 1024)
    assert not rule.prefill.pays(32, 1024)  # smaller than any chunk that was measured
    assert (rule.decode.at(1), rule.decode.at(4)) == (301, 301)  # the first behind the dense bucket


def test_layers_with_soft_caps_are_timed_with_their_caps(model):
    outputs = []

    def timer(launches, device):
        outputs[-1].extend(launch() for launch in launches)
        return [1.0] * len(launches)

    work = work_on(model, timer, timer)
    for cap in (None, 0.05):
        outputs.append([])
        torch.manual_seed(0)
        layers = work if cap is None else replace(work, softmax=Softmax(cap))
        layers.prefill_gain(work.program.layers[1], 512, 1024)
        layers.decode_gain(1, 512)
    plain, capped = outputs
    assert len(plain) == len(capped) == 5
    assert not any(torch.allclose(*both) for both in zip(plain, capped, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
@pytest.mark.parametrize("float8", [False, True], ids=["16 bits", "8 bits"])
def test_kernels_of_a_gpu_decode_over_rows_that_overlap(model, monkeypatch, float8):
    emulate(monkeypatch)
    monkeypatch.setattr(timed_model, "_MOST_BYTES", 1 << 20)
    seen = []

    def replayed(launches, device):
        seen.extend([launch() for launch in launches])
        return [1.0, 1.0, 1.0]

    work = work_on(model, lambda launches, device: [1.0, 1.0], replayed, backend="triton")
    assert replace(work, float8=float8).rule(60.0) == (NEVER, True)
    dense, choosing, following = seen[-3:]  # at the longest context
    torch.testing.assert_close(dense, choosing)
    assert dense.shape == following.shape == (4, 4, 1, 32)
    assert not torch.allclose(dense[0], dense[1])
    assert not torch.allclose(dense, following)


def test_kernels_of_short_and_of_long_contexts_are_compiled_before_the_time_runs(model, monkeypatch):
    asked = set()
    for phase in ("prefill_gain", "decode_gain"):
        monkeypatch.setattr(ModelLayers, phase, lambda self, *at, phase=phase: asked.add((phase, *at[-2:])) or 0.0)
    work = work_on(model, None, None)
    work.compile()
    assert {("prefill_gain", rows, 1024) for rows in (128, 512)} | {("decode_gain", 4, 1024)} <= asked
    assert {("prefill_gain", 128, 201), ("decode_gain", 1, 301)} <= asked  # where both begin to be sparse
    assert work.rule(0.0) == (NEVER, False)


def test_where_sparse_is_slower_everything_is_dense(model):
    torch.manual_seed(0)  # random keys have the share of the plan
    work = work_on(model, lambda launches, device: [1.0, 1.0], lambda launches, device: [1.0, 1.0, 1.0])
    assert work.rule(60.0) == (NEVER, True)


def test_a_rule_is_measured_once_and_what_has_no_memory_has_the_hint(model, monkeypatch, tmp_path: Path):
    plan = plan_for(model, prefill_plan(model), decode_lengths(LAST))
    program, calls = Program.of(plan.prefill, plan.decode, plan.model), []
    here = (plan, program, info_of(model), model, "cpu", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def failing(self, seconds):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ModelLayers, "compiled_rule", failing)
    with pytest.warns(PlanWarning, match="no memory to measure"):
        assert measured_rule(*here) == program.hint
    monkeypatch.setattr(ModelLayers, "compiled_rule", lambda self, seconds: calls.append(seconds) or (ALWAYS, True))
    assert [measured_rule(*here) for _ in range(2)] == [ALWAYS, ALWAYS]
    assert calls == [1.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_of_a_prompt_is_timed_between_the_products_of_its_layer(model, ranks):
    flops = []

    def launched(launches, device):
        for launch in launches:
            with FlopCounterMode(display=False) as counter:
                assert launch() == "attended"
            flops.append(counter.get_total_flops())
        return [3.0, 2.0]

    layers = work_on(model, launched, None, rank=Rank(0, ranks))
    assert layers.layer_gain(lambda: "attended", lambda: "attended", torch.ones(8, 4)) == 1.5
    assert flops == [2 * 8 * 4 * (12 * 4 * ranks)] * 2


def test_the_products_of_a_timed_layer_take_no_memory_in_another_precision(model):
    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            dtypes.add(made.dtype)
            return made

    def launched(launches, device):
        for launch in launches:
            launch()
        return [1.0, 1.0]

    dtypes, layers, x_TE = set(), work_on(model, launched, None), torch.ones(8, 4, dtype=torch.bfloat16)
    with Made():
        layers.layer_gain(lambda: None, lambda: None, x_TE)
    assert dtypes == {torch.bfloat16}


def test_a_phase_that_takes_all_the_time_leaves_some_to_the_others(model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timed_layers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ModelLayers, "prefill_gain", lambda *_: now.append(now.pop() + 99.0) or 2.0)
    monkeypatch.setattr(ModelLayers, "decode_gain", lambda *_: 2.0)
    rule, is_whole = work_on(model, None, None).rule(60.0)
    assert (rule.decode, is_whole) == (Thresholds((1,), (301,)), False)


def test_the_first_context_of_every_bucket_is_one_to_choose_from(model, monkeypatch):
    chosen = []

    def measure_each(rows, lengths, gain, *, bounds, **how):
        chosen.append((lengths, bounds))
        return Thresholds()

    monkeypatch.setattr(timed_layers, "measure", lambda *_, **how: Thresholds())
    monkeypatch.setattr(timed_layers, "measure_each", measure_each)
    work_on(model, None, None, sparse_up_to=600).rule(60.0)
    assert chosen == [([201, 256, 363, 512, 601, 725, 1024], (200, 600))]


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_more_tokens_than_a_cache_holds_are_not_timed_and_leave_smaller_ones_a_threshold(
    model, monkeypatch, seed
):
    source, asked = random.Random(seed), []
    tokens, most = source.randrange(4096, 1 << 18), source.choice([16, 300, 4096])
    work = work_on(model, None, None)
    place = Place.of(plan_for(model, None, decode_lengths(LAST, 300)), 16384, 512, most, tokens)
    assert 0.8 * tokens < place.tokens <= max(tokens, 16384)
    least = {rows: source.randrange(200, 40000) // rows**0.7 for rows in range(1, most + 1)}
    least = {rows: min(least[size] for size in range(1, rows + 1)) for rows in list(least)[:300]}

    def gain(_, rows, length):
        asked.append((rows, length))
        return 2.0 if length >= least[min(rows, 300)] else 0.5

    monkeypatch.setattr(ModelLayers, "decode_gain", gain)
    work = replace(work, place=place)
    found, (sizes, lengths) = work.rule(60.0)[0].decode, work._decode_sizes
    assert sizes
    assert max(rows * length for rows, length in asked) <= place.tokens
    first = {}
    for rows in sizes:
        pay = [n for n in lengths if n >= max(rows, least[min(rows, 300)]) and n * rows <= place.tokens]
        before = min(first.values(), default=math.inf)
        if pay and pay[0] < before:
            first[rows] = pay[0]
    assert dict(zip(found.rows, found.tokens, strict=True)) == first


def test_decode_is_timed_only_where_a_layer_chooses(model):
    buckets = (*decode_lengths(LAST, 300).lengths[:1], DecodeBucket(up_to=600, segments=(LAST,)))
    plan = DecodePlan(lengths=(*buckets, DecodeBucket(up_to=None, dense=True)))
    work = work_on(model, None, lambda launches, device: [1.0, 0.5, 0.5])
    work = replace(work, program=Program.of(None, plan, info_of(model)))
    assert work._decode_sizes[1] == [301, 363, 512]
    assert work.rule(60.0)[0].decode == Thresholds((1,), (301,))


def test_where_random_keys_never_reach_the_share_the_hint_decides(model, monkeypatch):
    monkeypatch.setattr(ModelLayers, "alike", lambda *_: None)
    work = work_on(model, None, lambda launches, device: [1.0, 1.0, 1.0])
    assert math.isnan(work.prefill_gain(work.program.layers[0], 512, 1024))
    assert work.rule(60.0)[0] == Pays(Thresholds((128,), (0,)), Thresholds())  # the smallest size that the hint has


@pytest.mark.parametrize("rank", [None, Rank(1, 2)], ids=["one rank", "second of two"])
@pytest.mark.parametrize("rows", [1024, 256])
def test_each_head_of_a_timed_layer_computes_the_counts_of_the_plan(model, rank, rows):
    """Counts are those of whole prompts: later rows have the same mandatory tiles, a smaller share of theirs."""
    lines = VerticalSlash(vertical=tokens(64), slash=tokens(256), last_q=64, max_tiles=tokens(256))
    work = work_on(model, None, None, rank=rank)
    layer = replace(work.program.layers[1], bounds=(), patterns=((lines,) * (4 if rank is None else 2),))
    wanted = LayerCounts(layer=1, tiles=(0.4, 0.35, 0.6, 0.5), columns=(0.0, 0.08, 0.02, 0.15))
    work = replace(work, place=replace(work.place, computed={1024: (wanted,)}))
    chunk, (q_BHTD, k_BGKD, _) = Chunk.uniform(1, 1024 - rows, 1024), work._tensors(layer, 1, rows, 1024)
    alike = work.alike(layer, q_BHTD, k_BGKD, chunk, 0.25)
    index = build_index(alike.patterns_at(1024), q_BHTD, k_BGKD, chunk, layer.tile, scale=0.25)
    computed_H = computed_tiles(index)[0] / chunk.causal_tiles(layer.tile)
    mandatory = 45 / 136, {1024: 45 / 136, 256: 12 / 58}[rows]
    both = zip(wanted.tiles, wanted.columns, strict=True)
    planned_H = np.array([tiles - mandatory[0] + mandatory[1] + columns for tiles, columns in both][-layer.heads :])
    assert np.abs(computed_H.numpy() - planned_H).sum() <= 0.1 * planned_H.sum()


def test_a_phase_that_is_sparse_in_a_narrow_bucket_alone_is_measured_there(model):
    """No power of sqrt(2) lies in it, and all behind it is dense."""
    narrow = DecodeBucket(up_to=320, segments=(LAST,))
    decode = DecodePlan(lengths=(DecodeBucket(up_to=260, dense=True), narrow, DecodeBucket(up_to=None, dense=True)))
    ends = PrefillBucket(up_to=260, dense=True), PrefillBucket(up_to=None, dense=True)
    prefill = prefill_plan(model, sparse_up_to=320)
    prefill = prefill.model_copy(update={"lengths": (ends[0], prefill.lengths[0], ends[1])})
    work = replace(work_on(model, None, None), program=Program.of(prefill, decode, info_of(model)))
    assert (work._prefill_sizes[1], work._decode_sizes[1]) == ([261], [261])


@pytest.mark.parametrize("seed", range(10))
def test_ranks_whose_heads_are_sparse_in_other_buckets_measure_the_same(model, monkeypatch, seed):
    source, info, asked = random.Random(seed), info_of(model), []
    heads = range(info.attention[0].heads)
    sparse = [
        tuple(HeadGroup(layer=layer, heads=own, pattern=PATTERN) for layer in range(4) if (own := own_heads()))
        for own_heads in [lambda: tuple(head for head in heads if source.random() < 0.3)] * 3
    ]
    buckets = (PrefillBucket(up_to=up_to, heads=of) for up_to, of in zip((200, 600, None), sparse, strict=True))
    plan = plan_for(model, every_head(model, PATTERN).model_copy(update={"lengths": tuple(buckets)}))
    monkeypatch.setattr(
        ModelLayers, "prefill_gain", lambda self, layer, *at: asked[-1].append((layer.layer, *at)) or 2.0
    )
    for rank in range(2):
        asked.append([])
        program = Program.of(plan.prefill, None, plan.model, Rank(rank, 2))
        replace(work_on(model, None, None), program=program).rule(60.0)
    assert asked[0] == asked[1] != []
