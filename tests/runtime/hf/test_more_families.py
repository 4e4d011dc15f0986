"""Families that stand beside the usual ones: everything that a plan does, on one small model of each."""

import pytest
import torch
from brute_force import BruteForce
from tiny_models import MORE, random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.patterns import AShape, Dense, VerticalSlash, fraction, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

LENGTH, NEW = 90, 3
CUT, WHOLE = Chunking(above=20, rows=33, output_bytes=1), Chunking(above=1 << 30)
FULL = (AShape(sink=tokens(64), window=fraction(1.0)), Dense())
SPARSE = (
    AShape(sink=tokens(1), window=tokens(1)),
    VerticalSlash(vertical=tokens(9), slash=tokens(9), last_q=8, max_tiles=fraction(1.0)),
)


@pytest.fixture(scope="module", params=MORE)
def model(request):
    return tiny_model(request.param, head_dim=16, hidden=32, ffn=32)


def logits(model, pieces, cache=None):
    seen, cache = [], cache or DynamicCache()
    with torch.no_grad():
        for piece in pieces:
            seen.append(model(piece, past_key_values=cache).logits)
    return torch.cat(seen, 1)


def full_plan(model):
    return plan_for(model, every_head(model, *FULL), decode_plan(segment(0, (1, 2), EVERYTHING)))


def sparse_plan(model, *evicting):
    first = segment(0, (2,) if evicting else (1, 2), 9)
    return plan_for(model, every_head(model, *SPARSE), decode_plan(first), *evicting)


def test_whole(model):
    text = random_tokens(1, LENGTH + NEW)
    with torch.no_grad():
        dense = model(text).logits
    parts = text.split([LENGTH, *[1] * NEW], 1)
    for chunking in (CUT, WHOLE):
        with apply(model, full_plan(model), chunking=chunking):
            torch.testing.assert_close(logits(model, parts), dense, atol=1e-3, rtol=1e-3)


def test_sparse(model):
    text = random_tokens(1, LENGTH + NEW)
    parts = text.split([70, LENGTH - 70, *[1] * NEW], 1)
    plan = sparse_plan(model)
    with BruteForce(model, plan):
        expected = logits(model, parts)
    with apply(model, plan, chunking=CUT, kv_host_layers=[2]):
        torch.testing.assert_close(logits(model, parts), expected, atol=1e-3, rtol=1e-3)


def test_evict(model):
    text = random_tokens(1, LENGTH + NEW)
    parts = text.split([LENGTH, *[1] * NEW], 1)
    plan = sparse_plan(model, drops((1,), 20))
    with BruteForce(model, plan):
        expected = logits(model, parts)
    with apply(model, plan, chunking=CUT):
        torch.testing.assert_close(logits(model, parts), expected, atol=1e-3, rtol=1e-3)


def test_exact(model):
    prompt = random_tokens(1, LENGTH)
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    dense = model.generate(prompt, **ask)
    with apply(model, sparse_plan(model), exact=True):
        assert torch.equal(model.generate(prompt, **ask), dense)


def test_ragged_two_turns(model):
    rows = random_tokens(2, LENGTH)
    rows[1, :30] = 0
    mask = (rows != 0).long()
    ask = {"max_new_tokens": 3, "do_sample": False}
    said = model.generate(rows, attention_mask=mask, **ask)
    with apply(model, full_plan(model)):
        cache = DynamicCache()
        first = model.generate(rows, attention_mask=mask, **ask, past_key_values=cache)
        assert torch.equal(first, said)
