"""Captured decode steps of models with a recurrent state, without a GPU: a replay runs what was captured again, over
tensors of the same addresses."""

import copy

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import put_back, states_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
PLAN = decode_plan(segment(1, (3,), 12, sink=4, recent=10))


@pytest.fixture
def small(monkeypatch):
    emulate(monkeypatch)
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    return tiny_model("qwen3_next", layers=4, head_dim=16, heads=2, kv_heads=1, layer_types=kinds)


def expected(model, plan, prompt, new):
    with apply(model, plan, backend="cpu"):
        return steps(model, prompt, new)[0]


def test_caches_take_turns_are_copied_rewound_and_go_on_without_captured_steps(small):
    prompts, new = [random_tokens(1, length, length) for length in (50, 40)], random_tokens(1, 6, 1)
    plan, none = plan_for(small, None, PLAN), new[:, :0]
    with apply(small, plan, backend="triton") as handle:
        caches = [steps(small, prompt, none)[1] for prompt in prompts]
        found = [[], [], []]
        for number, token in enumerate(new.split(1, 1)):
            if number == 2:
                caches.append(copy.deepcopy(caches[0]))
                saved = states_of(caches[0])
                steps(small, new[:, 5:], none, caches[0])
                for layer in (1, 3):
                    caches[0].layers[layer].store.truncate((52,))
                put_back(caches[0], saved)
            for cache, seen in zip(caches, found, strict=False):
                extra = {"output_hidden_states": True} if number == 4 else {}  # which is not captured
                with torch.no_grad():
                    seen.append(small(token, past_key_values=cache, **extra).logits)
        assert handle.steps.replayed == 2 * 2 + 1 + 3 * 3
        assert len(handle.steps._graphs) == 1
    found[2] = found[0][:2] + found[2]
    for prompt, seen in zip((*prompts, prompts[0]), found, strict=True):
        alone = expected(small, plan, prompt, new)[:, 1:]
        torch.testing.assert_close(torch.cat(seen, 1), alone, rtol=1e-3, atol=1e-4)


def test_a_model_that_changes_between_steps_moves_the_state_once(small):
    prompt, new, plan = random_tokens(1, 60), random_tokens(1, 3, 1), plan_for(small, None, PLAN)
    with apply(small, plan, backend="triton") as handle:
        _, cache = steps(small, prompt, new[:, :1])
        norm = small.model.layers[2].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)
        found, _ = steps(small, new[:, 1:2], new[:, 2:], cache)
        assert handle.steps.replayed == 2
    alone = expected(small, plan, prompt, new)[:, 2:]
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)
