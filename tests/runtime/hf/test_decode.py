"""Decode over chosen tokens, against the same thing by brute force."""

import copy

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf import attach
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import CACHE_NAME

NEW = 7


def selection_of(cache, plan):
    """What the filter layer of the only segment chose in the last step."""
    program = Program.of(None, plan.decode, plan.model)
    (segment,) = program.segments
    return cache.layers[0].state.chosen(segment)


def run(model, turns, cache=None):
    """The logits of each turn's last token and of NEW tokens that follow it, whatever was predicted."""
    seen = []
    with torch.no_grad():
        for turn in turns:
            for piece in (turn[:, :-NEW], *turn[:, -NEW:].split(1, 1)):
                out = model(piece, past_key_values=cache, logits_to_keep=1)
                cache = out.past_key_values
                seen.append(out.logits)
    return torch.cat(seen, 1)


SEGMENTS = {
    "last": [segment(0, (1, 2, 3), 12)],
    "uniform": [segment(0, (1, 2, 3), 12, selector="uniform", window=5)],
    "exponential": [segment(0, (1, 2, 3), 12, selector="exponential", window=4)],
    "window longer than the context": [segment(0, (1, 2, 3), 12, selector="uniform", window=500)],
    "per KV head": [segment(0, (1, 2, 3), 12, heads="per_kv_head")],
    "head map": [segment(0, (1, 2, 3), 12, heads={1: (1, 0), 2: (1, 1), 3: (0, 1)})],
    "wait layers and two segments": [segment(0, (2,), 9), segment(3, (4, 5), 15)],
    "no chosen tokens at all": [segment(0, (1, 2, 3), 0)],
    "filter layers attend to their own choice": [segment(0, (0, 1, 2), 12), segment(3, (3,), 20), segment(4, (5,), 9)],
    "its own choice, per KV head": [segment(1, (1, 2), 12, heads="per_kv_head")],
    "its own choice, a window of queries": [segment(1, (1, 2), 12, selector="uniform", window=5)],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=6)


def test_a_window_of_queries_holds_no_graph_of_the_passes_it_came_from(model):
    """With gradients on, as torch has them unless told otherwise."""
    prompt, plan = random_tokens(2, 60), decode_plan(segment(0, (1, 2, 3), 12, selector="uniform", window=5))
    logits = []
    with apply(model, plan_for(model, None, plan)):
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                cache = model(prompt[:, :-1]).past_key_values
                logits.append(model(prompt[:, -1:], past_key_values=copy.deepcopy(cache)).logits.detach())
    assert torch.equal(*logits)


def test_the_layers_of_a_segment_find_a_needle_that_only_the_filter_layer_looks_for(model):
    """Keys of the needle's tokens are planted in the filter layer; later layers attend to them."""
    needle, length = [17, 18, 41], 90
    seen: dict[int, torch.Tensor] = {}

    def plant(module, args, output):
        if output.shape[1] == length:
            output = output.clone()
            output[:, needle] *= 20.0
        return output

    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 3)))
    hook = model.base_model.layers[0].self_attn.k_proj.register_forward_hook(plant)
    try:
        with torch.no_grad(), apply(model, plan):
            cache = model(random_tokens(1, length)).past_key_values
            for token in random_tokens(1, 4, seed=2).split(1, 1):
                model(token, past_key_values=cache)
                seen[cache.get_seq_length()] = selection_of(cache, plan).chosen_BgN.clone()
    finally:
        hook.remove()
    found = [len(set(needle) & set(chosen.flatten().tolist())) for chosen in seen.values()]
    assert min(found) >= 2, seen


@pytest.mark.parametrize("offload", [(), (1,)], ids=["device", "host"])
def test_generated_tokens_are_chosen_from_like_any_other(offload):
    """600 tokens after a prompt of 20: what a layer of a segment attends to stays what it is, the share falls."""
    model = tiny_model(layers=2, heads=2, kv_heads=1, head_dim=16, hidden=16, ffn=16)
    plan = plan_for(model, None, decode_plan(segment(0, (1,), 30, sink=4, recent=16), offload=offload))
    with torch.no_grad(), apply(model, plan) as handle:
        cache, shares = model(random_tokens(1, 20)).past_key_values, []
        for token in random_tokens(1, 600, seed=1).split(1, 1):
            model(token, past_key_values=cache)
            if cache.get_seq_length() % 150 == 20:
                shares.append(handle.stats().decode_share)
                handle.reset_stats()
                chosen = selection_of(cache, plan)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(1 / 2 + 1 / 2 * 50 / 545, rel=0.02)
    assert chosen.chosen_BgN.max() > 300


def test_where_sinks_budget_and_recent_cover_the_context_the_step_is_dense_bit_for_bit(model):
    prompt, token = random_tokens(2, 39), random_tokens(2, 1, seed=1)
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 30, sink=4, recent=6)))
    with torch.no_grad(), apply(model, plan) as handle:
        cache = model(prompt).past_key_values
        covered = model(token, past_key_values=cache).logits
        assert handle.stats().decode_share == 1.0
        model(token, past_key_values=cache)
        assert handle.stats().decode_share < 1.0
    with torch.no_grad(), apply(model, plan, decode=False):
        cache = model(prompt).past_key_values
        assert torch.equal(model(token, past_key_values=cache).logits, covered)


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


@pytest.mark.parametrize(("name", "batch"), [*((name, 1) for name in SEGMENTS), ("last", 16)])
def test_offloaded_layers_give_the_logits_of_those_on_the_device_bit_for_bit(model, name: str, batch: int):
    turns = [random_tokens(batch, 170), random_tokens(batch, 90, seed=1)]
    sparse = tuple(layer for part in SEGMENTS[name] for layer in part.layers if layer != part.filter)
    with apply(model, plan_for(model, None, decode_plan(*SEGMENTS[name]))):
        expected = run(model, turns)
    with apply(model, plan_for(model, None, decode_plan(*SEGMENTS[name], offload=sparse, hot=100))) as handle:
        assert torch.equal(run(model, turns), expected)
        assert handle.stats().host_tokens_fetched < handle.stats().host_tokens_chosen


@pytest.mark.parametrize("chunk", [59, 60, 30, 20])
def test_a_last_piece_of_one_token_of_a_chunked_prompt_is_prefill(model, chunk: int):
    plan, prompt = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4))), random_tokens(1, 61)
    with apply(model, plan) as handle:
        whole = model.generate(prompt, max_new_tokens=1, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk), whole)
        assert handle.stats().decode_share is None


@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
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


def test_a_turn_of_several_tokens_is_prefill_and_what_follows_decode(model):
    plan, ids = plan_for(model, None, decode_plan(segment(0, (1, 2, 3), 4))), random_tokens(1, 80)
    with torch.no_grad(), apply(model, plan) as handle:
        cache = model(ids[:, :-2]).past_key_values
        for given in (ids, ids[:, -2:]):
            for tokens, cached in ((1, 0), (3, 6 * (81 + 82))):
                handle.reset_stats()
                model.generate(given, **behind(cache, ids, max_new_tokens=tokens))
                assert handle.stats().decode_tokens_cached == cached


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
