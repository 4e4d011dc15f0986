"""A forward pass that fails, in any operation of a store or behind the last of them, leaves no trace: run again,
it gives the very logits that it would have given."""

import copy
import os
import random
from contextlib import contextmanager

import pytest
import torch
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache

from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.pinned import CopyStream, HostMemory

SMALL = Chunking(above=24, rows=16)
OPERATIONS = [
    *((kind, name) for kind in (DeviceStore, HostStore) for name in ("append", "room", "commit", "view", "gather")),
    (HostMemory, "take"),
    (CopyStream, "run"),
]
PLANS = {
    "device": decode_plan(segment(0, (1, 2), 12)),
    "host": decode_plan(segment(0, (1, 2), 12), offload=(1, 2)),
    "its own choice": decode_plan(segment(0, (0, 1, 2), 12), offload=(1,)),
    "head map": decode_plan(segment(0, (1, 2), 12, heads={1: (1, 0), 2: (1, 1)}), offload=(2,)),
}


class Failed(BaseException):
    """As KeyboardInterrupt: nothing catches it."""


@pytest.fixture(scope="module")
def model():
    return tiny_model(head_dim=16)


@contextmanager
def failing(monkeypatch, number: int, behind: bool):
    """Inside it, operation `number` of the stores fails, before it has done anything or once it is done."""
    seen = 0

    def failing_one(real):
        def operation(self, *args, **kwargs):
            nonlocal seen
            seen += 1
            mine = seen
            if mine == number and not behind:
                raise Failed
            found = real(self, *args, **kwargs)
            if mine == number:
                raise Failed
            return found

        return operation

    with monkeypatch.context() as patch:
        for kind, name in OPERATIONS:
            patch.setattr(kind, name, failing_one(getattr(kind, name)))
        yield


def fail(*_):
    raise Failed


def walk(model, monkeypatch, seed: int) -> None:
    """Passes of random sizes over one cache, most of them failed first and then run again; now and then the cache is
    copied. A cache that nothing failed over gives the same logits."""
    chance = random.Random(seed)
    name, chunking = chance.choice(list(PLANS)), chance.choice((None, SMALL))
    text = random_tokens(chance.choice((1, 2)), 800, seed)
    sizes = [chance.choice((30, 90, 160)), *(chance.choice((1, 1, 1, 2, 40, 70)) for _ in range(8))]
    pieces = text[:, : sum(sizes)].split(sizes, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, PLANS[name]), chunking=chunking):
        cache, whole = DynamicCache(), DynamicCache()
        for piece in pieces:
            before = whole.get_seq_length()
            expected = model(piece, past_key_values=whole).logits
            for _ in range(chance.randrange(3)):
                break_off(model, monkeypatch, chance, piece, cache)
                assert cache.get_seq_length() == before
                cache = copy.deepcopy(cache) if chance.random() < 0.2 else cache
            found = model(piece, past_key_values=cache).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def break_off(model, monkeypatch, chance: random.Random, piece: torch.Tensor, cache) -> None:
    """A pass that fails at a random place."""
    place = chance.choice(("store", "store", "norm", "head"))
    if place == "store":
        least = 6 if cache.get_seq_length() else 3  # operations of three layers: without a past nothing is read
        with failing(monkeypatch, chance.randint(1, least), chance.random() < 0.5), pytest.raises(Failed):
            model(piece, past_key_values=cache)
        return
    module = model.lm_head if place == "head" else model.model.norm
    with module.register_forward_pre_hook(fail), pytest.raises(Failed):
        model(piece, past_key_values=cache)


@pytest.mark.parametrize("seed", range(10))
def test_failed_passes_leave_no_trace(model, monkeypatch, seed: int):
    walk(model, monkeypatch, seed)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_many_failed_passes_leave_no_trace(model, monkeypatch):
    for seed in range(100, 100 + int(os.environ.get("FUZZ_COUNT", "500"))):
        walk(model, monkeypatch, seed)


@pytest.mark.parametrize("module", ["model.norm", "lm_head"])
@pytest.mark.parametrize("offload", [(), (1, 2)], ids=["device", "host"])
def test_a_token_whose_step_failed_behind_the_last_layer_is_stored_once(model, module: str, offload: tuple[int, ...]):
    prompt, new = random_tokens(1, 100), random_tokens(1, 3, 1)
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 12, selector="uniform", window=3), offload=offload))
    with torch.no_grad(), apply(model, plan):
        expected, _ = steps(model, prompt, new)
        cache = model(prompt).past_key_values
        with model.get_submodule(module).register_forward_pre_hook(fail), pytest.raises(Failed):
            model(new[:, :1], past_key_values=cache)
        found, cache = steps(model, new[:, :1], new[:, 1:], cache)
    assert cache.get_seq_length() == 103
    assert torch.equal(found, expected[:, 1:])


def test_the_decoder_alone_ends_its_passes(model):
    prompt, new = random_tokens(1, 60), random_tokens(1, 3, 1)
    with torch.no_grad(), apply(model, plan_for(model, None, PLANS["device"])):
        cache = model.model(prompt).past_key_values
        for token in new.split(1, 1):
            last = model.model(token, past_key_values=cache).last_hidden_state
        expected, _ = steps(model, prompt, new)
    assert cache.get_seq_length() == 63
    torch.testing.assert_close(model.lm_head(last), expected[:, -1:])


@pytest.mark.parametrize("fails_at", [None, 1])
def test_a_forward_of_the_model_that_runs_the_decoder_in_pieces_keeps_every_piece(fails_at: int | None):
    model, prompt = tiny_model(head_dim=16), random_tokens(1, 90)
    own, plan = model.forward, plan_for(model, None, PLANS["device"])

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
