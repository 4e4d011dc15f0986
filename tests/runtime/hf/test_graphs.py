"""Decode steps as CUDA graphs: the same tokens as without, whatever the cache, and the model as it is now."""

import copy
import gc
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import HYBRIDS, MORE, SHARED, TYPICAL, USUAL, random_tokens, steps, tiny_model
from tiny_plans import decode_plan, info_of, plan_for, segment
from torch import nn

from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.graphs import GraphWarning

pytestmark = pytest.mark.gpu
SPARSE = decode_plan(segment(0, (1, 2), 60, sink=4, recent=30))
GROWING = DecodePlan(
    lengths=(
        DecodeBucket(up_to=310, dense=True),
        DecodeBucket(up_to=330, segments=(segment(0, (1, 2), 60, sink=4, recent=30),)),
        DecodeBucket(up_to=None, segments=(segment(0, (1, 2), 90, sink=4, recent=30),)),
    )
)
OWN = decode_plan(segment(0, (0, 1, 2), 60, sink=4, recent=30))
PLANS = {"dense": None, "sparse": SPARSE, "across buckets": GROWING, "a filter layer that is sparse": OWN}


HYBRID = {"layers": 5, "layer_types": [*["full_attention"] * 3, *["linear_attention"] * 2]}
LONG_ROPE = {  # whose angles change amid the steps
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 320,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + number / 4 for number in range(16)],
}
OF_THEIR_OWN = {
    "qwen3_next": ("qwen3_next", HYBRID),
    "heads of 512": ("gemma4_text", {"global_head_dim": 512}),
    "shared keys, heads of 512": (SHARED, {"global_head_dim": 512}),
    "a long rope": ("phi3", {"hidden": 256, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 320}),
}


@pytest.fixture(scope="module", params=[*TYPICAL, *OF_THEIR_OWN])
def model(request):
    if request.param == "a long rope" and Version(transformers.__version__) < Version("5.21"):
        pytest.skip("transformers before 5.21 asks the device which angles to take")
    family, own = OF_THEIR_OWN.get(request.param, (request.param, {}))
    return tiny_model(family, head_dim=64, dtype=torch.bfloat16, **own).cuda()


@pytest.fixture
def llama():
    return tiny_model(head_dim=64, dtype=torch.bfloat16).cuda()


@pytest.fixture
def uncaptured(monkeypatch):
    """Steps run one launch at a time inside."""

    def off():
        monkeypatch.setattr("sparsekv.runtime.hf.plan_engine.can_capture", lambda *_: False)

    yield off
    monkeypatch.undo()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_logits_are_bit_for_bit_those_of_single_launches(model, name, rows, uncaptured):
    prompt, new = random_tokens(rows, 300).cuda(), random_tokens(rows, 50, 1).cuda()
    plan = plan_for(model, None, PLANS[name])
    with apply(model, plan) as handle:
        captured, _ = steps(model, prompt, new)
    assert (handle.steps.replayed, handle.steps.why_not) == (50, "")
    uncaptured()
    with apply(model, plan) as plain:
        single, _ = steps(model, prompt, new)
    assert plain.steps is None
    assert torch.equal(captured, single)
    assert handle.stats().decode_tokens_attended == plain.stats().decode_tokens_attended
    assert (plain.stats().decode_share != 1) == (name != "dense")


OTHERS = tuple(name for name in (*USUAL, *MORE, *HYBRIDS) if name not in (*TYPICAL, *OF_THEIR_OWN))
WAITING = ("phimoe",)  # transformers computes its rotary frequencies on the host, and copies them in every pass


@pytest.mark.parametrize("family", OTHERS)
def test_captured_steps_of_every_other_family_are_single_launches(family, uncaptured):
    model = tiny_model(family, head_dim=64, dtype=torch.bfloat16).cuda()
    prompt, new = random_tokens(2, 300).cuda(), random_tokens(2, 12, 1).cuda()
    first, *followers = info_of(model).full_layers
    plan = plan_for(model, None, decode_plan(segment(first, (*followers,) or (first,), 60, sink=4, recent=30)))
    with apply(model, plan) as handle:
        captured, _ = steps(model, prompt, new)
    refusal = "capturing failed (RuntimeError: called a synchronizing CUDA operation)"
    assert (handle.steps.replayed, handle.steps.why_not) == ((0, refusal) if family in WAITING else (12, ""))
    uncaptured()
    with apply(model, plan):
        single, _ = steps(model, prompt, new)
    assert torch.equal(captured, single)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_k": 20}])
def test_generate_gives_the_tokens_of_single_launches_over_several_turns(model, sampling, uncaptured):
    plan, said = plan_for(model, None, GROWING), []
    for _ in range(2):
        with apply(model, plan) as handle, torch.no_grad():
            torch.manual_seed(3)
            cache, ids = handle.new_cache(200, batch=2), random_tokens(2, 250).cuda()
            for turn in range(3):
                ones = torch.ones_like(ids)  # or a token that was drawn is taken for padding
                ids = model.generate(ids, attention_mask=ones, past_key_values=cache, max_new_tokens=30, **sampling)
                ids = torch.cat((ids, random_tokens(2, 20, turn).cuda()), 1)
            said.append(ids)
        uncaptured()
    assert torch.equal(*said)


def test_caches_take_turns_grow_and_are_copied(llama, uncaptured):
    """One graph serves all of them: it finds keys and values by address."""
    prompts = [random_tokens(1, length, length).cuda() for length in (200, 700, 40)]
    new = random_tokens(1, 40, 1).cuda()
    plan = plan_for(llama, None, SPARSE)
    with apply(llama, plan) as handle, torch.inference_mode():
        caches = [steps(llama, prompt, new[:, :0])[1] for prompt in prompts]
        caches.append(copy.deepcopy(caches[1]))
        found = [[] for _ in caches]
        for token in new.split(1, 1):
            for cache, seen in zip(caches, found, strict=True):
                seen.append(llama(token, past_key_values=cache).logits)
        grown = steps(llama, prompts[0], random_tokens(1, 600, 2).cuda())[0]  # beyond what it had room for
        assert (handle.steps.replayed, len(handle.steps._graphs)) == (4 * 40 + 600, 1)
    uncaptured()
    with apply(llama, plan):
        for prompt, seen in zip((*prompts, prompts[1]), found, strict=True):
            assert torch.equal(torch.cat(seen, 1), steps(llama, prompt, new)[0][:, 1:])
        assert torch.equal(grown, steps(llama, prompts[0], random_tokens(1, 600, 2).cuda())[0])


def test_logits_handed_out_are_copies(llama):
    with apply(llama, plan_for(llama)), torch.no_grad():
        cache = llama(random_tokens(1, 100).cuda()).past_key_values
        first = llama.model(random_tokens(1, 1).cuda(), past_key_values=cache).last_hidden_state
        before = first.clone()
        llama.model(random_tokens(1, 1, 5).cuda(), past_key_values=cache)
        assert torch.equal(first, before)


def other_parameter(linear):
    linear.weight = nn.Parameter(linear.weight + 0.5, requires_grad=False)


def other_data(linear):
    linear.weight.data = linear.weight.data + 0.5


def other_values(linear):
    with torch.no_grad():
        linear.weight += 0.5


@pytest.mark.parametrize("change", [other_parameter, other_data, other_values])
def test_weights_that_change_are_used(llama, change):
    prompt, new = random_tokens(1, 100).cuda(), random_tokens(1, 4, 1).cuda()
    with apply(llama, plan_for(llama)), torch.no_grad():
        first, cache = steps(llama, prompt, new[:, :2])
        change(llama.model.layers[2].mlp.up_proj)
        torch.cuda.empty_cache()
        found, _ = steps(llama, new[:, 2:3], new[:, 3:], cache)
    assert torch.isfinite(found).all()
    with apply(llama, plan_for(llama)), torch.no_grad():
        expected, _ = steps(llama, prompt, new)
    assert not torch.equal(first, expected[:, :3])
    last = (found[:, -1] - expected[:, -1]).float().norm() / expected[:, -1].float().norm()
    assert last < 0.1  # the last layer alone has changed: what is cached below it has not


def test_a_model_that_asks_the_device_runs_one_launch_at_a_time():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model(head_dim=64, dtype=torch.bfloat16, context=64, rope_parameters=rope).cuda()
    prompt, new = random_tokens(1, 50).cuda(), random_tokens(1, 30, 1).cuda()
    dense, _ = steps(model, prompt, new)
    stream = torch.cuda.current_stream()
    with apply(model, plan_for(model)) as handle, pytest.warns(GraphWarning, match="capturing failed") as told:
        found, _ = steps(model, prompt, new)
    assert torch.cuda.current_stream() == stream
    assert handle.steps.replayed == 0
    assert len([one for one in told if one.category is GraphWarning]) == 1
    assert (found - dense).float().norm() / dense.float().norm() < 0.03


@pytest.mark.parametrize("rows", [64, 65])
def test_up_to_64_rows_are_captured(llama, rows):
    with apply(llama, plan_for(llama)) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps(llama, random_tokens(rows, 20).cuda(), random_tokens(rows, 3, 1).cuda())
    assert handle.steps.replayed == (3 if rows == 64 else 0)


def test_many_requests_leave_nothing_behind(llama):
    def request(number):
        rows, tokens = 1 + number % 3, 30 + 37 * number % 500
        llama.generate(random_tokens(rows, tokens, number).cuda(), max_new_tokens=6, do_sample=False)

    with apply(llama, plan_for(llama, None, SPARSE)) as handle, torch.no_grad():
        for number in range(30):
            request(number)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for number in range(150):
            request(number)
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 1 << 20
        assert handle.steps.replayed == 180 * 5
        held = torch.cuda.memory_allocated()
    gc.collect()
    assert torch.cuda.memory_allocated() < held  # the graphs are gone with the handle


def test_a_cache_that_is_let_go_of_is_freed(llama):
    with apply(llama, plan_for(llama)) as handle, torch.no_grad():
        _, cache = steps(llama, random_tokens(2, 2000).cuda(), random_tokens(2, 2, 1).cuda())
        held = handle.stats().kv_bytes_device
        before = torch.cuda.memory_allocated()
        del cache
        gc.collect()
        assert before - torch.cuda.memory_allocated() >= held
