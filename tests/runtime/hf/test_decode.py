"""Decode over chosen tokens, against the same thing by brute force."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.runtime.hf import attach
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import CACHE_NAME


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=6)


def test_the_second_cache_of_guidance_decodes_and_its_mask_is_not_waited_for(model, monkeypatch):
    plan, ids, seen = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4))), random_tokens(1, 80), []
    real = attach.check_call

    def check(decoder, inputs, tokens):
        seen.append((inputs[CACHE_NAME].get_seq_length(), tokens.shape[1]))
        real(decoder, inputs, tokens)

    monkeypatch.setattr(attach, "check_call", check)
    with torch.no_grad(), apply(model, plan) as handle:
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, guidance_scale=1.5)
        assert handle.stats().decode_tokens_cached == 6 * (sum(range(81, 84)) + sum(range(2, 5)))
    assert seen == [(0, 80), *((past, 1) for past in range(4))]


def decoded(model, plan, new, rows=2, **options):
    """Logits of the tokens after a prompt of 300, the share that was attended to, and the cache."""
    with torch.no_grad(), apply(model, plan, **options) as handle:
        cache = model(random_tokens(rows, 300), logits_to_keep=1).past_key_values
        logits = [model(token, past_key_values=cache).logits for token in new.split(1, 1)]
        return torch.cat(logits, 1), handle.stats().decode_share, cache


@pytest.mark.parametrize("rows", [0, 1], ids=["no row", "one row of two"])
@pytest.mark.parametrize("host", [None, [1, 2]], ids=["device", "host"])
def test_rows_that_the_scratch_has_no_room_for_attend_to_everything(model, monkeypatch, rows: int, host):
    monkeypatch.setattr("sparsekv.runtime.core.segments.SCORE_BYTES", 4 * 4 * 400 if rows else 4 * 4 * 100)
    plan, new = plan_for(model, None, decode_plan(segment(0, (1, 2), 60))), random_tokens(2, 3, 1)
    found, share, _ = decoded(model, plan, new, kv_host_layers=host)
    dense, *_ = decoded(model, plan, new, decode=False)
    torch.testing.assert_close(found[rows:], dense[rows:], rtol=1e-4, atol=1e-4)
    sparse = sum(2 + 60 + 3 + 0 * length for length in (301, 302, 303)) * 2 * rows
    layers, cached = model.config.num_hidden_layers, 301 + 302 + 303
    attended = 2 * layers * cached - rows * 2 * cached + sparse
    assert share == attended / (2 * layers * cached)
    if rows:
        assert (found[0] - dense[0]).norm() / dense[0].norm() > 1e-3  # the first row is sparse
