"""A program's own default device (`torch.set_default_device`) is not where the tensors of a plan are made."""

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


@pytest.mark.parametrize("seed", range(12))
def test_a_random_plan_gives_the_same_whatever_the_default_device_is(seed):
    draw = Random(seed)
    model = random_model(draw)
    plan, tokens = random_plan(draw, model, [PROMPT, PROMPT + NEW]), random_tokens(2, PROMPT + NEW, seed)
    usual = logits(model, plan, tokens)
    with torch.device("meta"):
        other = logits(model, plan, tokens)
    assert torch.equal(usual, other)
