"""Captured decode steps without a GPU: the same inputs, addresses and bookkeeping, replayed by running them again."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, steps, tiny_model
from tiny_multimodal import multimodal_config, multimodal_model
from tiny_plans import decode_plan, plan_for, segment
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sparsekv.runtime.hf import graphs
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.graphs import GraphWarning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the steps are captured there")
SPARSE = decode_plan(segment(0, (1,), 12, sink=4, recent=10))


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=2, head_dim=16, heads=2, kv_heads=1)


@pytest.fixture
def captured(monkeypatch):
    """Steps are captured."""
    emulate(monkeypatch)


def expected(model, plan, prompt, new):
    with apply(model, plan, backend="cpu"):
        return steps(model, prompt, new)[0]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_vl"])
def test_the_decoder_inside_a_multimodal_model_is_captured(captured, kind):
    whole = multimodal_model(config=multimodal_config(kind, layers=2, head_dim=16, heads=2, kv_heads=1))
    prompt, new, plan = random_tokens(1, 60), random_tokens(1, 2, 1), plan_for(whole, None, SPARSE)
    new[0, 1] = whole.config.image_token_id  # in whose place gemma4 has another id
    with apply(whole, plan, backend="triton") as handle:
        found, _ = steps(whole, prompt, new)
        assert (handle.steps.replayed, handle.steps.why_not) == (2, "")
    torch.testing.assert_close(found, expected(whole, plan, prompt, new), rtol=1e-3, atol=1e-4)


def test_captured_steps_outlast_a_suspension(model, captured):
    prompt, new = random_tokens(1, 60), random_tokens(1, 4, 1)
    plan = plan_for(model, None, SPARSE)
    with apply(model, plan, backend="triton") as handle:
        first, cache = steps(model, prompt, new[:, :2])
        captured_step = handle.steps.latest
        handle.suspend()
        with torch.no_grad():
            model(new)
        handle.resume()
        rest, _ = steps(model, new[:, 2:3], new[:, 3:], cache)
        assert handle.steps.latest is captured_step
        assert handle.steps.replayed == 4
    found = torch.cat((first, rest), 1)
    torch.testing.assert_close(found, expected(model, plan, prompt, new), rtol=1e-3, atol=1e-4)


def test_a_closed_handle_does_not_keep_the_model_alive(captured):
    model, token = tiny_model(layers=1, head_dim=16, heads=2, kv_heads=1), random_tokens(1, 1)
    with apply(model, plan_for(model), backend="triton") as handle:
        _, cache = steps(model, random_tokens(1, 30), token)
    decoder = weakref.ref(model.model)
    del model
    gc.collect()
    assert decoder() is None
    assert (handle.steps.replayed, cache.get_seq_length()) == (1, 31)


def test_a_model_that_changes_is_captured_anew_or_runs_by_itself(model, captured):
    model, token, seen = copy.deepcopy(model), random_tokens(1, 1), []
    with apply(model, plan_for(model), backend="triton") as handle, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, cache = steps(model, random_tokens(1, 30), token)
        mlp = model.model.layers[1].mlp
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight * 2, requires_grad=False)
        steps(model, token, token[:, :0], cache)
        assert handle.steps.replayed == 1  # in vain
        steps(model, token, token[:, :0], cache)
        assert handle.steps.replayed == 2
        hook = mlp.register_forward_hook(lambda *_: seen.append(1))
        steps(model, token, token, cache)
        assert (len(seen), handle.steps.replayed) == (3, 2)  # once in the replay in vain, which runs it here
        assert "has a hook" in handle.steps.why_not
        hook.remove()
        model.model.layers[1].mlp = torch.nn.Sequential(mlp)
        steps(model, token, token[:, :0], cache)
        assert (len(seen), handle.steps.replayed, handle.steps.why_not) == (3, 3, "")
        mlp.__class__ = type("Steered", (type(mlp),), {"__module__": "somewhere"})
        steps(model, token, token, cache)  # the first in vain
        assert "somewhere.Steered" in handle.steps.why_not
        assert cache.get_seq_length() == 38
    assert len([one for one in told if one.category is GraphWarning]) == 1


def test_a_module_that_a_family_takes_from_another_is_captured(model, captured):
    """Nemotron-H's gated norm is Zamba 2's in transformers before 5.24."""
    model, prompt, new = copy.deepcopy(model), random_tokens(1, 30), random_tokens(1, 3, 1)
    model.model.norm.__class__ = Qwen3RMSNorm
    with apply(model, plan_for(model), backend="triton") as handle:
        found, _ = steps(model, prompt, new)
    assert (handle.steps.replayed, handle.steps.why_not) == (3, "")
    torch.testing.assert_close(found, expected(model, plan_for(model), prompt, new), rtol=1e-3, atol=1e-4)


def test_few_graphs_are_kept(captured, monkeypatch):
    model = tiny_model(layers=1, head_dim=16, heads=2, kv_heads=1)
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    with apply(model, plan_for(model), backend="triton") as handle:
        for rows in (1, 2, 3, 1, 3):
            steps(model, random_tokens(rows, 20), random_tokens(rows, 1, 1))
        assert handle.steps.replayed == 5
        assert [key.rows for key in handle.steps._graphs] == [1, 3]


def test_numbers_that_change_between_caches_are_captured_anew(captured):
    model = tiny_model(layers=1, head_dim=16, heads=2, kv_heads=1)
    prompt, new = random_tokens(1, 30), random_tokens(1, 1, 1)
    with apply(model, plan_for(model), backend="triton") as handle:
        steps(model, prompt, new)
        before = handle.steps.latest
        model.model.norm.variance_epsilon = 1.0
        steps(model, prompt, new)
        assert handle.steps.latest is not before
        assert handle.steps.replayed == 2


def test_fewer_layers_run_by_themselves_and_leave_the_others_alone(model, captured):
    model, token = copy.deepcopy(model), random_tokens(1, 1)
    with apply(model, plan_for(model), backend="triton") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, cache = steps(model, random_tokens(1, 30), token)
        model.config.num_hidden_layers = 1
        steps(model, token, token[:, :0], cache)
        assert handle.steps.why_not == "only some layers of the model run"
        assert [layer.get_seq_length() for layer in cache.layers] == [32, 31]


def test_steps_over_a_cache_of_autocast_are_captured_in_its_dtype_and_none_under_autocast(model, captured):
    prompt, new, plan = random_tokens(1, 60), random_tokens(1, 3, 1), plan_for(model, None, SPARSE)

    def after_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            _, cache = steps(model, prompt, new[:, :1])
        return steps(model, new[:, 1:2], new[:, 2:], cache)

    with apply(model, plan, backend="cpu"):
        expected, _ = after_autocast()
    with apply(model, plan, backend="triton") as handle:
        steps(model, prompt, new)  # float32: another graph
        with pytest.warns(GraphWarning, match="autocast"):
            found, cache = after_autocast()
        assert (handle.steps.replayed, len(handle.steps._graphs)) == (3 + 2, 2)
    assert {layer.store.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["granitemoe", "gpt_oss"])
def test_captured_steps_of_a_mixture_have_what_its_head_reads(kind, captured):
    mixture, prompt, new = tiny_model(kind), random_tokens(1, 30), random_tokens(1, 2, 1)
    plan = plan_for(mixture)
    with apply(mixture, plan, backend="triton") as handle:
        found, _ = steps(mixture, prompt, new)
    assert handle.steps.replayed == 2
    torch.testing.assert_close(found, expected(mixture, plan, prompt, new), atol=1e-4, rtol=1e-4)
