"""`apply(kv_dtype="fp8")`: every cache gives what the same plan gives over keys and values rounded beforehand."""

from copy import deepcopy

import pytest
import torch
from emulated_graphs import emulate
from host_pages import page_on_the_host
from rounded_cache import expected
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, drops, every_head, plan_for, segment

from sparsekv.kernels import backends
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf import cache as caches
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import Request
from sparsekv.runtime.stores.float8 import Float8
from sparsekv.runtime.stores.virtual import VirtualStore

SPARSE = decode_plan(segment(0, (1, 2), 12, sink=4, recent=10))
OFFLOADED = decode_plan(segment(0, (1, 2), 12, sink=4, recent=10), offload=(1, 2))


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=16, heads=4, kv_heads=2)


def check(model, plan, prompt=None, new=None, **options):
    prompt = random_tokens(2, 150) if prompt is None else prompt
    new = random_tokens(len(prompt), 20, 1) if new is None else new
    with apply(model, plan, kv_dtype="fp8", **options) as handle:
        found, cache = steps(model, prompt, new)
        stats = handle.stats()
    torch.testing.assert_close(found, expected(model, plan, prompt, new, **options), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, steps_in_float32(model, plan, prompt, new), rtol=1e-3, atol=1e-3)
    assert {layer.store.keys.dtype for layer in cache.layers} == {torch.uint8}
    return cache, stats


def steps_in_float32(model, plan, prompt, new):
    with apply(model, plan):
        return steps(model, prompt, new)[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "evicting"),
    [
        (None, None, ()),
        (AShape(sink=tokens(16), window=tokens(40)), SPARSE, ()),
        (None, OFFLOADED, ()),
        (None, None, (drops((0, 2), 40),)),
    ],
    ids=["dense", "sparse", "in host memory", "evicting"],
)
def test_logits_are_those_of_keys_and_values_rounded_beforehand(model, prefill, decode, evicting):
    check(model, plan_for(model, prefill and every_head(model, prefill), decode, *evicting))


def test_long_inputs_attend_to_what_the_cache_has(model):
    check(model, plan_for(model, None, SPARSE), chunking=Chunking(above=64, rows=64))


def test_virtual_memory_holds_a_quarter_of_float32(model, monkeypatch):
    page_on_the_host(monkeypatch)
    cache, stats = check(model, plan_for(model, None, SPARSE))
    assert {type(layer.store) for layer in cache.layers} == {VirtualStore}
    assert stats.kv_bytes_device == sum(layer.store.bytes.device for layer in cache.layers)


def test_the_cut_of_a_prompt_hardly_matters(model):
    """All that it changes is which of the smallest numbers keep all their bits."""
    prompt, plan, found = random_tokens(1, 150), plan_for(model), []
    for pieces in ((150,), (1, 149), (64, 64, 22), (149, 1)):
        with torch.no_grad(), apply(model, plan, kv_dtype="fp8"):
            cache = None
            for piece in prompt.split(pieces, 1):
                out = model(piece, past_key_values=cache, logits_to_keep=1)
                cache = out.past_key_values
            found.append(out.logits)
    added = (found[0] - steps_in_float32(model, plan, prompt, prompt[:, :0])).norm()
    for other in found[1:]:
        assert (other - found[0]).norm() < 0.1 * added


def test_rows_of_different_lengths_are_those_that_run_alone(model):
    lengths, prompt = (40, 90), random_tokens(2, 90)
    mask = torch.tensor([[0] * (90 - length) + [1] * length for length in lengths])
    with torch.no_grad(), apply(model, plan_for(model), kv_dtype="fp8"):
        together = model(prompt, attention_mask=mask, logits_to_keep=1).logits
        for row, length in enumerate(lengths):
            alone = model(prompt[row : row + 1, 90 - length :], logits_to_keep=1).logits
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_copies_and_chosen_rows_go_on_from_the_same_bytes(model):
    prompt, new = random_tokens(2, 60), random_tokens(2, 3, 1)
    with apply(model, plan_for(model, None, SPARSE), kv_dtype="fp8"):
        _, cache = steps(model, prompt, new[:, :0])
        copied = deepcopy(cache)
        found, _ = steps(model, new[:, :1], new[:, 1:], cache)
        copied.reorder_cache(torch.tensor([1, 0]))
        turned, _ = steps(model, new[[1, 0], :1], new[[1, 0], 1:], copied)
        assert torch.equal(turned[[1, 0]], found)
        cache.reset()
        assert all(layer.scales is None for layer in cache.layers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
@pytest.mark.parametrize(
    ("decode", "evicting"),
    [(None, ()), (SPARSE, ()), (OFFLOADED, ()), (None, (drops((0, 2), 40),))],
    ids=["dense", "sparse", "in host memory", "evicting"],
)
def test_captured_steps_write_and_read_by_the_scales_of_the_cache_at_hand(monkeypatch, decode, evicting):
    model = tiny_model(layers=3, head_dim=16, heads=2, kv_heads=1)
    plan, new = plan_for(model, None, decode, *evicting), random_tokens(1, 3, 1)
    prompts = [random_tokens(1, 130), random_tokens(1, 140, 5)]
    alone = [expected(model, plan, prompt, new) for prompt in prompts]
    emulate(monkeypatch)
    with apply(model, plan, backend="triton", kv_dtype="fp8") as handle:
        kept = [steps(model, prompt, new[:, :0])[1] for prompt in prompts]
        found = [[], []]
        for token in new.split(1, 1):
            for cache, seen in zip(kept, found, strict=True):
                seen.append(steps(model, token, new[:, :0], cache)[0])
        assert (handle.steps.replayed, handle.steps.why_not) == (6, "")
    for seen, wanted in zip(found, alone, strict=True):
        torch.testing.assert_close(torch.cat(seen, 1), wanted[:, 1:], rtol=1e-3, atol=1e-3)


def test_memory_is_what_was_said_before(model):
    with apply(model, plan_for(model, None, OFFLOADED), kv_dtype="fp8") as handle:
        cache = handle.new_cache(2000, 2)
        use = handle._memory.use(Request(2000, batch=2), handle._engine.placement)
        held = [layer.store.bytes for layer in cache.layers]
        assert (use.kv_host, use.kv_device) == (sum(one.host for one in held), held[0].device)
        assert held[0].device == 2 * 2 * 2000 * 2 * 16  # keys and values, rows, tokens, heads, a byte for each number
    with apply(model, plan_for(model, None, OFFLOADED)) as handle:
        assert handle._memory.use(Request(2000, batch=2), handle._engine.placement).kv_host == 4 * use.kv_host


def test_what_was_prefilled_elsewhere_is_rounded_as_it_comes(model):
    prompt, new = random_tokens(1, 60), random_tokens(1, 4, 1)
    with apply(model, plan_for(model)):
        _, dense = steps(model, prompt, new[:, :0])
        given = list(caches.handed_over(dense, 60))
    with apply(model, plan_for(model, None, SPARSE), kv_dtype="fp8") as handle:
        first, _ = steps(model, new[:, :1], new[:, 1:], handle.cache_of(given))
        again = list(caches.handed_over(handle.cache_of(given), 60))
        other, _ = steps(model, new[:, :1], new[:, 1:], handle.cache_of(again))
    torch.testing.assert_close(other, first)  # what is rounded already stays


def test_drafts_are_checked_against_dense_attention_over_the_same_cache(model):
    prompt = random_tokens(1, 200)
    asked = {"max_new_tokens": 24, "do_sample": False}
    with apply(model, plan_for(model), kv_dtype="fp8"):
        dense = model.generate(prompt, **asked)
    with apply(model, plan_for(model, None, SPARSE), kv_dtype="fp8", exact=True) as handle:
        assert torch.equal(model.generate(prompt, **asked), dense)
        assert handle.stats().tokens_drafted > 0


def test_selectors_that_look_back_score_what_the_cache_has(model):
    weighs = decode_plan(segment(0, (1, 2), 12, sink=4, recent=10, selector="uniform", window=4))
    check(model, plan_for(model, None, weighs))


@pytest.mark.parametrize("largest", [0.0, 1e-30, 0.02, 1.0, 300.0, 1e30, float("inf"), float("nan")])
def test_scales_leave_room_for_what_is_larger_than_the_first_tokens(largest):
    x = torch.full((1, 2, 3, 8), 0.0)
    x[0, 0, 1, 2] = largest
    found = Float8()
    found.rounded(x, x)
    scale = found.scales.k_G
    assert scale[1] == 1
    if 0 < largest < 1e38:
        assert 4 <= largest / float(scale[0]) < 8
        later = x * 50
        torch.testing.assert_close(found.read(*found.rounded(later, later))[0], later, rtol=0.07, atol=0)
        over = found.read(*found.rounded(x * 1e6, x))[0]
        assert float(over.max()) == pytest.approx(448 * float(scale[0]))
    else:
        assert scale[0] == 1


def test_other_precisions_and_devices_are_refused(model, monkeypatch):
    with pytest.raises(UsageError, match="auto or fp8"):
        apply(model, plan_for(model), kv_dtype="fp4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9" in (backends.float8_obstacle("triton", torch.device("cuda")) or "")
    monkeypatch.setattr("sparsekv.runtime.hf.apply.float8_obstacle", lambda *given: "it is old")
    with pytest.raises(BackendError, match="it is old"):
        apply(model, plan_for(model), kv_dtype="fp8")
