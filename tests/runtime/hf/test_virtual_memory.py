"""The transformers host over virtual memory: nothing is copied as a cache grows, and the logits are the same."""

from copy import deepcopy

import pytest
import torch
from emulated_graphs import emulate
from host_pages import page_on_the_host
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import first_of, take_back
from sparsekv.runtime.hf.memory import Request
from sparsekv.runtime.hf.placement import Placement
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.page_pool import PageError

DECODE = decode_plan(segment(0, (1, 2), 12, sink=4, recent=10))


@pytest.fixture
def pool(monkeypatch):
    """Virtual memory for models on the CPU."""
    return page_on_the_host(monkeypatch)


def logits(model, cache, ids):
    with torch.no_grad():
        return torch.cat([model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(ids.shape[1])], 1)


def stores(cache):
    return [layer.store for layer in cache.layers]


@pytest.mark.parametrize("tokens", [1, 128, 300, 1000])
def test_what_a_cache_takes_is_known_before_and_is_mapped_when_it_is_announced(model, pool, tokens):
    with apply(model, plan_for(model, None, DECODE)) as handle:
        cache = handle.new_cache(tokens, 2)
        use = handle._memory.use(Request(tokens, batch=2), Placement())
        assert use.kv_device == pool.used == sum(store.bytes.device for store in stores(cache))


def test_the_last_announced_tokens_take_no_more_pages(model, pool):
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)) as handle:
        cache = handle.new_cache(128, 2, answer=8)
        model(random_tokens(2, 120), past_key_values=cache)
        logits(model, cache, random_tokens(2, 8, 1))
        assert pool.used == handle._memory.use(Request(120, 8, batch=2), Placement()).kv_device


def test_small_layers_keep_the_device_store(pool):
    model = tiny_model(context=100)
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        assert type(first_of(model(random_tokens(1, 20)).past_key_values).store) is DeviceStore


def test_one_captured_step_serves_a_cache_that_grows(monkeypatch, pool):
    emulate(monkeypatch)
    model = tiny_model(layers=2, head_dim=16, heads=2, kv_heads=1, context=2048)
    plan = plan_for(model, None, decode_plan(segment(0, (1,), 12, sink=4, recent=10)))
    prompt, new = random_tokens(1, 120), random_tokens(1, 12, 1)
    with torch.no_grad(), apply(model, plan, backend="triton") as handle:
        cache = model(prompt).past_key_values
        found = logits(model, cache, new)
        assert (handle.steps.replayed, handle.steps.captures, handle.steps.why_not) == (12, 1, "")
    with torch.no_grad(), apply(model, plan, backend="cpu"):
        expected = logits(model, model(prompt).past_key_values, new)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_pages_mapped_ahead_for_padded_rows_wait_for_their_row(model, pool):
    ids, mask = random_tokens(3, 400), torch.ones(3, 400, dtype=torch.long)
    mask[1, :100] = mask[2, :90] = 0
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model(ids, attention_mask=mask).past_key_values
        assert pool.driver.calls["map"] == len(pool.driver.mapped)
        assert "settle" not in pool.driver.calls
        assert first_of(cache).store.lengths == (400, 300, 310)


def test_a_copied_cache_shares_nothing_and_a_repeated_one_its_full_pages(model, pool):
    prompt, new = random_tokens(1, 200), random_tokens(1, 30, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model(prompt).past_key_values
        used = pool.used
        copied = deepcopy(cache)
        assert pool.used - used == sum(store.bytes.device for store in stores(copied))
        cache.batch_repeat_interleave(3)
        assert pool.used < 3 * used
        found = logits(model, cache, new.expand(3, 30))
        pool.driver.limit = pool.used + pool.bytes + (1 << 20)  # it is not asked for what rows share
        model(random_tokens(3, 100), past_key_values=cache)
        torch.testing.assert_close(found[:1], logits(model, copied, new), atol=1e-4, rtol=1e-4)
        assert torch.equal(found[0], found[2])


def test_beams_whose_layers_were_not_all_picked_anew_are_not_gone_on_with(model, pool):
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model(random_tokens(2, 200)).past_key_values
        rows = torch.tensor([1, 0])
        pool.driver.fail, pool.driver.fail_after = "settle", 1
        for _ in range(2):  # the second time it succeeds, but the first layer is as it was
            with pytest.raises(UsageError, match="same rows") if pool.driver.fail == "" else pytest.raises(PageError):
                cache.reorder_cache(rows)
                model(random_tokens(2, 1), past_key_values=cache)
        cache.reset()
        model(random_tokens(2, 10), past_key_values=cache)


def test_pages_that_no_cache_uses_are_given_back_when_the_handle_is_closed(model, pool):
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        model(random_tokens(1, 100))
        assert pool.bytes
    assert (pool.bytes, pool.used) == (0, 0)


def test_what_is_taken_back_is_unmapped(model, pool):
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model(random_tokens(1, 1000)).past_key_values
        used = pool.used
        take_back(cache, (100,), 100)
        assert pool.used < used // 3
        assert pool.used + pool.bytes == sum(pool.driver.created.values())
        cache.reset()
        assert pool.used == 0


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_mapped(model, pool):
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model(random_tokens(1, 100)).past_key_values
        before, pool.driver.limit = pool.used, pool.used + (1 << 16)
        with pytest.raises(UsageError, match="fit"):
            model(random_tokens(1, 2000), past_key_values=cache)
        assert (pool.used, first_of(cache).store.lengths) == (before, (100,))
        pool.driver.limit = 1 << 40
        model(random_tokens(1, 2000), past_key_values=cache)


def test_working_memory_is_asked_for_by_the_row_with_most_new_tokens(model, pool, monkeypatch):
    asked = []
    monkeypatch.setattr(type(pool), "make_way", lambda self, missing, working: asked.append(working()))
    ids, mask = random_tokens(2, 300), torch.ones(2, 300, dtype=torch.long)
    mask[1, :290] = 0
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)) as handle:
        cache = model(ids, attention_mask=mask).past_key_values
        more = torch.ones(2, 200, dtype=torch.long)
        more[0, :199] = 0
        model(random_tokens(2, 200, 1), past_key_values=cache, attention_mask=torch.cat((mask, more), 1))
        expected = handle._memory.use(Request(301, batch=2, chunk=200), Placement()).working
    assert asked[1] == expected


class Never:
    """Nothing is mapped ahead."""

    def run(self, method): ...


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_a_pass_whose_pages_cannot_be_had_leaves_no_trace(model, pool, call):
    pool.ahead = Never()
    prompt, more = random_tokens(2, 100), random_tokens(2, 300, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        expected = model(more, past_key_values=model(prompt).past_key_values).logits
        alone = model(more).logits
        pool.trim()
        for after in (0, 1, 4, 5):
            cache = model(prompt).past_key_values
            pool.trim()
            pool.driver.fail, pool.driver.fail_after = call, after
            with pytest.raises(PageError, match=call):
                model(more, past_key_values=cache)
            assert torch.equal(model(more, past_key_values=cache).logits, expected)
            assert cache.get_seq_length() == 400
            cache = DynamicCache()
            pool.trim()
            pool.driver.fail, pool.driver.fail_after = call, after
            with pytest.raises(PageError, match=call):
                model(more, past_key_values=cache)
            assert torch.equal(model(more, past_key_values=cache).logits, alone)
