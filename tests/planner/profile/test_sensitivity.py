"""The gradient of an answer by the attention output of every layer, against autograd through the whole model."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from tiny_models import SHARED, random_tokens, tiny_model
from transformers import PreTrainedModel

from sparsekv.planner.profile.sensitivity import TEMPERATURE, Sensitivity, walk_layers
from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.observe import AttentionCall

SCORED, SEED = (30, 41, 42, 49), 3
MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen3": lambda: tiny_model("qwen3"),
    "multipliers": lambda: tiny_model("granite"),
    "sinks": lambda: tiny_model(
        "gpt_oss", layer_types=["full_attention"] * 2 + ["sliding_attention"], sliding_window=9
    ),
    "a soft cap": lambda: tiny_model("gemma2"),
    "keys shared": lambda: tiny_model(SHARED),
    "every layer sliding": lambda: tiny_model("mistral", sliding_window=9),
    "one layer sliding": lambda: tiny_model(
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}


def autograd(model: PreTrainedModel, ids: torch.Tensor, scored: tuple[int, ...] = SCORED) -> list[torch.Tensor]:
    """The same gradients, [H, S, D] a layer, by one backward pass through eager attention."""
    heads = model.config.num_attention_heads
    found = projected(model, ids, scored)
    return [one.grad[0].unflatten(-1, (heads, -1)).transpose(0, 1) / len(scored) ** 0.5 for one in found]


def projected(model: PreTrainedModel, ids: torch.Tensor, scored: tuple[int, ...] = SCORED) -> list[torch.Tensor]:
    """What goes into each output projection, [1, S, Z], with its gradient."""
    whole, attended = copy.deepcopy(model), []
    whole.set_attn_implementation("eager")

    def note(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].retain_grad()
        attended.append(args[0])

    for layer in filter(lambda layer: hasattr(layer, "self_attn"), whole.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(note)
    logits = whole(input_ids=ids, use_cache=False).logits[0, list(scored)] / TEMPERATURE
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    score = TEMPERATURE * logits.log_softmax(-1).gather(-1, drawn).sum()
    score.backward()
    return attended


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_those_of_a_pass_back_through_the_whole_model(name: str) -> None:
    model, ids, found = MODELS[name](), random_tokens(1, 50), list[Sensitivity]()
    walk_layers(model, ids, SCORED, SEED, lambda call, hidden: None, found.append)
    assert [one.call.layer for one in found] == [2, 1, 0]
    expected = autograd(model, ids)
    assert [wanted.abs().max() > 0 for wanted in expected] == [True] * 3
    for one in found:
        wanted = expected[one.call.layer]
        torch.testing.assert_close(one.gradient_BHSD[0], wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)
        assert not one.call.q_BHSD.requires_grad


def test_gradients_pass_through_layers_with_a_recurrent_state() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
    model, ids, found = tiny_model("qwen3_next", layers=5, layer_types=kinds), random_tokens(1, 50), list[Sensitivity]()
    walk_layers(model, ids, SCORED, SEED, lambda call, hidden: None, found.append)
    assert [one.call.layer for one in found] == [3, 1]
    for one, gated in zip(reversed(found), projected(model, ids), strict=True):
        # A gate multiplies the output and divides its gradient: the product is the same on both sides of it.
        product = (one.out_BHSD * one.gradient_BHSD).transpose(1, 2).flatten(2) * len(SCORED) ** 0.5
        wanted = (gated * gated.grad).detach()
        torch.testing.assert_close(product, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=1e-3)


def test_a_sliding_layer_of_a_prompt_that_is_cut_into_pieces_of_rows_has_the_same_gradients() -> None:
    small = {"layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "hidden": 16, "ffn": 16}
    model = tiny_model("mistral", **small, context=8192, sliding_window=600)
    ids, scored, found = random_tokens(1, 4200), (4000, 4100, 4199), list[Sensitivity]()
    walk_layers(model, ids, scored, SEED, lambda call, hidden: None, found.append)
    (wanted,) = autograd(model, ids, scored)
    tolerance = 2e-4 * float(wanted.abs().max())
    torch.testing.assert_close(found[0].gradient_BHSD[0], wanted, atol=tolerance, rtol=1e-3)


def test_on_the_way_up_each_layer_shows_what_goes_into_it() -> None:
    model, ids = tiny_model("llama"), random_tokens(1, 50)
    calls, inputs, below = list[AttentionCall](), list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        walk_layers(model, ids, SCORED, SEED, lambda call, hidden: (calls.append(call), inputs.append(hidden)), None)
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    walk_layers(model, ids, SCORED, SEED, lambda call, hidden: below.append(hidden), lambda found: None)
    assert [call.layer for call in calls] == [0, 1, 2]
    for layer in range(3):
        torch.testing.assert_close(inputs[layer], hidden[layer], atol=2e-4, rtol=2e-4)
        assert torch.equal(inputs[layer], below[layer])
    assert not any(call.q_BHSD.requires_grad for call in calls)


def gradients_with_head_times(factor: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of a model whose logits, and so whose gradients, are that much larger."""
    model, found = tiny_model("llama"), list[Sensitivity]()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    walk_layers(model.to(dtype), random_tokens(1, 50), SCORED, SEED, lambda call, hidden: None, found.append)
    return [one.gradient_BHSD for one in found]


def test_gradients_that_float16_could_not_hold_keep_their_digits_in_a_float16_model() -> None:
    half, whole = (gradients_with_head_times(1e-5, dtype) for dtype in (torch.float16, torch.float32))
    for one, wanted in zip(half, whole, strict=True):
        assert 0 < wanted.abs().max() < 1e-5
        assert (one - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize(("residual", "head", "what"), [(1e-2, 1.0, "gradients in layer 0"), (1.0, 1e6, "logits")])
def test_what_overflows_is_refused(residual: float, head: float, what: str) -> None:
    model = tiny_model("llama")
    shrunk = [(layer.self_attn.v_proj, layer.mlp.down_proj) for layer in model.model.layers]
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
        for module in (model.model.embed_tokens, *chain.from_iterable(shrunk)):  # a small change is then a large one
            module.weight.mul_(residual)
    with pytest.raises(UnsupportedError, match=rf"{what}.* float16.* --dtype"):
        walk_layers(model.half(), random_tokens(1, 50), SCORED, SEED, lambda call, hidden: None, lambda found: None)


def test_rows_after_the_last_scored_one_have_no_gradient() -> None:
    found = list[Sensitivity]()
    walk_layers(tiny_model("llama"), random_tokens(1, 50), (20,), SEED, lambda call, hidden: None, found.append)
    for one in found:
        assert (one.gradient_BHSD[:, :, 21:] == 0).all()
        assert one.gradient_BHSD[:, :, 20].abs().max() > 0


def state_of(model: PreTrainedModel) -> tuple[list[bool], int, str]:
    """What a walk may not change: gradient flags, hooks, the attention in use."""
    hooks = (chain(one._forward_pre_hooks, one._forward_hooks) for one in model.modules())
    count = sum(1 for _ in chain.from_iterable(hooks))
    return [one.requires_grad for one in model.parameters()], count, model.config._attn_implementation


@pytest.mark.parametrize("fails", ["nowhere", "up", "down"])
def test_the_model_is_left_as_it_was(fails: str) -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    before = state_of(model)

    def fail(*seen: object) -> None:
        raise ZeroDivisionError

    up, down = (fail if fails == side else (lambda *seen: None) for side in ("up", "down"))
    if fails == "nowhere":
        walk_layers(model, random_tokens(1, 50), SCORED, SEED, up, down)
    else:
        with pytest.raises(ZeroDivisionError):
            walk_layers(model, random_tokens(1, 50), SCORED, SEED, up, down)
    assert state_of(model) == before
    assert all(one.grad is None for one in model.parameters())
