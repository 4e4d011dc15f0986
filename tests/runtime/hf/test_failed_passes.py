"""Passes of a decoder alone, and of a model whose forward runs its decoder in pieces, one of which fails."""

import pytest
import torch
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache

from sparsekv.runtime.hf.apply import apply

DECODE = decode_plan(segment(0, (1, 2), 12))


class Failed(BaseException):
    """As KeyboardInterrupt: nothing catches it."""


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=16)


def fail(*_):
    raise Failed


def test_the_decoder_alone_ends_its_passes(model):
    prompt, new = random_tokens(1, 60), random_tokens(1, 3, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        cache = model.model(prompt).past_key_values
        for token in new.split(1, 1):
            last = model.model(token, past_key_values=cache).last_hidden_state
        expected, _ = steps(model, prompt, new)
    assert cache.get_seq_length() == 63
    torch.testing.assert_close(model.lm_head(last), expected[:, -1:])


@pytest.mark.parametrize("fails_at", [None, 1])
def test_a_forward_of_the_model_that_runs_the_decoder_in_pieces_keeps_every_piece(fails_at: int | None):
    model, prompt = tiny_model(head_dim=16), random_tokens(1, 90)
    own, plan = model.forward, plan_for(model, None, DECODE)

    def in_pieces(input_ids, **options):
        for number, piece in enumerate(input_ids.split(30, 1)):
            if number == fails_at:
                with model.model.norm.register_forward_pre_hook(fail), pytest.raises(Failed):
                    own(input_ids=piece, **options)
            out = own(input_ids=piece, **options)
        return out

    with torch.no_grad(), apply(model, plan):
        cache = DynamicCache()
        expected = [model(piece, past_key_values=cache).logits for piece in prompt.split(30, 1)][-1]
    model.forward = in_pieces
    with torch.no_grad(), apply(model, plan):
        cache = DynamicCache()
        assert torch.equal(model(prompt, past_key_values=cache).logits, expected)
    assert cache.get_seq_length() == 90
