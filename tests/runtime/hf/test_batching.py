"""Continuous batching of transformers under a plan: each request is as in the ordinary host at the same cuts."""

import copy
import random
import weakref
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, drops, every_head, plan_for, segment
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache_allocators, initialization, model_runner

from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.patterns import AShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.hf import batching
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.attention import NAME, Phase
from sparsekv.runtime.hf.batching import BatchEngine
from sparsekv.runtime.hf.graphs import GraphWarning

PATTERNS = (
    AShape(sink=tokens(64), window=tokens(64)),
    VerticalSlash(vertical=tokens(9), slash=tokens(64), max_tiles=fraction(1.0)),
)
WINDOWED = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 20}
KINDS = {"llama": {}, "qwen3": {}, "gpt_oss": WINDOWED, "gemma2": WINDOWED, "olmo2": {}}
DEVICE = "cuda"
TOLERANCE = 1e-3  # between logits: where the best two are this close, either token is right


def settings(new, **options):
    sizes = {"page_size": 16, "num_blocks": 200, "max_batch_tokens": 64, "allow_block_sharing": False} | options
    return {
        "generation_config": GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=[], pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(**sizes),
    }


def made(kind, seed=0):
    """A model, and a plan of both phases that leaves its windowed layers dense."""
    options = KINDS[kind]
    model = tiny_model(kind, seed=seed, **options)
    first = 1 if options else 0
    prefill = every_head(model, *PATTERNS)
    heads = tuple(group for group in prefill.lengths[0].heads if group.layer >= first)
    bucket = prefill.lengths[0].model_copy(update={"heads": heads})
    chosen = decode_plan(segment(first, tuple(range(first + 1, 3)), 8))
    return model, plan_for(model, PrefillPlan(tile=prefill.tile, lengths=(bucket,)), chosen)


@pytest.fixture
def cuts(monkeypatch):
    """By request, the passes that it took part in: tokens before it, new ones, and whether it decoded."""
    seen, begin = defaultdict(list), BatchEngine.begin_pass

    def recorded(engine, requests, inputs):
        for request in requests:
            state, new = request.state, request.query_length
            seen[state.request_id].append((state.position_offset - new, new, bool(state.generated_tokens)))
        begin(engine, requests, inputs)

    monkeypatch.setattr(BatchEngine, "begin_pass", recorded)
    return seen


def check(model, output, passes):
    """The ordinary host gives each token of a request in the same passes."""
    attached = vars(model.get_decoder().layers[0].self_attn)[NAME]
    ids, at, cache = output.prompt_ids + output.generated_tokens, 0, None
    for past, new, decodes in passes:
        given = torch.tensor([ids[past : past + new]])
        cache = None if past == 0 else cache
        with attached.stepping(Phase.DECODE if decodes else Phase.PREFILL):
            run = model(given, past_key_values=cache, use_cache=True)
        cache, end = run.past_key_values, past + new
        if len(output.prompt_ids) <= end < len(ids):
            last = run.logits[0, -1]
            assert last[ids[end]] > last.max() - TOLERANCE, (end, past, new)
            at = max(at, end)
    assert at == len(ids) - 1


@torch.no_grad()
def run_mix(seed, cuts):
    """Requests that come while others run, some cancelled, in a cache that may be too small for all at once."""
    cuts.clear()
    some = random.Random(seed)
    model, plan = made(some.choice(list(KINDS)), seed)
    sizes = {"page_size": some.choice((4, 16, 32)), "max_batch_tokens": some.choice((24, 64, 200))}
    sizes["num_blocks"] = some.choice((-(-320 // sizes["page_size"]), 400))  # room for the longest alone, or for all
    lengths = [some.randint(1, 300) for _ in range(some.randint(2, 6))]
    cancelled, outputs = [], {}
    with apply(model, plan, sparse="always"):
        with model.continuous_batching_context_manager(**settings(some.randint(1, 12), **sizes)) as manager:
            names = []
            for at, length in enumerate(lengths):
                names.append(manager.add_request(random_tokens(1, length, seed * 10 + at)[0].tolist()))
                if some.random() < 0.2:
                    manager.cancel_request(cancelled_name := some.choice(names))
                    cancelled.append(cancelled_name)
                if some.random() < 0.5 and (output := manager.get_result(timeout=0.05)):
                    outputs[output.request_id] = output
            while {*names} - {*outputs, *cancelled}:
                if output := manager.get_result(timeout=20):
                    outputs[output.request_id] = output
                else:
                    raise AssertionError(f"no more results after {len(outputs)} of {len(names)}")
        for name, output in outputs.items():
            assert output.error is None
            check(model, output, cuts[name])
    return len(outputs)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 201))])
def test_mixed_batches_are_as_in_the_ordinary_host(seed, cuts):
    run_mix(seed, cuts)


PROMPTS = [random_tokens(1, length, length)[0].tolist() for length in (5, 70, 33, 150, 1, 64)]


def answers(model, persistent=False, new=8, warmup=True, **options):
    asked = settings(new, **options) | {"persistent_manager": persistent, "warmup": warmup}
    outputs = model.generate_batch(PROMPTS, **asked).values()
    assert not any(output.error for output in outputs)
    return [output.generated_tokens for output in outputs]


def session(manager, keep=False):
    """Answers of a manager that is started and stopped, and its cache, if somebody still has it."""
    manager.start()
    names = [manager.add_request(prompt) for prompt in PROMPTS]
    outputs = {output.request_id: output for output in (manager.get_result(timeout=20) for _ in names)}
    cache = weakref.ref(manager.batch_processor.cache)
    manager.stop(keep_for_next_session=keep)
    assert not any(output.error for output in outputs.values())
    return [outputs[name].generated_tokens for name in names], cache()


@pytest.fixture(scope="module")
def unplanned(model):
    """Answers of the model without a plan, whose manager stays for the next call."""
    return answers(model, persistent=True)


def test_a_dense_plan_is_as_no_plan(model, unplanned):
    plan = plan_for(model, every_head(model, *PATTERNS), decode_plan(segment(0, (1, 2), 8)))
    with apply(model, plan, sparse="never"):
        assert answers(model) == unplanned


def test_nobody_lists_where_cached_keys_are(model, unplanned, monkeypatch):
    """A list of every cached token, a pass: 17 ms on the host beside a step of 8 requests of 32K."""

    def listed(*_):
        raise AssertionError("read indices of a layer whose pages are read")

    monkeypatch.setattr(cache_allocators.FullAttentionCacheAllocator, "get_read_indices", listed)
    with apply(model, plan_for(model), sparse="never"):
        assert answers(model) == unplanned


@pytest.fixture
def captured(monkeypatch):
    """Lists the graphs that are captured, by rows: a replay runs the same call, with all that the engine had then."""
    graphs = []

    def capture(runner, forward, stream, *args):
        io, (rows,) = runner.inputs_and_outputs, runner.inputs_and_outputs._get_graph_key()
        attached = vars(args[0].get_decoder().layers[0].self_attn)[NAME]
        (batch,) = attached._batches._started
        forward(*args)
        forward(*args)
        captured = {"requests": copy.deepcopy(batch.requests), "cache": batch.cache, "_least": batch._least}

        def replay():
            with pytest.MonkeyPatch.context() as patch:
                for name, value in captured.items():
                    patch.setattr(batch, name, value)
                forward(*args)
            graphs.append(("replayed", rows))

        io.set_graph(SimpleNamespace(replay=replay, reset=lambda: None))
        graphs.append(("captured", rows))

    monkeypatch.setattr(batching, "can_capture", lambda device, backend: True)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "emulated")
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, None))
    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", capture)
    return graphs


def test_dense_decode_is_captured_once_a_number_of_rows_and_counted(model, unplanned, captured):
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 8)))
    with apply(model, plan, sparse="never") as handle:
        assert answers(model) == unplanned
        assert sorted(rows for kind, rows in captured if kind == "captured") == [1, 2, 4, 6]  # 6: most a batch
        assert sum(kind == "replayed" for kind, _ in captured) >= 6
        found = handle.stats()
    cached = sum(3 * (len(prompt) + new) for prompt in PROMPTS for new in range(1, 8))
    assert found.decode_tokens_cached == found.decode_tokens_attended == cached


@pytest.mark.parametrize("rule", ["60x1", "130x1,82x2"])
def test_captured_steps_choose_as_others(rule, model, captured):
    """From 60 tokens on, so that graphs of steps with and without a choice have as many rows; or from 130, and from 82
    once a second request has as many, beside as many rows."""
    plan, rule = plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), f"prefill=0x1 decode={rule}"
    with apply(model, plan, sparse=rule) as handle:
        sparse = answers(model, new=20)
        share = handle.stats().decode_share
    assert sum(kind == "replayed" for kind, _ in captured) >= 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "can_capture", lambda device, backend: False)
        with apply(model, plan, sparse=rule) as handle:
            assert answers(model, new=20) == sparse
            assert handle.stats().decode_share == share < 1


@pytest.mark.parametrize("keep", [True, False])
def test_graphs_last_as_long_as_the_pages_that_they_read(keep, model, captured):
    with apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), sparse="always"):
        manager = model.init_continuous_batching(**settings(8))
        first, cache = session(manager, keep)
        assert (cache is not None) == keep
        assert session(manager, keep)[0] == first
    assert captured.count(("captured", 8)) == (1 if keep else 2)


@pytest.mark.parametrize("keep", [True, False])
def test_a_manager_outlives_the_plan_and_decodes_without_it(keep, model, unplanned):
    with apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), sparse="always"):
        manager = model.init_continuous_batching(**settings(8))
        assert session(manager, keep)[0] != unplanned
    assert session(manager)[0] == unplanned


def test_a_manager_may_be_made_while_a_loop_looks_for_its_own(model, monkeypatch):
    with apply(model, plan_for(model)):
        managers = [model.init_continuous_batching(**settings(1))]

        def looked_at(_):
            managers.append(model.init_continuous_batching(**settings(1)))

        monkeypatch.setattr(BatchEngine, "cache", property(looked_at, lambda *_: None), raising=False)
        assert vars(model.get_decoder().layers[0].self_attn)[NAME]._batches.of({"cache": object()}) is None
        assert len(managers) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::sparsekv.runtime.hf.graphs.GraphWarning")
@pytest.mark.parametrize("rule", ["never", "prefill=0x1 decode=60x1"])
def test_a_gpu_replays_steps_and_gives_the_tokens_of_those_that_are_launched(rule, cuts, monkeypatch):
    model = tiny_model(head_dim=64).to(DEVICE)
    plan, found = plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), []
    for captures in (batching.can_capture, lambda device, backend: False):
        monkeypatch.setattr(batching, "can_capture", captures)
        cuts.clear()
        with apply(model, plan, sparse=rule):
            found.append(answers(model))
        found.append(sum(len(passes) for name, passes in cuts.items() if not name.startswith("__warmup")))
    tokens, called, launched_tokens, launched = found
    assert tokens == launched_tokens
    assert called < launched


@pytest.mark.parametrize("warmup", [True, False])
def test_a_step_that_cannot_be_captured_runs_by_itself_and_later_ones_without_padding(
    warmup, model, unplanned, captured, monkeypatch
):
    passes, attend = [], BatchEngine.attend

    def fails(runner, forward, stream, *args):
        forward(*args)
        passes.clear()
        raise RuntimeError("operation not permitted when stream is capturing")

    def attended(batch, call):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
            out = attend(batch, call)
        padding = out.shape[2] - sum(request.query_length for request in batch.requests)
        passes.append((bool(out.isnan().any()), padding))
        return out

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", fails)
    monkeypatch.setattr(BatchEngine, "attend", attended)
    with apply(model, plan_for(model), sparse="never"), pytest.warns(GraphWarning, match="not permitted"):
        assert answers(model, warmup=warmup, max_requests_per_batch=8) == unplanned
    layers = len(model.get_decoder().layers)
    assert passes[:layers] == [(False, 0 if warmup else 2)] * layers  # the pass that fails runs again as it is
    assert {*passes[layers:]} == {(False, 0)}


def test_a_manager_that_failed_to_capture_starts_again_without_padding(model, captured, monkeypatch):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", fails)
    with apply(model, plan_for(model), sparse="never"):
        manager = model.init_continuous_batching(**settings(8))
        with pytest.warns(GraphWarning, match="not permitted"):
            session(manager)
        manager.warmup()
        assert not manager.batch_processor.model_runner.pad_inputs


@pytest.mark.filterwarnings("error::sparsekv.runtime.hf.graphs.GraphWarning")
def test_memory_that_runs_out_in_a_capture_is_told_as_such(model, captured, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", fails)
    with apply(model, plan_for(model), sparse="never"):
        outputs = model.generate_batch(PROMPTS, warmup=False, **settings(8)).values()
    assert "no room" in {output.error for output in outputs}


def test_prefixes_are_shared_and_requests_forked(model, cuts):
    prefix = random_tokens(1, 100, 3)[0].tolist()
    prompts = [prefix + prompt for prompt in PROMPTS]
    with torch.no_grad(), apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), sparse="always"):
        options = settings(8, allow_block_sharing=True)
        alone = [model.generate(torch.tensor([prompt]), options["generation_config"]) for prompt in prompts]
        options["generation_config"].num_return_sequences = 2
        found = [output.generated_tokens for output in model.generate_batch(prompts, **options).values()]
        computed = sum(new for passes in cuts.values() for _, new, decodes in passes if not decodes)
        assert computed < sum(map(len, prompts)) - 3 * len(prefix)
    expected = [ids[0, len(prompt) :].tolist() for ids, prompt in zip(alone, prompts, strict=True) for _ in range(2)]
    assert found == expected


def test_generate_and_a_running_loop_take_turns(model):
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 8)))
    with torch.no_grad(), apply(model, plan, sparse="always") as handle:
        ids = torch.tensor(PROMPTS[3:4])
        alone = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 150:].tolist()
        with model.continuous_batching_context_manager(**settings(40)) as manager:
            names = [manager.add_request(prompt) for prompt in PROMPTS]
            assert model.generate(ids, max_new_tokens=8, do_sample=False)[0, 150:].tolist() == alone
            outputs = {output.request_id: output for output in (manager.get_result(timeout=20) for _ in names)}
        assert outputs[names[3]].generated_tokens[:8] == alone
        stats = handle.stats()
        assert 0 < stats.decode_tokens_attended < stats.decode_tokens_cached


@pytest.mark.parametrize("has_room", [True, False])
def test_requests_longer_than_the_context_choose_and_rows_without_scratch_count_as_dense(has_room, monkeypatch):
    model = tiny_model(max_position_embeddings=128)
    prompts = [random_tokens(1, length, length)[0].tolist() for length in (140, 160)]
    if not has_room:  # but for the scores of one
        monkeypatch.setattr("sparsekv.runtime.core.segments.SCORE_BYTES", 4 * 4 * 200)
    with (
        torch.no_grad(),
        apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8))), sparse="always") as handle,
    ):
        outputs = model.generate_batch(prompts, **settings(6)).values()
        share = handle.stats().decode_share
        handle.reset_stats()
        alone = [
            model.generate(torch.tensor([ids]), settings(6)["generation_config"])[0, len(ids) :] for ids in prompts
        ]
        sparse = handle.stats().decode_share
    if has_room:
        assert share == pytest.approx(sparse)
        assert [output.generated_tokens for output in outputs] == [ids.tolist() for ids in alone]
    else:
        assert share == pytest.approx((sparse + 1) / 2, abs=0.1)


def test_closing_ends_a_loop_and_its_requests(model):
    with apply(model, plan_for(model, None, decode_plan(segment(0, (1, 2), 8)))):
        manager = model.init_continuous_batching(**settings(4000))
        manager.start()
        name = manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=0.3) is None
    assert not manager.is_running()
    failed = manager.output_router.output_queue.get(timeout=5)
    assert failed.request_id == name
    assert failed.error


def test_a_manager_kept_from_before_is_not_taken(model, unplanned):
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 8)))
    with apply(model, plan, sparse="always"):
        sparse = answers(model, persistent=True)
        assert answers(model, persistent=True) == sparse != unplanned
    assert answers(model) == unplanned


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        ({"decode": decode_plan(segment(0, (1, 2), 8, selector="uniform", window=3))}, {}, "newest query"),
        ({"evicts": drops((1,), 8)}, {}, "evict"),
        ({"decode": decode_plan(segment(0, (1, 2), 8))}, {"exact": True}, "exact"),
        ({"decode": decode_plan(segment(0, (1, 2), 8))}, {"kv_dtype": "fp8"}, "fp8"),
    ],
)
def test_what_it_cannot_follow_is_refused_before_anything_runs(model, plan, options, said):
    evicts = [plan["evicts"]] if "evicts" in plan else []
    with apply(model, plan_for(model, None, plan.get("decode"), *evicts), **options):
        with pytest.raises(UnsupportedError, match=said):
            model.generate_batch(PROMPTS, **settings(2))
        assert model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=1).shape == (1, 6)


def test_layers_in_host_memory_stay_on_the_device_and_it_says_so(model):
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 8), offload=(1, 2)))
    with (
        pytest.warns(PlanWarning, match="saves nothing"),
        apply(model, plan, offload="always"),
        pytest.warns(PlanWarning, match=r"layers 1-2 may be in host memory"),
    ):
        model.init_continuous_batching(**settings(1))
