"""Caches: adopted in place, refused when they are someone else's, copied, reset."""

import gc

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache, StaticCache

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.hf import cache as cache_file
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.describe import CACHE_NAME, named

SEGMENT = segment(0, (1, 2), 12, selector="uniform", window=3)


@pytest.fixture(params=["device", "host"])
def handle(model, request):
    offload = (1, 2) if request.param == "host" else ()
    with torch.no_grad(), apply(model, plan_for(model, None, decode_plan(SEGMENT, offload=offload))) as handle:
        yield handle


@pytest.fixture
def cache(model, handle):
    return model(random_tokens(1, 40)).past_key_values


def test_the_cache_of_generate_comes_back_filled(model, handle):
    out = model.generate(random_tokens(2, 30), max_new_tokens=4, return_dict_in_generate=True)
    out.past_key_values.crop(0)  # which removes nothing
    assert out.past_key_values.get_seq_length() == 33
    assert all(isinstance(layer, SparseLayer) for layer in out.past_key_values.layers)
    assert out.past_key_values.get_max_length() == -1
    assert not out.past_key_values.is_compileable
    assert out.past_key_values.get_mask_sizes(2, 0) == (35, 0)


def test_an_empty_cache_of_the_caller_is_adopted_whatever_layers_it_had(model, handle):
    for given in (DynamicCache(), DynamicCache(config=model.config)):
        out = model(random_tokens(1, 30), past_key_values=given)
        assert out.past_key_values is given
        assert given.get_seq_length() == 30


@pytest.mark.parametrize("name", sorted({CACHE_NAME, "past_key_values"}))
def test_a_cache_is_taken_by_every_name_that_the_release_knows(model, cache, name):
    model(random_tokens(1, 1), **{name: cache})
    model.base_model(random_tokens(1, 2), **{name: cache})
    assert cache.get_seq_length() == 43
    found = model.generate(random_tokens(1, 9), attention_mask=torch.ones(1, 52), max_new_tokens=3, **{name: cache})
    assert (found.shape[1], cache.get_seq_length()) == (12, 54)


def test_the_older_name_of_a_cache_is_that_of_the_release(monkeypatch):
    monkeypatch.setattr(cache_file, "CACHE_NAME", "cache")
    assert named({"past_key_values": 1, "use_cache": True}) == {"cache": 1, "use_cache": True}
    assert named({"cache": 1, "past_key_values": None}) == {"cache": 1}


def test_a_cache_filled_without_a_plan_is_refused(model):
    with torch.no_grad():
        foreign = model(random_tokens(1, 20)).past_key_values
        with apply(model, plan_for(model)), pytest.raises(UsageError, match="20 tokens"):
            model(random_tokens(1, 1), past_key_values=foreign)


def test_a_cache_of_another_kind_is_refused(model, handle):
    with pytest.raises(UnsupportedError, match="empty DynamicCache, found StaticCache"):
        model(random_tokens(1, 5), past_key_values=StaticCache(config=model.config, max_cache_len=50))
    with pytest.raises(UnsupportedError, match="found tuple"):
        model(random_tokens(1, 5), past_key_values=((torch.ones(1), torch.ones(1)),))


def test_a_cache_outlives_its_handle_only_to_say_so(model):
    with torch.no_grad():
        with apply(model, plan_for(model)):
            cache = model(random_tokens(1, 20)).past_key_values
        with pytest.raises(UsageError, match="closed"):
            model(random_tokens(1, 1), past_key_values=cache)
        with apply(model, plan_for(model)), pytest.raises(UsageError, match="closed"):
            model(random_tokens(1, 1), past_key_values=cache)


def test_a_cache_of_another_open_handle_is_refused(model, cache):
    other = tiny_model(seed=3)
    with apply(other, plan_for(other)), pytest.raises(UsageError, match="made under another"):
        other(random_tokens(1, 1), past_key_values=cache)


def test_many_requests_of_mixed_lengths_leave_nothing_behind(model, handle):
    def live(requests: int) -> tuple[int, int]:
        """Tensors, and the bytes of their memory, after requests of mixed lengths: of each once, for 20 of them."""
        for number in range(requests):
            prompt = random_tokens(1, 3 + 17 * number % 20)
            cache = model(prompt[:, :-1]).past_key_values
            model(prompt[:, -1:], past_key_values=cache)
        del cache
        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        storages = {found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in tensors}
        return len(tensors), sum(storages.values())

    before = live(20)  # small tensors that follow from a length are cached
    assert live(20) == before


def test_layers_that_did_not_run_before_are_refused(model, handle):
    cache, prompt = DynamicCache(), random_tokens(1, 40)
    model.config.num_hidden_layers = 2
    try:
        model(prompt, past_key_values=cache)
    finally:
        model.config.num_hidden_layers = 3
    with pytest.raises(UsageError, match="0 to 40"):
        model(prompt, past_key_values=cache)
    cache.reset()
    assert torch.equal(model(prompt, past_key_values=cache).logits, model(prompt).logits)


def test_a_model_told_to_run_fewer_layers_goes_on(model, handle):
    text = random_tokens(1, 60)
    model.config.num_hidden_layers = 2
    try:
        cache = model(text[:, :40]).past_key_values
        found = model(text[:, 40:], past_key_values=cache).logits
        assert torch.allclose(found, model(text).logits[:, 40:], atol=1e-4)
    finally:
        model.config.num_hidden_layers = 3
