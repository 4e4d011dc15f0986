"""Evicting layers of a prompt, against masked attention over a cache that drops nothing."""

import copy
from contextlib import suppress
from itertools import count

import pytest
import torch
from brute_force import BruteForce
from masks import AmbiguousScoresError
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, drops, every_head, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.patterns import AShape, fraction, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import Placement

NEW = 12  # tokens generated behind each prompt: more than stay


def run(model, turns, cache=None, pieces=1):
    """The logits of each prompt's last token and of NEW tokens behind it."""
    seen = []
    with torch.no_grad():
        for turn in turns:
            prompt, new = turn[:, :-NEW], turn[:, -NEW:]
            for piece in (*prompt.chunk(pieces, 1), *new.split(1, 1)):
                out = model(piece, past_key_values=cache, logits_to_keep=1)
                cache = out.past_key_values
                seen.append(out.logits)
    return torch.cat(seen, 1), cache


def by_brute_force(model, plan, batch, lengths, pieces=1):
    """Turns of which rounding decides no choice, and their logits."""
    for seed in count():
        turns = [random_tokens(batch, length, seed + number) for number, length in enumerate(lengths)]
        with suppress(AmbiguousScoresError), BruteForce(model, plan):
            return turns, run(model, turns, DynamicCache(config=model.config), pieces)[0]


def rows_of(cache):
    return [layer.cached[0] for layer in cache.layers]


RULES = {
    "one choice for all heads": [drops((1, 2), 12)],
    "each KV head for itself": [drops((1, 2), 12, heads="per_kv_head")],
    "a fraction": [drops((0, 1, 2), fraction(0.2))],
    "rules of their own": [drops((0,), 20, observe=1), drops((2,), 5, sink=0, recent=9, observe=64, generated=3)],
    "the window alone": [drops((1, 2), 0)],
    "nothing recent": [drops((1, 2), 10, recent=0)],
    "one generated token": [drops((1,), 12, generated=1)],
    "more than there is": [drops((1, 2), 1000)],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("name", RULES)
def test_a_layer_attends_to_what_it_kept_and_to_the_newest_generated_tokens(model, name: str):
    plan = plan_for(model, None, None, *RULES[name])
    turns, expected = by_brute_force(model, plan, 2, (70,))
    with apply(model, plan):
        found, cache = run(model, turns)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for layer, rule in plan.retained.items():
        assert rows_of(cache)[layer] == rule.kept_tokens(70 - NEW) + min(NEW, rule.generated or NEW)


@pytest.mark.parametrize("name", ["one choice for all heads", "each KV head for itself", "a fraction"])
def test_a_later_prompt_sees_what_was_kept_and_competes_with_it(model, name: str):
    plan = plan_for(model, None, None, *RULES[name])
    turns, expected = by_brute_force(model, plan, 2, (70, 40, NEW + 2))
    with apply(model, plan):
        found, _ = run(model, turns)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pieces", [2, 7])
def test_a_prompt_in_pieces_is_observed_as_a_whole(model, pieces: int):
    plan = plan_for(model, None, None, drops((1, 2), 12, observe=20))
    turns, expected = by_brute_force(model, plan, 1, (70, 48), pieces)
    with apply(model, plan):
        found, _ = run(model, turns, pieces=pieces)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_patterns_and_segments_go_on_beside_layers_that_drop_tokens(model):
    shape = every_head(model, AShape(sink=tokens(64), window=tokens(64)))
    plan = plan_for(model, shape, decode_plan(segment(0, (1,), 12)), drops((2,), 12))
    turns, expected = by_brute_force(model, plan, 1, (300, 200))
    with apply(model, plan):
        found, _ = run(model, turns)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2", "granite", "qwen3_next"])
def test_soft_caps_and_learned_sinks_count_in_scores_and_recurrent_states_go_on(architecture: str):
    model = tiny_model(architecture)
    plan = plan_for(model, None, None, drops((1, 2), 12))
    turns, expected = by_brute_force(model, plan, 1, (70, 40))
    with apply(model, plan):
        found, _ = run(model, turns)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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
    said = MemoryModel(size, None, None, on_cpu=True, evicting=plan.retained).use(request, Placement())
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
    memory = MemoryModel(size, None, None, on_cpu=True, evicting=plan.retained)
    whole, pieces = (memory.use(Request(4000, 20, chunk=chunk), Placement()) for chunk in (None, 40))
    token = 2 * 2 * 32 * 4
    assert pieces.prefill > 2 * 3900 * token
    assert whole.kv_device == pieces.kv_device == (4020 + 2 * 25) * token


def test_decode_counts_what_is_left(model):
    plan = plan_for(model, None, None, drops((1, 2), 12))
    with torch.no_grad(), apply(model, plan) as handle:
        run(model, [random_tokens(1, 112)])
        found = handle.stats()
    assert found.decode_tokens_cached == 3 * sum(range(101, 113))
    assert found.decode_tokens_attended == sum(range(101, 113)) + 2 * sum(17 + min(made, 8) for made in range(1, 13))


def test_a_run_without_its_decode_drops_nothing(model):
    text = random_tokens(1, 80)
    expected, _ = run(model, [text])
    with apply(model, plan_for(model, None, None, drops((0, 1, 2), 4)), decode=False):
        found, cache = run(model, [text])
    assert rows_of(cache) == [80] * 3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- turns and failures -----------------------------------------------------------------------------------------------


def test_turns_of_generate_are_those_of_plain_passes(model):
    plan, first, second = plan_for(model, None, None, drops((0, 2), 12)), random_tokens(1, 60), random_tokens(1, 30, 1)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad(), apply(model, plan):
        one = model.generate(first, **options)
        text = torch.cat((one.sequences, second), 1)
        two = model.generate(text, past_key_values=one.past_key_values, **options)
        cache, expected = DynamicCache(), []
        pieces = [first, *one.sequences[:, 60:-1].split(1, 1), text[:, 60 + NEW - 1 :]]
        for piece in (*pieces, *two.sequences[:, text.shape[1] : -1].split(1, 1)):
            expected.append(model(piece, past_key_values=cache, logits_to_keep=1).logits[:, 0])
    assert two.past_key_values.get_seq_length() == text.shape[1] + NEW - 1
    torch.testing.assert_close(torch.stack((*one.logits, *two.logits)), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_a_copied_cache_goes_its_own_way(model):
    with torch.no_grad(), apply(model, plan_for(model, None, None, drops((1, 2), 12))):
        cache = model(random_tokens(1, 60)).past_key_values
        twin = copy.deepcopy(cache)
        found = [run(model, [random_tokens(1, 30, 1)], one)[0] for one in (cache, twin)]
        assert torch.equal(*found)
        assert [one.store.bytes for one in twin.layers] == [one.store.bytes for one in cache.layers]


@pytest.mark.parametrize("first", [torch.inference_mode, torch.enable_grad])
def test_tokens_dropped_in_one_grad_mode_are_gone_on_from_in_another(model, first):
    prompt, later = random_tokens(1, 60), random_tokens(1, 30, 1)
    with apply(model, plan_for(model, None, None, drops((0, 1, 2), 12, generated=4))):
        caches = []
        for mode in (first, torch.no_grad):
            with mode():
                caches.append(model.generate(prompt, max_new_tokens=6, do_sample=False, return_dict_in_generate=True))
        found = [run(model, [later], copy.deepcopy(one.past_key_values))[0] for one in caches]
        again = run(model, [later], caches[0].past_key_values)[0]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], again)


class FailedError(Exception):
    pass


def failing(model, layer, call):
    def fail(*_):
        raise FailedError

    hook = model.base_model.layers[layer].register_forward_hook(fail)
    with pytest.raises(FailedError):
        call()
    hook.remove()


def test_a_first_prompt_and_a_step_that_fail_are_undone(model):
    text, plan = random_tokens(1, 80), plan_for(model, None, None, drops((0, 1, 2), 12))
    with torch.no_grad(), apply(model, plan):
        expected, cache = run(model, [text])[0], DynamicCache()
        failing(model, 1, lambda: model.generate(text[:, :-NEW], past_key_values=cache, max_new_tokens=1))
        found = [model(text[:, :-NEW], past_key_values=cache, logits_to_keep=1).logits]
        for token in text[:, -NEW:].split(1, 1):
            failing(model, 2, lambda token=token: model(token, past_key_values=cache))
            found.append(model(token, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)


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


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_host_memory_for_a_layer_that_drops_tokens_is_refused(model):
    plan = plan_for(model, None, None, drops((1, 2), 12))
    with pytest.raises(UsageError, match="found 2,"):
        apply(model, plan, kv_host_layers=(0, 2))


def test_a_cache_from_elsewhere_is_refused(model):
    with torch.no_grad(), apply(model, plan_for(model, None, None, drops((1,), 12))) as handle:
        keys = torch.zeros(1, 2, 9, 32)
        with pytest.raises(UnsupportedError, match="evicts nothing, found one that does in layers 1"):
            handle.cache_of([(keys, keys)] * 3)


def test_drafts_beside_layers_that_drop_tokens_are_refused(model):
    with pytest.raises(UnsupportedError, match="layer 2 does"):
        apply(model, plan_for(model, None, decode_plan(segment(0, (1,), 12)), drops((2,), 12)), exact=True)
