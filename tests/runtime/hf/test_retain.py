"""Layers that drop tokens of a prompt, against masked attention over a cache that drops nothing."""

from contextlib import suppress
from itertools import count

import pytest
import torch
from brute_force import BruteForce
from masks import AmbiguousScoresError
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, drops, every_head, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.patterns import AShape, fraction, tokens
from sparsekv.runtime.hf.apply import apply

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
            return turns, run(model, turns, DynamicCache(), pieces)[0]


def rows_of(cache):
    return [layer.held[0] for layer in cache.layers]


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
        assert rows_of(cache)[layer] == rule.most_tokens(70 - NEW, NEW)


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


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma2", "granite"])
def test_soft_caps_and_learned_sinks_count_in_scores(architecture: str):
    model = tiny_model(architecture)
    plan = plan_for(model, None, None, drops((0, 1, 2), 12))
    turns, expected = by_brute_force(model, plan, 1, (70, 40))
    with apply(model, plan):
        found, _ = run(model, turns)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
