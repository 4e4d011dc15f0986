"""Sparse prefill: what it counts, and heads of several patterns side by side."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import every_head, plan_for

from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, tokens
from sparsekv.runtime.hf.apply import apply

A_SHAPE = AShape(sink=tokens(10), window=tokens(30))


def logits(model, tokens_BS, *cuts):
    cache, seen = None, []
    with torch.no_grad():
        for piece in tokens_BS.tensor_split(cuts, 1):
            out = model(piece, past_key_values=cache)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1)


def test_density_counts_every_head_and_layer():
    model = tiny_model(layers=2)
    with apply(model, plan_for(model, every_head(model, A_SHAPE, Dense()))) as handle:
        model(random_tokens(1, 640))
    stats = handle.stats()
    assert stats.prefill_tiles_causal == 2 * 4 * 55
    # an a_shape row computes the first tile, its own and the one before
    assert stats.prefill_tiles_computed == 2 * 2 * 55 + 2 * 2 * (1 + 2 + 8 * 3)
    assert stats.prefill_density == stats.prefill_tiles_computed / stats.prefill_tiles_causal


def test_reset_starts_counting_anew():
    model = tiny_model(layers=2)
    with apply(model, plan_for(model, every_head(model, A_SHAPE))) as handle:
        assert handle.stats().prefill_density is None
        model.generate(random_tokens(1, 200), max_new_tokens=2)
        before = handle.stats()
        handle.reset_stats()
        after = handle.stats()
    assert before.prefill_density is not None
    assert after.prefill_density is None
    assert after.decode_share is None
    assert after.kv_bytes_device == before.kv_bytes_device > 0


@pytest.mark.parametrize("cuts", [(), (192,), (150, 400)], ids=["one piece", "on a tile", "off a tile"])
def test_heads_of_several_patterns_compute_what_the_reference_does(cuts: tuple[int, ...]):
    model = tiny_model(layers=2)
    prompt = random_tokens(2, 600)
    patterns = [
        VerticalSlash(vertical=tokens(30), slash=tokens(60), max_tiles=tokens(384)),
        BlockSparse(keep=tokens(256)),
        A_SHAPE,
        Dense(),
    ]
    found = {}
    for backend in ("cpu", "reference"):
        with apply(model, plan_for(model, every_head(model, *patterns)), backend=backend) as handle:
            found[backend] = logits(model, prompt, *cuts)
            assert handle.stats().prefill_density < 0.95
    torch.testing.assert_close(found["cpu"], found["reference"], atol=2e-4, rtol=2e-4)
    assert not torch.allclose(found["cpu"], logits(model, prompt), atol=1e-3)
