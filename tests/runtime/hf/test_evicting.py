"""The memory of evicting layers, and passes that fail over them; tests/core has what they attend to."""

import copy

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import drops, plan_for

from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import fraction
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import Placement

NEW = 12  # tokens generated behind each prompt: more than stay


def run(model, turns, cache=None):
    """The logits of each prompt's last token and of NEW tokens behind it."""
    seen = []
    with torch.no_grad():
        for turn in turns:
            prompt, new = turn[:, :-NEW], turn[:, -NEW:]
            for piece in (prompt, *new.split(1, 1)):
                out = model(piece, past_key_values=cache, logits_to_keep=1)
                cache = out.past_key_values
                seen.append(out.logits)
    return torch.cat(seen, 1), cache


@pytest.fixture(scope="module")
def model():
    return tiny_model()


# --- memory -----------------------------------------------------------------------------------------------------------


def watched_bytes(model, handle, call):
    """What `call` returns, and the bytes of keys and values behind each layer that ran."""
    seen = []
    hooks = [
        layer.register_forward_hook(lambda *_: seen.append(handle.stats().kv_bytes_device))
        for layer in model.base_model.layers
    ]
    try:
        return call(), seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("cut", [None, Chunking(above=24, rows=16)], ids=["whole", "in pieces of rows"])
def test_memory_is_free_behind_each_layer_of_a_prompt_of_generate(cut):
    model = tiny_model(layers=6)
    plan = plan_for(model, None, None, drops((1, 2, 3, 4, 5), fraction(0.1), generated=16))
    size, request = ModelSize.of(model, plan.model), Request(600, 20)
    said = MemoryModel(size, None, None, on_cpu=True, evicting=plan.evicting).use(request, Placement())
    token = size.info.attention[0].head_dim * 2 * 2 * 4
    with torch.no_grad(), apply(model, plan, chunking=cut) as handle:
        cache = handle.new_cache(620, answer=20)
        ids = random_tokens(1, 600)
        _, seen = watched_bytes(model, handle, lambda: model.generate(ids, past_key_values=cache, max_new_tokens=20))
        assert seen[5] == seen[-1] == handle.stats().kv_bytes_device == said.kv_device
        assert max(seen) == seen[0] + 5 * (65 + 16) * token
    assert said.kv_device < 0.3 * 6 * 620 * token


def test_pieces_of_a_prompt_wait_in_memory_for_its_end(model):
    plan = plan_for(model, None, None, drops((1, 2), 12))
    size = ModelSize.of(model, plan.model)
    memory = MemoryModel(size, None, None, on_cpu=True, evicting=plan.evicting)
    whole, pieces = (memory.use(Request(4000, 20, chunk=chunk), Placement()) for chunk in (None, 40))
    token = 2 * 2 * 32 * 4
    assert pieces.working > 2 * 3900 * token
    assert whole.kv_device == pieces.kv_device == (4020 + 2 * 25) * token


# --- turns and failures -----------------------------------------------------------------------------------------------


class FailedError(Exception):
    pass


def failing(model, layer, call):
    def fail(*_):
        raise FailedError

    hook = model.base_model.layers[layer].register_forward_hook(fail)
    with pytest.raises(FailedError):
        call()
    hook.remove()


def test_a_step_that_fails_over_a_kept_token_runs_again_before_a_prompt_comes(model):
    text, later = random_tokens(1, 80), random_tokens(1, 6, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, None, drops((0,), 12, generated=NEW - 2))):
        cache = run(model, [text])[1]
        expected, token = copy.deepcopy(cache), random_tokens(1, 1, 2)
        failing(model, 1, lambda: model(token + 1, past_key_values=cache))
        with pytest.raises(UsageError, match="failed over a generated token"):
            model(later, past_key_values=cache)
        for one in (cache, expected):
            model(token, past_key_values=one)
        found, expected = (model(later, past_key_values=one).logits for one in (cache, expected))
    torch.testing.assert_close(found, expected)


def test_a_later_prompt_that_fails_is_undone_before_anything_is_dropped_and_refused_behind(model):
    text, later = random_tokens(1, 80), random_tokens(1, 40, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, None, drops((0, 1, 2), 12))):
        cache = run(model, [text])[1]
        twin = copy.deepcopy(cache)
        expected = run(model, [later], twin)[0]
        failing(model, 1, lambda: model(later[:, :-NEW], past_key_values=cache))
        twin = copy.deepcopy(cache)
        torch.testing.assert_close(run(model, [later], cache)[0], expected, atol=1e-5, rtol=1e-5)
        whole = torch.cat((text, later), 1)
        failing(model, 1, lambda: model.generate(whole, past_key_values=twin, max_new_tokens=1))
        for _ in range(2):
            with pytest.raises(UsageError, match="evicted already"):
                model(later, past_key_values=twin)
        twin.reset()
        model(later, past_key_values=twin)
