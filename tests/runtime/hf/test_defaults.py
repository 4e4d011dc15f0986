"""A program's own default device and dtype are not what the tensors of a plan are made by."""

from random import Random

import pytest
import torch
from random_plans import random_model, random_plan
from tiny_models import random_tokens

from sparsekv.runtime.hf.apply import apply

PROMPT, NEW = 300, 3


def logits(model, plan, tokens) -> torch.Tensor:
    """Of a prompt, and of steps behind it."""
    cache, seen = None, []
    with torch.no_grad(), apply(model, plan, backend="cpu"):
        for piece in tokens.split([PROMPT, *[1] * NEW], 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1)


def elsewhere(model, plan, tokens) -> torch.Tensor:
    with torch.device("meta"):
        return logits(model, plan, tokens)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_plan_gives_the_same_whatever_the_default_device_is(seed):
    draw = Random(seed)
    model = random_model(draw)
    plan, tokens = random_plan(draw, model, [PROMPT, PROMPT + NEW]), random_tokens(2, PROMPT + NEW, seed)
    first, second = (logits, elsewhere) if seed % 2 else (elsewhere, logits)  # what one has made the other may find
    assert torch.equal(first(model, plan, tokens), second(model, plan, tokens))


@pytest.mark.parametrize("seed", range(12))
def test_a_random_plan_gives_the_same_whatever_the_default_dtype_is(seed):
    draw = Random(seed)
    model = random_model(draw)
    plan, tokens = random_plan(draw, model, [PROMPT, PROMPT + NEW]), random_tokens(2, PROMPT + NEW, seed)
    usual = logits(model, plan, tokens)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(logits(model, plan, tokens), usual)
    finally:
        torch.set_default_dtype(torch.float32)
