"""Random rules of evicting layers give the logits of masked attention over a cache that drops nothing, over
turns, cuts of prompts and batches; what is in memory follows from lengths alone."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from brute_force import BruteForce
from masks import AmbiguousScoresError
from poison import poisoned_memory
from random_plans import random_model
from tiny_models import random_tokens
from tiny_plans import drops, plan_for
from transformers import DynamicCache, PreTrainedModel

import sparsekv
from sparsekv.plans.patterns import fraction
from sparsekv.plans.phases import Retention
from sparsekv.plans.schema import Plan

SEEDS = [pytest.param(seed, marks=pytest.mark.fuzz if seed >= 12 else ()) for seed in range(300)]
ATTEMPTS = 12  # at scores that rounding does not decide


def random_rules(draw: Random, layers: tuple[int, ...]) -> tuple[Retention, ...]:
    """One for some layers, each."""
    some = [layer for layer in layers if draw.random() < 0.7] or [layers[0]]
    return tuple(_rule(draw, layer) for layer in some)


def _rule(draw: Random, layer: int) -> Retention:
    keep = draw.choice([0, 1, draw.randint(2, 60), 1000, fraction(round(draw.uniform(0.02, 0.9), 2))])
    return drops(
        (layer,),
        keep,
        sink=draw.choice([0, 1, 4]),
        recent=draw.choice([1, 3, 20]),
        generated=draw.choice([1, 2, 5, 100]),
        observe=draw.choice([1, 4, 30, 500]),
        heads=draw.choice(["max", "per_kv_head"]),
    )


def random_sizes(draw: Random) -> list[int]:
    """Tokens of each call: turns of chunks, cut anywhere, and of decode steps."""
    sizes: list[int] = []
    for _ in range(draw.choice([1, 2, 3])):
        length = draw.choice([draw.randint(2, 30), draw.randint(30, 150)])
        cuts = sorted(draw.sample(range(2, length + 1), min(draw.choice([0, 0, 1, 2]), length - 1)))
        chunks = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
        sizes += [max(2, size) for size in chunks] + [1] * draw.randint(1, 9)
    return sizes


def logits(model: PreTrainedModel, pieces: tuple[torch.Tensor, ...], cache: Any) -> torch.Tensor:
    """Of every token."""
    runs: Any = model
    return torch.cat([runs(piece, past_key_values=cache).logits for piece in pieces], 1)


def kept(rule: Retention, sizes: list[int]) -> int:
    """Rows of a layer behind these calls."""
    length = held = made = 0
    for size, before in zip(sizes, [2, *sizes], strict=False):
        if size > 1:
            held, made = held + made, 0
            held += size
        else:
            held = min(held, rule.kept_tokens(length)) if before > 1 else held
            made = min(made + 1, rule.generated)
        length += size
    return held + made


def a_case(draw: Random) -> tuple[PreTrainedModel, Plan, tuple[torch.Tensor, ...], torch.Tensor]:
    """Calls of which rounding decides no choice, and their logits."""
    for _ in range(ATTEMPTS):
        model, sizes = random_model(draw), random_sizes(draw)
        full = plan_for(model).model.full_layers
        plan = plan_for(model, None, None, *random_rules(draw, full)) if full else None
        pieces = random_tokens(draw.choice([1, 2, 3]), sum(sizes), draw.randrange(1 << 30)).split(sizes, 1)
        try:
            if plan is not None:
                with torch.no_grad(), BruteForce(model, plan):
                    return model, plan, pieces, logits(model, pieces, DynamicCache())
        except AmbiguousScoresError:
            continue
    raise AssertionError("expected a case that rounding does not decide")


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_the_kept_tokens(seed: int) -> None:
    draw = Random(seed)
    model, plan, pieces, expected = a_case(draw)
    with torch.no_grad(), sparsekv.apply(model, plan), poisoned_memory():
        cache = DynamicCache()
        found = logits(model, pieces, cache)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for layer, rule in plan.retained.items():
        assert cache.layers[layer].cached == (kept(rule, [piece.shape[1] for piece in pieces]),) * len(pieces[0])
