"""A plan of full density changes nothing: the dense model's tokens, exactly, on every architecture, in every use."""

import pytest
import torch
from tiny_models import ARCHITECTURES, TYPICAL, random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, PrefillBucket, PrefillPlan
from sparsekv.runtime.hf.apply import apply

NEW = 6
FULL = (
    AShape(sink=tokens(1), window=fraction(1.0)),
    BlockSparse(keep=fraction(1.0)),
    VerticalSlash(vertical=fraction(1.0), slash=fraction(1.0), max_tiles=fraction(1.0)),
    Dense(),
)


def full_plan(model):
    """Everything goes through the sparse kernels and selects everything."""
    return plan_for(model, every_head(model, *FULL), decode_plan(segment(0, (1, 2), EVERYTHING)))


def offloaded_plan(model):
    """The same with a window to remember and the sparse layers in host memory."""
    uniform = segment(0, (1, 2), EVERYTHING, selector="uniform", window=3)
    return plan_for(model, every_head(model, *FULL), decode_plan(uniform, offload=(1, 2)))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=TYPICAL)
def typical(request):
    return tiny_model(request.param)


@pytest.mark.parametrize(
    ("batch", "phases"),
    [(3, {}), (1, {"prefill": False}), (3, {"decode": False})],
    ids=["both", "decode", "prefill"],
)
def test_greedy_tokens_are_those_of_the_dense_model(model, batch: int, phases: dict):
    prompt = random_tokens(batch, 150)
    dense = model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    with apply(model, full_plan(model), **phases) as handle:
        assert torch.equal(model.generate(prompt, max_new_tokens=NEW, do_sample=False), dense)
    assert handle.stats().prefill_density == 1.0
    assert handle.stats().decode_share == 1.0


def talk(model, cache=None):
    """Three turns, the whole conversation passed each time, as chat programs do."""
    said = random_tokens(1, 70)
    for turn in range(3):
        out = model.generate(
            said,
            attention_mask=torch.ones_like(said),
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
        )
        cache = out.past_key_values
        said = torch.cat((out.sequences, random_tokens(1, 20, seed=turn)), 1)
    return said


def test_several_turns_give_the_dense_conversation(typical):
    dense = talk(typical)
    for plan in (full_plan(typical), offloaded_plan(typical)):
        with apply(typical, plan):
            assert torch.equal(talk(typical), dense)
            assert torch.equal(talk(typical, cache=DynamicCache()), dense)


def test_without_a_cache_every_step_is_a_prefill(typical):
    prompt = random_tokens(2, 70)
    dense = typical.generate(prompt, max_new_tokens=3, do_sample=False)
    with apply(typical, full_plan(typical)) as handle:
        assert torch.equal(typical.generate(prompt, max_new_tokens=3, do_sample=False, use_cache=False), dense)
        assert handle.stats().decode_share is None


def test_the_base_model_can_be_called_by_itself(typical):
    prompt = random_tokens(1, 70)
    with torch.no_grad():
        dense = typical.base_model(prompt).last_hidden_state
        with apply(typical, full_plan(typical)):
            out = typical.base_model(prompt)
    assert out.past_key_values.get_seq_length() == 70
    torch.testing.assert_close(out.last_hidden_state, dense, atol=2e-4, rtol=2e-4)


def test_below_the_crossover_both_phases_are_dense(typical):
    sparse = every_head(typical, AShape(sink=tokens(1), window=tokens(1))).lengths[0]
    prefill = PrefillPlan(tile={"query": 64, "key": 64}, lengths=(PrefillBucket(up_to=400, dense=True), sparse))
    segments = decode_plan(segment(0, (1, 2), 4)).lengths[0]
    plan = plan_for(typical, prefill, DecodePlan(lengths=(DecodeBucket(up_to=400, dense=True), segments)))
    short, long = random_tokens(1, 300), random_tokens(1, 450)
    dense = typical.generate(short, max_new_tokens=NEW, do_sample=False)
    with apply(typical, plan) as handle:
        assert torch.equal(typical.generate(short, max_new_tokens=NEW, do_sample=False), dense)
        assert handle.stats().prefill_density == 1.0
        handle.reset_stats()
        typical.generate(long, max_new_tokens=NEW, do_sample=False)
        assert handle.stats().prefill_density < 0.6
        assert handle.stats().decode_share < 0.5
