"""Sparse attention has no gradients: whoever asks for one is told so, and inference needs no `no_grad`."""

import pytest
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.hf.apply import apply


@pytest.fixture
def model():
    made = tiny_model()
    prefill = every_head(made, AShape(sink=tokens(64), window=tokens(64)))
    with apply(made, plan_for(made, prefill, decode_plan(segment(0, (1, 2), 8)))):
        yield made


def freeze_all_but(model, *names):
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in names)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("layer", [0, 2])
def test_training_a_projection_before_sparse_attention_is_refused(model, layer: int, part: str):
    freeze_all_but(model, f"model.layers.{layer}.self_attn.{part}.weight", "lm_head.weight")
    with pytest.raises(UnsupportedError):
        model(random_tokens(1, 200)).logits.sum().backward()


@pytest.mark.parametrize("new", [1, 5])
def test_training_cached_keys_and_values_is_refused(model, new: int):
    freeze_all_but(model, "model.layers.2.self_attn.v_proj.weight")
    cache = model(random_tokens(1, 40)).past_key_values
    freeze_all_but(model, "lm_head.weight")
    with pytest.raises(UnsupportedError):
        model(random_tokens(1, new), past_key_values=cache).logits.sum().backward()


def test_what_lies_behind_the_last_attention_can_be_trained(model):
    freeze_all_but(model, "model.layers.2.self_attn.o_proj.weight", "lm_head.weight")
    model(random_tokens(1, 40)).logits.sum().backward()
    assert model.model.layers[2].self_attn.o_proj.weight.grad.abs().sum() > 0
