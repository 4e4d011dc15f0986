"""Watching a dense forward pass changes nothing of it, and shows each layer's own tensors."""

import pytest
import torch
from tiny_models import ARCHITECTURES, heads_of, random_tokens, tiny_model
from tiny_plans import plan_for

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.observe import capture_attention


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_is_seen_in_order_and_the_output_stays_dense(architecture: str):
    model, prompt, calls = tiny_model(architecture), random_tokens(2, 70), []
    before = model.config._attn_implementation
    with torch.no_grad():
        dense = model(prompt).logits
        with capture_attention(model, calls.append):
            watched = model(prompt, use_cache=False).logits
    torch.testing.assert_close(watched, dense, atol=2e-4, rtol=2e-4)
    assert [call.layer for call in calls] == [0, 1, 2]
    heads, kv_heads, size = heads_of(architecture)
    for call in calls:
        assert call.q_BHSD.shape == (2, heads, 70, size)
        assert call.k_BGKD.shape == call.v_BGKD.shape == (2, kv_heads, 70, size)
        assert call.chunk.past == (0, 0)
        assert call.chunk.lengths == (70, 70)
        assert call.scale == pytest.approx(model.model.layers[call.layer].self_attn.scaling)
        assert call.window is None
    assert model.config._attn_implementation == before


def test_later_chunks_and_decode_steps_are_seen_with_all_keys_so_far():
    model, calls = tiny_model("mistral", sliding_window=9), []
    with torch.no_grad(), capture_attention(model, calls.append):
        cache = model(random_tokens(1, 30)).past_key_values
        model(random_tokens(1, 20, 1), past_key_values=cache)
        model(random_tokens(1, 1), past_key_values=cache)
    assert [call.chunk.past[0] for call in calls[::3]] == [0, 30, 50]
    assert [call.k_BGKD.shape[2] for call in calls[::3]] == [30, 50, 51]
    assert {call.window for call in calls} == {9}


def test_what_the_observer_returns_replaces_the_output():
    model, prompt = tiny_model(), random_tokens(1, 20)
    with torch.no_grad():
        dense = model(prompt).logits
        with capture_attention(model, lambda call: torch.zeros_like(call.q_BHSD) if call.layer == 1 else None):
            changed = model(prompt).logits
        module = model.model.layers[1].self_attn.o_proj
        hook = module.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        expected = model(prompt).logits
        hook.remove()
    assert not torch.allclose(changed, dense)
    torch.testing.assert_close(changed, expected, atol=2e-4, rtol=2e-4)


def test_gradients_pass_through_an_output_that_the_observer_gives():
    model, prompt, given = tiny_model(), random_tokens(1, 20), []

    def twice(call):
        given.append(2.0 * call.q_BHSD)
        return given[-1]

    with capture_attention(model, twice):
        logits = model(prompt, use_cache=False).logits
    gradients = torch.autograd.grad(logits.square().sum(), [*given, model.model.embed_tokens.weight])
    assert len(given) == 3
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_the_model_is_restored_when_the_observer_fails():
    model, prompt = tiny_model(), random_tokens(1, 20)

    def fail(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), capture_attention(model, fail):
        model(prompt)
    assert model.config._attn_implementation == "sdpa"
    assert model(prompt).logits.shape == (1, 20, 128)


def test_capture_and_a_plan_do_not_mix():
    model = tiny_model()
    with apply(model, plan_for(model)), pytest.raises(UsageError, match="applied"), capture_attention(model, print):
        pass
