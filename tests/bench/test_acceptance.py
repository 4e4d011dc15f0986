"""Drafts that count on a real model, and texts that are dense attention's."""

from types import SimpleNamespace

from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.bench.acceptance import accepted


def test_drafts_are_counted_and_texts_compared():
    model = tiny_model(layers=4)
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 1, sink=0, recent=1)))
    prompts = [random_tokens(1, 50, seed=seed) for seed in range(2)]
    found = accepted(SimpleNamespace(model=model), plan, prompts, length=50, new=20, draft=4)
    assert (found.texts, found.equal, found.gaps) == (2, 2, ())
    assert found.drafted > 8
    assert 0 < found.acceptance < 1
