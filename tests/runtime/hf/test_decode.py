"""Decode over chosen tokens, against the same thing by brute force."""

import copy

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf import attach
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import CACHE_NAME


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=6)


def test_with_offload_device_bytes_fall_by_what_moved_to_the_host(model):
    prompt, segments = random_tokens(1, 300), [segment(0, (1, 2, 3), 12)]
    with apply(model, plan_for(model, None, decode_plan(*segments))) as handle:
        model.generate(prompt, max_new_tokens=5, do_sample=False)
        all_on_device = handle.stats()
    with apply(model, plan_for(model, None, decode_plan(*segments, offload=(1, 2, 3), hot=32))) as handle:
        model.generate(prompt, max_new_tokens=5, do_sample=False)
        offloaded = handle.stats()
    capacity, hot = 300 + 256, (2 + 12 + 3) + (3 + 64)  # slots for a step; recent tokens and those that leave together
    layer = all_on_device.kv_bytes_device // 6
    assert all_on_device.kv_bytes_host == 0
    assert offloaded.kv_bytes_device == layer * 3 + layer * 3 * hot // capacity
    assert offloaded.kv_bytes_host == layer * 3 * (capacity - 3) // capacity
    assert all_on_device.miss_share is None
    assert 0 < offloaded.miss_share < 1
    assert offloaded.misses_a_step == offloaded.host_tokens_fetched / (3 * 4)
    with apply(model, plan_for(model, None, decode_plan(*segments, offload=(1, 2, 3))), decode=False) as handle:
        model.generate(prompt, max_new_tokens=5, do_sample=False)
    assert handle.stats().kv_bytes_host == 0


@pytest.mark.parametrize("chunk", [60, 20])
def test_a_last_piece_of_one_token_of_a_chunked_prompt_is_prefill(model, chunk: int):
    plan, prompt = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4))), random_tokens(1, 61)
    with apply(model, plan) as handle:
        whole = model.generate(prompt, max_new_tokens=1, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk), whole)
        assert handle.stats().decode_share is None


@pytest.mark.parametrize("chunk", [None, 2])
def test_no_piece_of_a_turn_of_several_tokens_is_a_decode_step_however_it_is_cut(model, chunk: int | None):
    plan, ids = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4))), random_tokens(1, 80)
    with torch.no_grad(), apply(model, plan) as handle:
        cache = model(ids[:, :-3]).past_key_values
        model.generate(ids, **behind(cache, ids, max_new_tokens=1, prefill_chunk_size=chunk))
        assert handle.stats().decode_share is None


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


def behind(cache, ids, **options):
    """What `generate` takes for the ids behind a copy of the cache."""
    mask = torch.ones_like(ids)
    return {"attention_mask": mask, "past_key_values": copy.deepcopy(cache), "do_sample": False} | options


@pytest.mark.parametrize("host", [(), (1, 2, 3)], ids=["device", "host"])
def test_one_token_behind_a_filled_cache_is_a_decode_step_of_generate_as_of_the_model(model, host):
    plan, ids = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4), offload=host)), random_tokens(2, 121)
    with torch.no_grad(), apply(model, plan) as handle:
        cache = model(ids[:, :-1], logits_to_keep=1).past_key_values
        handle.reset_stats()
        first = model(ids[:, -1:], past_key_values=copy.deepcopy(cache)).logits.argmax(-1)
        expected = handle.stats()
        for given in (ids, ids[:, -1:]):  # transformers takes both
            handle.reset_stats()
            options = behind(cache, ids, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
            found = model.generate(given, **options)
            assert torch.equal(found.logits[0].argmax(-1)[:, None], first)
            assert handle.stats() == expected
    assert expected.decode_share < 1
    assert expected.host_steps == len(host)


@pytest.mark.parametrize("new", [1, 5])
def test_padding_among_the_cached_tokens_is_refused_whatever_comes_behind_them(model, new: int):
    ids = random_tokens(2, 40)
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    with torch.no_grad(), apply(model, plan_for(model)):
        cache = model(ids[:, :-new]).past_key_values
        for given in (ids, ids[:, -new:]):
            with pytest.raises(UnsupportedError, match="padding"):
                model.generate(given, **behind(cache, ids, attention_mask=padded, max_new_tokens=1))


def test_a_mask_that_leaves_out_cached_tokens_is_refused(model):
    with torch.no_grad(), apply(model, plan_for(model)):
        cache = model(random_tokens(1, 30)).past_key_values
        with pytest.raises(UnsupportedError, match=r"\(1, 31\).*found \(1, 1\)"):
            model(random_tokens(1, 1), past_key_values=cache, attention_mask=torch.ones(1, 1, dtype=torch.long))


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
