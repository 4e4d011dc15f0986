"""A model is the same object as before once a handle is closed, however it is closed."""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from handed_over import cache_of, handed_over
from tiny_models import TYPICAL, random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from transformers import LlamaForCausalLM

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

SPARSE = AShape(sink=tokens(1), window=tokens(1))


def some_plan(model):
    return plan_for(model, every_head(model, SPARSE), decode_plan(segment(0, (1, 2), 4)))


def traces(model):
    """Everything that attaching could leave behind."""
    return {
        "attention": model.config._attn_implementation,
        "inner attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


@pytest.mark.parametrize("architecture", TYPICAL)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_closing_restores_the_model(architecture: str, implementation: str):
    model = tiny_model(architecture)
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")
    weights, before = copy.deepcopy(model.state_dict()), traces(model)
    prompt = random_tokens(1, 200)
    dense = model(prompt).logits
    handle = apply(model, some_plan(model))
    assert not handle.closed
    assert not torch.allclose(model(prompt).logits, dense)
    handle.close()
    handle.close()
    assert handle.closed
    assert traces(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(prompt).logits, dense)


def test_a_suspended_plan_leaves_the_model_and_goes_on_with_its_caches():
    model, prompt, token = tiny_model(), random_tokens(1, 200), random_tokens(1, 1, 1)
    before, plan = traces(model), some_plan(model)
    with apply(model, plan) as handle, torch.no_grad():
        expected = model(token, past_key_values=model(prompt).past_key_values).logits
        cache = model(prompt).past_key_values
        handle.suspend()
        assert traces(model) == before
        with apply(model, plan, prefill=False) as other:
            with pytest.raises(UsageError, match="already"):
                handle.resume()
            copied = cache_of(other, handed_over(copy.deepcopy(cache), 200))
            assert torch.equal(model(token, past_key_values=copied).logits, expected)
            with pytest.raises(UsageError, match="to be applied"):
                model(token, past_key_values=cache)
        handle.resume()
        assert torch.equal(model(token, past_key_values=cache).logits, expected)
        handle.suspend()
    assert traces(model) == before
    with pytest.raises(UsageError, match="closed"):
        handle.resume()


@pytest.mark.parametrize("name", [name for name in inspect.signature(apply).parameters if name != "model"])
def test_an_argument_of_another_type_is_refused(name):
    model = tiny_model()
    before = traces(model)
    for value in (1, 2.5, object(), b"x", [object()], {}):
        if (name, value) != ("kv_host_layers", 1):  # a number of layers
            with pytest.raises(UsageError):
                apply(model, **{"plan": some_plan(model), name: value})
    assert traces(model) == before


def of_two_layers(model):
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2


@pytest.mark.parametrize("change", [torch.nn.Module.double, of_two_layers])
def test_a_model_that_changed_while_the_plan_was_suspended_is_refused(change):
    model = tiny_model()
    with apply(model, some_plan(model)) as handle:
        handle.suspend()
        change(model)
        before = traces(model)
        with pytest.raises(UsageError):
            handle.resume()
        assert traces(model) == before


def test_a_suspended_handle_is_not_closed_and_begins_no_block():
    model = tiny_model()
    handle = apply(model, some_plan(model))
    handle.suspend()
    assert not handle.closed
    with pytest.raises(UsageError, match="suspended"), handle:
        pass
    handle.resume()
    with handle:
        pass
    assert handle.closed


def test_an_exception_while_attaching_restores_the_model(monkeypatch):
    model = tiny_model()
    before = traces(model)
    monkeypatch.setattr("sparsekv.runtime.hf.attach.Attached._guarded", lambda self, generate: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply(model, some_plan(model))
    assert traces(model) == before


def test_inner_configs_get_their_own_implementation_back():
    model = tiny_model()
    model.model.config = copy.deepcopy(model.config)
    model.model.config._attn_implementation = "eager"
    before = traces(model)
    apply(model, some_plan(model)).close()
    assert traces(model) == before


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model], ids=["model", "decoder"])
def test_a_deep_copy_of_a_planned_model_is_a_plain_one(part):
    model, prompt = tiny_model(), random_tokens(1, 200)
    before, dense = traces(part(model)), part(model)(prompt)[0]
    with apply(model, some_plan(model)):
        twin, sparse = copy.deepcopy(part(model)), model(prompt).logits
        assert traces(twin) == before
        assert torch.equal(twin(prompt)[0], dense)
        assert torch.equal(model(prompt).logits, sparse)
    assert traces(part(model)) == before
    assert torch.equal(twin(prompt)[0], dense)
    with apply(twin, some_plan(twin)):
        assert not torch.allclose(twin(prompt)[0], dense)


def test_an_attention_implementation_set_under_a_plan_is_refused_at_the_next_call():
    model, prompt = tiny_model(), random_tokens(1, 20)
    with torch.no_grad(), apply(model, some_plan(model)):
        cache = model(prompt).past_key_values
        model.set_attn_implementation("sdpa")
        for call in (
            lambda: model(prompt[:, :1], past_key_values=cache),
            lambda: model.generate(prompt, max_new_tokens=2),
        ):
            with pytest.raises(UsageError, match="layer 0"):
                call()
    assert model(prompt).logits.shape == (1, 20, 128)


def test_an_attention_implementation_of_inner_configs_is_seen_as_well():
    model = tiny_model()
    model.model.config = copy.deepcopy(model.config)  # the layers keep the outer one
    with torch.no_grad(), apply(model, some_plan(model)):
        model.config._attn_implementation = "eager"
        model.model.config._attn_implementation = "sparsekv"
        with pytest.raises(UsageError, match="layer 0"):
            model(random_tokens(1, 20))


def replace_layer(layers, other):
    layers[1] = other.model.layers[1]


def replace_attention(layers, other):
    layers[1].self_attn = other.model.layers[1].self_attn


def swap(layers, other):
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("change", [replace_layer, replace_attention, swap, lambda layers, other: layers.pop(1)])
def test_layers_replaced_under_a_plan_are_refused_at_the_next_call(change):
    model = tiny_model()
    with torch.no_grad(), apply(model, some_plan(model)):
        change(model.model.layers, tiny_model(seed=1))
        with pytest.raises(UsageError):
            model(random_tokens(1, 20))


@pytest.mark.parametrize("chunking", [None, Chunking(above=10, rows=10)], ids=["short", "long"])
def test_hooks_cleared_under_a_plan_change_nothing(chunking):
    model, prompt = tiny_model(), random_tokens(1, 20)
    with torch.no_grad(), apply(model, some_plan(model), chunking=chunking):
        expected = model(prompt).logits
        model.model._forward_pre_hooks.clear()
        assert torch.equal(model(prompt).logits, expected)


def test_a_cache_goes_on_in_its_own_dtype_when_the_model_has_another():
    model, prompt = tiny_model(), random_tokens(1, 20)
    with torch.no_grad(), apply(model, some_plan(model)):
        cache = model(prompt).past_key_values
        model.to(torch.bfloat16)
        assert model(prompt[:, :1], past_key_values=cache).logits.dtype == torch.bfloat16
        assert cache.layers[0].store.keys.dtype == torch.float32
        assert torch.isfinite(model(prompt).logits).all()
        model.float()
        model(prompt[:, :1], past_key_values=cache)


def test_a_module_around_a_layer_goes_there_after_the_plan():
    model = tiny_model()
    plan, before = some_plan(model), model.model.layers[1]
    model.model.layers[1] = torch.nn.Sequential(before)
    with pytest.raises(UnsupportedError, match="layer 1"):
        apply(model, plan)
    model.model.layers[1] = before
    apply(model, plan).close()


@pytest.mark.parametrize("part", ["model", "decoder"])
def test_a_forward_put_around_a_planned_one_stays_and_works_when_the_plan_is_gone(part: str):
    model, prompt = tiny_model(), random_tokens(1, 200)
    module, dense = (model if part == "model" else model.model), model(prompt).logits
    handle = apply(model, some_plan(model))
    sparse, inner = model(prompt).logits, module.forward
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    handle.suspend()
    assert torch.equal(model(prompt).logits, dense)
    handle.resume()
    assert torch.equal(model(prompt).logits, sparse)
    handle.close()
    assert torch.equal(model(prompt).logits, dense)


def test_a_generate_put_around_a_planned_one_refuses_nothing_when_the_plan_is_gone():
    model = tiny_model()
    with apply(model, some_plan(model)):
        inner = model.generate
        model.generate = lambda *args, **kwargs: inner(*args, **kwargs)
    assert model.generate(random_tokens(1, 20), num_beams=2, max_new_tokens=3).shape == (1, 23)


def test_a_closed_handle_is_not_entered_again():
    model = tiny_model()
    with apply(model, some_plan(model)) as handle:
        pass
    with pytest.raises(UsageError, match="closed"), handle:
        pytest.fail("runs dense")


def test_a_second_plan_on_one_model_is_refused():
    model = tiny_model()
    plan = some_plan(model)
    with apply(model, plan), pytest.raises(UsageError, match="already"):
        apply(model, plan)
    apply(model, plan).close()


def greedy(model, prompt, count: int):
    """Token by token."""
    cache, token = None, prompt
    for _ in range(count):
        found = model(token, past_key_values=cache, use_cache=True)
        cache, token = found.past_key_values, found.logits[:, -1:].argmax(-1)
        yield token.item()


def test_two_models_that_generate_in_turns_give_the_tokens_of_each_alone():
    models = tiny_model(seed=1), tiny_model("qwen3", seed=2)
    prompts, alone, stats = (random_tokens(1, 120), random_tokens(1, 70, seed=1)), [], []
    with torch.no_grad():
        for model, prompt in zip(models, prompts, strict=True):
            with apply(model, some_plan(model)) as handle:
                alone.append(tuple(greedy(model, prompt, 8)))
                stats.append(handle.stats())
        with apply(models[0], some_plan(models[0])) as first, apply(models[1], some_plan(models[1])) as second:
            turns = [greedy(model, prompt, 8) for model, prompt in zip(models, prompts, strict=True)]
            assert list(zip(*turns, strict=True)) == list(zip(*alone, strict=True))
            assert [first.stats(), second.stats()] == stats


def test_a_model_that_shares_its_config_with_a_planned_one_says_so():
    first = tiny_model()
    second = LlamaForCausalLM(first.config).eval()
    with apply(first, some_plan(first)), pytest.raises(UsageError, match="shares its config"):
        second(random_tokens(1, 8))


def test_a_model_in_training_mode_is_refused():
    model = tiny_model()
    with pytest.raises(UsageError, match=r"model\.eval"):
        apply(model.train(), some_plan(model))
    with apply(model.eval(), some_plan(model)):
        model.train()
        with pytest.raises(UsageError, match=r"model\.eval"):
            model(random_tokens(1, 8))


def test_something_else_than_a_model_is_refused():
    with pytest.raises(UsageError, match="PreTrainedModel, found Linear"):
        apply(torch.nn.Linear(2, 2), None)


def test_a_closed_handle_and_its_cache_keep_no_model_alive():
    model = tiny_model()
    with apply(model, some_plan(model)) as handle:
        cache = model(random_tokens(1, 20)).past_key_values
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert handle.stats().kv_bytes_device > 0
    assert cache.get_seq_length() == 20
