"""Dense attention up to some context and the plan behind it, as hosts run, loses no more than the plan everywhere."""

import random

import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import plan_for

from sparsekv.plans.patterns import AShape, BlockSparse, TileShape, VerticalSlash, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.runtime.core.pays import Pays, Thresholds
from sparsekv.runtime.hf.apply import apply

LENGTH, CHUNK, DRAWN = 512, 64, 6


def drawn_pattern(draw: random.Random):
    few, many = (tokens(draw.randrange(*span)) for span in ((8, 64), (64, 200)))
    return draw.choice(
        (AShape(sink=few, window=many), BlockSparse(keep=many), VerticalSlash(vertical=few, slash=few, max_tiles=many))
    )


def drawn_plan(model, draw: random.Random):
    config = model.config
    heads = tuple(
        HeadGroup(layer=layer, heads=(head,), pattern=drawn_pattern(draw))
        for layer in range(config.num_hidden_layers)
        for head in range(config.num_attention_heads)
    )
    bucket = PrefillBucket(up_to=None, heads=heads)
    return plan_for(model, PrefillPlan(tile=TileShape(query=64, key=64), lengths=(bucket,)))


def log_probabilities(model, prompt, plan=None, sparse="always"):
    """Log-probabilities of the next token behind each token of a prompt that runs in chunks."""
    with apply(model, plan, sparse=sparse, backend="reference") if plan else torch.no_grad(), torch.no_grad():
        cache, found = None, []
        for chunk in prompt.split(CHUNK, 1):
            out = model(chunk, past_key_values=cache)
            cache = out.past_key_values
            found.append(out.logits[0].log_softmax(-1))
    return torch.cat(found)


def test_a_dense_start_of_any_length_loses_no_more() -> None:
    draw, model = random.Random(0), tiny_model()
    losses = []
    for _ in range(DRAWN):
        plan, prompt = drawn_plan(model, draw), random_tokens(1, LENGTH, draw.randrange(1000))
        first = CHUNK * draw.randrange(2, LENGTH // CHUNK)
        rule = Pays(prefill=Thresholds((1,), (first + 1,)))
        dense = log_probabilities(model, prompt)
        runs = (log_probabilities(model, prompt, plan, how) for how in ("always", str(rule)))
        always, behind = ((dense.exp() * (dense - one)).sum(-1) for one in runs)
        torch.testing.assert_close(behind[:first], torch.zeros(first), atol=1e-5, rtol=0)
        losses.append((float(always.sum()), float(behind.sum())))
    assert all(behind <= 1.01 * always for always, behind in losses)
    assert sum(behind for _, behind in losses) < sum(always for always, _ in losses)
