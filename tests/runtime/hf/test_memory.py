"""What a run takes of memory is known before it runs: exactly for keys and values, closely for the rest."""

import gc
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_indexers import planted_model
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, drops, info_of, plan_for, segment
from torch_state import most_allocated
from transformers import AutoConfig, AutoModelForCausalLM

from sparsekv.bench.hand_plans import hand_plan
from sparsekv.bench.public_shapes import PUBLIC_SHAPES
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.memory import Available, MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import Placement
from sparsekv.runtime.stores.pinned import Block

GIB = 1 << 30
OFFLOADED = (2, 3, 5)
DECODE = decode_plan(segment(1, (2, 3), 64), segment(4, (5, 6), 32), offload=OFFLOADED, hot=16)


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=7)


@pytest.fixture(scope="module")
def size(model):
    return ModelSize.of(model, info_of(model))


@pytest.fixture(scope="module")
def llama():
    return ModelSize.from_config(AutoConfig.for_model(**PUBLIC_SHAPES["llama3-8b-1m"]), torch.bfloat16, "llama")


def test_the_size_of_a_config_is_that_of_the_model_made_of_it(model, size):
    found = ModelSize.from_config(model.config, model.dtype, "tests/tiny")
    assert found.weights == size.weights == model.get_memory_footprint()
    assert (found.hidden, found.intermediate, found.dtype) == (64, 96, torch.float32)


def test_keys_of_a_model_with_indexers_are_counted_as_its_cache_has_them() -> None:
    model = planted_model("deepseek_v32", "FS")
    cache = model(random_tokens(1, 40), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes + layer.indexer_keys.nbytes for layer in cache.layers)
    assert ModelSize.of(model, describe_model(model, "tests/indexers")).cached(40) == held


@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
def test_a_window_of_queries_takes_no_more_than_was_said(model, size, heads):
    decode = decode_plan(segment(1, (2, 3), 8, selector="uniform", window=16, heads=heads))
    estimate, request = MemoryModel(size, None, decode, True), Request(4000, 1, chunk=40)
    said = estimate.use(request, estimate.permitted).working
    with torch.no_grad(), apply(model, plan_for(model, decode=decode)) as handle:
        cache = handle.new_cache(4001)
        for piece in random_tokens(1, 4000).split(1000, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        most = most_allocated(lambda: model(random_tokens(1, 1), past_key_values=cache))
    assert said / 2 < most <= said


@pytest.mark.parametrize(
    ("length", "batch", "window", "gib"),
    [(1 << 17, 8, 64, 4.09), (1 << 19, 4, 32, 4.37), (1 << 20, 1, 32, 1.93)],
)
def test_scores_of_a_window_are_counted_where_they_exceed_a_piece_of_the_prompt(llama, length, batch, window, gib):
    decode = decode_plan(segment(1, (2, 3), 2048, selector="uniform", window=window))
    estimate, request = MemoryModel(llama, None, decode, on_cpu=False), Request(length, batch=batch, chunk=4096)
    assert estimate.use(request, estimate.permitted).working / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize("chunk", [None, 4096])
def test_keys_in_8_bits_that_an_eviction_scores_are_counted_as_a_copy(llama, chunk):
    request = Request(1 << 20, chunk=chunk)
    plain, evicts = (
        MemoryModel(llama, None, None, on_cpu=True, evicting=rules, float8=True).use(request, Placement()).working
        for rules in ({}, {3: drops((3,), 1024)})
    )
    keys, waiting = 2 * (8 * 128 << 20), 2 * 8 * 128 * ((1 << 20) - 2000)
    assert evicts - plain > keys + waiting


# Peak memory of sparse prompts and of the longest context, measured on an H200.
@pytest.mark.parametrize(
    ("length", "density", "host_layers", "peak"),
    [(1 << 15, 0.2, 0, 20.9), (1 << 17, 0.08, 0, 34.5), (1 << 19, 0.04, 0, 89.4), (1 << 20, 0.03, 12, 117.7),
     (3 << 19, 0.015, (*range(13, 18), *range(19, 32)), 141.4e9 / GIB)],
)  # fmt: skip
def test_peaks_of_long_prompts_are_at_most_5_percent_below_the_estimate(llama, length, density, host_layers, peak):
    plan, _ = hand_plan(llama.info, [length], [density], TileShape())
    estimate = MemoryModel(llama, plan.prefill, None, on_cpu=False, host_layers=host_layers)
    use = estimate.use(Request(length), estimate.permitted)
    assert peak <= (use.device - use.spare) / GIB <= 1.05 * peak
    layers = host_layers if isinstance(host_layers, int) else len(host_layers)
    assert use.kv_host == layers * length * 2 * 8 * 128 * 2


@settings(deadline=None)
@given(
    device=st.integers(0, 1 << 26),
    host=st.integers(0, 3 << 30),
    answer=st.integers(0, 50),
    chunk=st.none() | st.just(64),
    more=st.integers(1, 100_000),
)
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_the_longest_prompt_fits_and_no_longer_one_does(size, mode, device, host, answer, chunk, more):
    """From 100 tokens on: a layer in host memory is there already where its budget just covers the context, and on the
    device again where it has slots."""
    estimate, available = MemoryModel(size, None, DECODE, False, mode), Available(GIB + device, host)
    longest = estimate.longest(Request(1, answer, chunk=chunk), available)

    def fits(prompt):
        request = Request(prompt, answer, chunk=chunk)
        return estimate.fits(estimate.use(request, estimate.place(request, available)), available)

    assert longest == 0 or fits(longest)
    assert longest < 100 or not fits(longest + 1)
    assert longest < 100 or not fits(longest + more)


@settings(deadline=None)
@given(free=st.integers(0, 1 << 26), prompt=st.integers(1, 20_000))
def test_auto_moves_as_few_layers_as_it_can_and_none_that_the_plan_does_not_permit(size, free, prompt):
    estimate, request = MemoryModel(size, None, DECODE, False, "auto"), Request(prompt)
    never = MemoryModel(size, None, DECODE, False, "never")
    available = Available(GIB + free, None)
    found, tighter = (estimate.place(request, one).layers for one in (available, Available(GIB + free // 2, None)))
    assert found <= tighter <= set(OFFLOADED)
    assert (not found) == never.fits(never.use(request, never.permitted), available)
    if found:
        assert 5 in found  # its segment chooses fewer tokens


def test_a_request_that_does_not_fit_is_refused_with_the_prompt_that_would(size):
    estimate, available = MemoryModel(size, None, DECODE, False, "never"), Available(2 * GIB, None)
    longest = estimate.longest(Request(1), available)
    estimate.check(Request(longest), available)
    with pytest.raises(
        UsageError, match=rf"device memory for {longest + 1:,} tokens.*2\.0 GiB.*a prompt of {longest:,}"
    ):
        estimate.check(Request(longest + 1), available)
    with pytest.raises(UsageError, match="no prompt fits"):
        estimate.check(Request(1), Available(0, None))
    hosted = MemoryModel(size, None, DECODE, False, "always")
    with pytest.raises(UsageError, match=r"layers 2-3,5"):
        hosted.check(Request(1 << 22), Available(None, GIB))
    on_cpu = MemoryModel(size, None, DECODE, True, "never")
    with pytest.raises(UsageError, match=r"1 GiB to spare.*--prefill-chunk\)$"):
        on_cpu.check(Request(1 << 22), Available(None, GIB))


def test_a_cache_that_cannot_be_had_is_refused_before_anything_is_allocated(model):
    with apply(model, plan_for(model, decode=DECODE)) as handle:
        with pytest.raises(UsageError, match="GiB of host memory"):
            handle.new_cache(1 << 34)
        assert handle.stats().kv_bytes_host == 0


def test_the_prompt_that_a_refusal_names_is_not_refused(model, monkeypatch):
    monkeypatch.setattr(Available, "here", lambda _: Available(None, 2 * GIB))
    with apply(model, plan_for(model), offload="never") as handle:
        with pytest.raises(UsageError, match="200,000") as refused:
            handle.new_cache(1_200_000, answer=200_000)
        advised = int(re.search(r"a prompt of ([\d,]+) tokens", str(refused.value))[1].replace(",", ""))
        handle.new_cache(advised + 200_000, answer=200_000)
        with pytest.raises(UsageError, match="GiB of host memory"):
            handle.new_cache(advised + 200_001, answer=200_000)
        with pytest.raises(UsageError, match="GiB of host memory"):
            handle.new_cache(advised + 200_000)  # all of it is prompt


def test_a_refused_cache_leaves_the_placement_as_it_was(model, monkeypatch):
    monkeypatch.setattr(Available, "here", lambda _: Available(5 * GIB, GIB))
    with apply(model, plan_for(model, decode=DECODE), offload="auto") as handle:
        monkeypatch.setattr(handle, "_memory", replace(handle._memory, on_cpu=False))
        handle.new_cache(100)
        assert handle.host_layers == set()
        with pytest.raises(UsageError, match="GiB of device memory"):
            handle.new_cache(1 << 24)
        assert handle.host_layers == set()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tokens": None}, "of 1 or more"),
        ({"tokens": "5"}, "of 1 or more"),
        ({"tokens": -1}, "of 1 or more"),
        ({"tokens": 5, "batch": 1.0}, "of 1 or more"),
        ({"tokens": 9, "chunk": 0}, "of 1 or more"),
        ({"tokens": 9, "at_most": True}, "of 1 or more"),
        ({"tokens": 9, "answer": 9}, "answer to be 0 to 8 of the 9 tokens, found 9"),
        ({"tokens": 9, "answer": -1}, "found -1"),
    ],
    ids=str,
)
def test_sizes_that_are_none_are_refused(model, sizes, said):
    with apply(model, plan_for(model)) as handle, pytest.raises(UsageError, match=said):
        handle.new_cache(**sizes)


def blocks():
    return sum(type(thing) is Block for thing in gc.get_objects())


def test_ctrl_c_while_memory_is_had_frees_all_of_it(model):
    told = []

    def press(more, total):
        told.append((more, total))
        if len(told) == 3:
            raise KeyboardInterrupt

    before = blocks()
    with apply(model, plan_for(model, decode=DECODE)) as handle:
        with pytest.raises(KeyboardInterrupt):
            handle.new_cache(1000, on_bytes=press)
        assert blocks() == before
        stats = handle.stats()
        assert (stats.kv_bytes_device, stats.kv_bytes_host) == (0, 0)
        told.clear()
        cache = handle.new_cache(1000, on_bytes=lambda more, total: told.append((more, total)))
        assert sum(more for more, _ in told) == handle.stats().kv_bytes_host == told[0][1]
        assert blocks() == before + len(OFFLOADED)
        del cache


@pytest.fixture(scope="module")
def twelve_layers():
    """Twelve layers of the 8B shape on the GPU, with its sizes, and bytes that were allocated before."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    config = AutoConfig.for_model(**PUBLIC_SHAPES["llama3-8b-1m"] | {"num_hidden_layers": 12})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model, ModelSize.of(model, describe_model(model)), before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 30 GiB of a GPU")
@pytest.mark.parametrize("length", [1 << 15, 1 << 17])
@pytest.mark.parametrize(
    ("kv_dtype", "host_layers", "chunk"),
    [("auto", 0, None), ("fp8", 0, None), ("auto", 4, None), ("auto", 0, 1 << 14)],
    ids=["device", "8 bits", "host memory", "in pieces"],
)
def test_the_peak_of_a_pass_is_at_most_5_percent_below_the_estimate(
    twelve_layers, length, kv_dtype, host_layers, chunk
):
    model, size, before = twelve_layers
    plan, _ = hand_plan(size.info, [length], [0.1], TileShape())
    estimate = MemoryModel(size, plan.prefill, None, on_cpu=False, host_layers=host_layers, float8=kv_dtype == "fp8")
    said = estimate.use(Request(length, 16, chunk=chunk), estimate.permitted)
    prompt = random_tokens(1, length).cuda()
    with (
        torch.no_grad(),
        apply(model, plan, kv_host_layers=host_layers, kv_dtype=kv_dtype, sparse="always") as handle,
    ):
        handle._engine.paging = replace(handle._engine.paging, pools={})  # pages are not counted there
        model(prompt[:, :2000], logits_to_keep=1)  # compiles
        gc.collect()
        cache = handle.new_cache(length + 16, answer=16, chunk=chunk)
        torch.cuda.reset_peak_memory_stats()
        for piece in prompt.split(chunk or length, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= said.device - said.spare <= 1.05 * peak
