"""A model is the same object as before once a handle is closed, however it is closed."""

import copy
import gc
import weakref

import pytest
import torch
from tiny_models import ARCHITECTURES, random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment
from transformers import LlamaForCausalLM

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply

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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_closing_restores_the_model(architecture: str, implementation: str):
    model = tiny_model(architecture)
    model.set_attn_implementation(implementation)
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


def test_an_exception_inside_the_block_restores_the_model():
    model = tiny_model()
    before = traces(model)
    with pytest.raises(ZeroDivisionError), apply(model, some_plan(model)):
        raise ZeroDivisionError
    assert traces(model) == before


def test_an_exception_while_attaching_restores_the_model(monkeypatch):
    model = tiny_model()
    before = traces(model)
    monkeypatch.setattr("sparsekv.runtime.hf.attach.guarded", lambda model, prompt: 1 / 0)
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


def test_a_second_plan_on_one_model_is_refused():
    model = tiny_model()
    plan = some_plan(model)
    with apply(model, plan), pytest.raises(UsageError, match="applied to this model already"):
        apply(model, plan)
    apply(model, plan).close()


def test_two_models_can_each_have_a_plan():
    first, second = tiny_model(seed=1), tiny_model("qwen3", seed=2)
    prompt = random_tokens(1, 200)
    dense = second(prompt).logits
    with apply(first, some_plan(first)):
        assert torch.equal(second(prompt).logits, dense)
        with apply(second, some_plan(second)):
            assert first.generate(prompt, max_new_tokens=2).shape == (1, 202)
            assert not torch.allclose(second(prompt).logits, dense)
        assert torch.equal(second(prompt).logits, dense)


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


def test_gradients_are_refused_rather_than_wrong():
    model = tiny_model()
    with apply(model, some_plan(model)), pytest.raises(UnsupportedError, match="no gradients"):
        model(random_tokens(1, 200)).logits.sum().backward()


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
