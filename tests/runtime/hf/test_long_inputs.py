"""Long inputs run in pieces and give what the whole gives, wherever nothing is known to stand against it."""

import copy

import pytest
import torch
from tiny_models import ARCHITECTURES, random_tokens, tiny_model
from tiny_plans import every_head, plan_for
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaAttention

from sparsekv.plans.errors import PlanWarning, UsageError
from sparsekv.plans.patterns import AShape, Dense, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

CUT = Chunking(above=20, rows=17, output_bytes=1)  # a group of heads at a time
ONE_PIECE = Chunking(above=20, rows=1 << 20)
WHOLE = Chunking(above=1 << 30)
CALLED_WHOLE = ("afmoe", "gemma4_text", "laguna")


def close(found, expected):
    tolerance = 2e-4 if expected.dtype == torch.float32 else 0.04
    return (found.float() - expected.float()).norm() <= tolerance * expected.float().norm()


def logits_of(model, prompt, chunking, plan=None, **options):
    with torch.no_grad(), apply(model, plan or plan_for(model), chunking=chunking):
        return model(prompt, **options).logits


def check_pieces(model, prompt, cuts, expected_cuts):
    """The logits of the unmodified model, of pieces as they are counted."""
    with torch.no_grad():
        expected = model(prompt).logits
    assert close(logits_of(model, prompt, CUT), expected)
    assert cuts == expected_cuts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_piece_gives_the_very_bits_of_the_layers_own_forward(architecture, cuts):
    model, prompt = tiny_model(architecture, dtype=torch.bfloat16), random_tokens(2, 90)
    plan = plan_for(model, every_head(model, AShape(sink=tokens(1), window=tokens(30)), Dense()))
    expected = logits_of(model, prompt, WHOLE, plan)
    assert cuts == []
    found = logits_of(model, prompt, ONE_PIECE, plan)
    assert close(found, expected) if architecture == "phi" else torch.equal(found, expected)  # it adds in another order
    assert cuts == ([] if architecture in CALLED_WHOLE else [1, 1, 1])


def test_a_forward_that_somebody_put_before_ours_stays(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    layer, calls = model.model.layers[1], []
    original = layer.forward

    def own(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = own
    with torch.no_grad():
        expected = model(prompt).logits
        with apply(model, plan_for(model), chunking=CUT):
            assert close(model(prompt).logits, expected)
    assert layer.forward is own
    assert len(calls) == 2
    assert cuts == [3, 3]


PARTS = ["self_attn", "self_attn.q_proj", "self_attn.o_proj", "mlp", "mlp.down_proj", "input_layernorm"]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_inside_a_layer_sees_all_rows_at_once(name, cuts):
    model, prompt, seen = tiny_model(), random_tokens(1, 50), []
    module = model.model.layers[1].get_submodule(name)

    def hook(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        seen.append(first.shape[1])

    with torch.no_grad():
        expected = model(prompt).logits
        handle = module.register_forward_hook(hook)
        with apply(model, plan_for(model), chunking=CUT):
            assert close(model(prompt).logits, expected)
            handle.remove()
            assert close(model(prompt).logits, expected)
    assert seen == [50]
    assert cuts == [3, 3, 3, 3, 3]  # layer 1 whole, then all three in chunks


def test_a_hook_on_every_module_there_is_stops_the_cutting(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        logits_of(model, prompt, CUT)
    finally:
        hook.remove()
    assert cuts == []


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_a_hook_on_a_layer_keeps_is_not_overwritten(where, cuts):
    model, prompt, kept = tiny_model(), random_tokens(1, 50), []

    def run():
        kept.clear()
        out = model(prompt).logits
        return out, [tensor.clone() for tensor in kept]

    for layer in model.model.layers[:2]:
        if where == "before":
            layer.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        else:
            layer.register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        expected, states = run()
        with apply(model, plan_for(model), chunking=CUT):
            found, found_states = run()
    assert close(found, expected)
    assert len(found_states) == 2
    assert all(close(a, b) for a, b in zip(found_states, states, strict=True))
    assert cuts == [3]


def test_what_a_hook_on_a_layer_returns_goes_on(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    check_pieces(model, prompt, cuts, [3, 3])


def test_hidden_states_that_are_asked_for_are_those_of_each_layer(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    with torch.no_grad():
        expected = model(prompt, output_hidden_states=True)
        with apply(model, plan_for(model), chunking=CUT):
            found = model(prompt, output_hidden_states=True)
            assert cuts == []
            assert close(model(prompt).logits, expected.logits)
            model.config.output_hidden_states = True
            again = model(prompt)
            model.config.output_hidden_states = False
    for out in (found, again):
        assert len(out.hidden_states) == 4
        assert all(close(a, b) for a, b in zip(out.hidden_states, expected.hidden_states, strict=True))
    assert cuts == [3, 3, 3]  # once nobody asks, the hooks that transformers leaves behind do not matter


def test_embeddings_of_the_caller_are_not_overwritten(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(prompt)
        before, expected = embeddings.clone(), model(prompt).logits
        with apply(model, plan_for(model), chunking=CUT):
            assert close(model(inputs_embeds=embeddings).logits, expected)
            assert torch.equal(embeddings, before)
            held = []
            model.get_input_embeddings().register_forward_hook(lambda module, args, output: held.append(output))
            assert close(model(prompt).logits, expected)
    assert torch.equal(held[0], before)
    assert cuts == [3, 3, 3, 3, 3, 3]


class Eighths(torch.nn.Module):
    """A quantised projection: no parameters, and a `weight` that is none, as in torch's own."""

    def __init__(self, linear):
        super().__init__()
        self.packed = ((linear.weight * 8).round().to(torch.int8), linear.bias)

    def weight(self):
        return self.packed[0]

    def forward(self, x):
        return torch.nn.functional.linear(x, self.packed[0].to(x.dtype) / 8, self.packed[1])


@pytest.mark.parametrize("hosts", [0, 3])
def test_quantised_projections_run_and_are_other_weights(hosts, cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    plan = plan_for(model)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Eighths(getattr(layer.self_attn, name)))
    with torch.no_grad():
        expected = model(prompt).logits
        with pytest.warns(PlanWarning, match="has other weights"):
            handle = apply(model, plan, chunking=CUT, kv_host_layers=hosts)
        with handle:
            assert close(model(prompt, past_key_values=handle.new_cache(60)).logits, expected)
    assert cuts == [3, 3, 3]


class Doubled(torch.nn.Module):
    """Looks at a layer's input after the layer, and keeps its output, as steering and probing do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.kept = None

    def forward(self, hidden, **kwargs):
        self.kept = self.layer(hidden, **kwargs)
        return hidden + 2 * (self.kept - hidden)


class Kept(Doubled):
    def forward(self, hidden, **kwargs):
        self.kept = self.layer(hidden, **kwargs)
        return self.kept


@pytest.mark.parametrize("over", ["layer", "forward"])
@pytest.mark.parametrize(("kind", "number"), [(Doubled, 0), (Kept, 1), (Doubled, 2)])
def test_what_is_put_around_a_layer_after_apply_finds_its_input_and_output_unchanged(number, kind, over, cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    plain = copy.deepcopy(model)
    plain.model.layers[number] = wanted = kind(plain.model.layers[number])
    with torch.no_grad(), apply(model, plan_for(model), chunking=CUT):
        expected, layer = plain(prompt).logits, model.model.layers[number]
        around = kind(layer if over == "layer" else layer.forward)
        if over == "layer":
            model.model.layers[number] = around
        else:
            layer.forward = around.forward
        assert close(model(prompt).logits, expected)
        assert close(around.kept, wanted.kept)
    assert cuts == [3, 3]


@pytest.mark.parametrize("where", ["hook", "embedding"])
def test_embeddings_that_somebody_puts_in_are_not_overwritten(where, cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)

    def put_in(module, args, kwargs):
        return args, kwargs | {"input_ids": None, "inputs_embeds": held}

    with torch.no_grad():
        embedding, decoder = model.get_input_embeddings(), model.model
        held, expected = embedding(prompt), model(prompt).logits
        before = held.clone()
        with apply(model, plan_for(model), chunking=CUT):
            if where == "hook":
                decoder.register_forward_pre_hook(put_in, with_kwargs=True)
            else:
                embedding.forward = lambda ids: held
            assert close(model(prompt).logits, expected)
    assert torch.equal(held, before)
    assert cuts == [3, 3, 3]


def test_a_forward_over_ours_that_does_not_call_it_is_refused():
    model, prompt = tiny_model(), random_tokens(1, 50)
    forward = model.model.forward
    with torch.no_grad(), apply(model, plan_for(model), chunking=CUT):
        model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
        with pytest.raises(UsageError):
            model(prompt)


def test_the_layers_own_forward_runs_wherever_something_is_unknown(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    with apply(model, plan_for(model), chunking=CUT):
        expected = model(prompt).logits.detach()  # with gradients on
        with torch.no_grad():
            assert close(model(prompt, something_else=torch.ones(2)).logits, expected)
            model(prompt[:, :20])  # short
            position = model.model.rotary_emb(torch.ones(1), torch.arange(50)[None])
            layer, states = model.model.layers[0], torch.randn(1, 50, 64)
            with pytest.raises(UsageError, match="by itself"):
                layer(states, position_embeddings=position)
    assert cuts == []


def test_autocast_runs_the_layers_own_forward(cuts):
    model, prompt = tiny_model(dtype=torch.bfloat16), random_tokens(1, 50)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(prompt).logits
        assert close(logits_of(model, prompt, CUT), expected)
    assert cuts == []


def test_layers_that_compute_something_else_run_whole(monkeypatch, cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    original = LlamaAttention.forward

    def gated(self, hidden_states, **kwargs):
        out, weights = original(self, hidden_states, **kwargs)
        return out * 1.1, weights

    monkeypatch.setattr(LlamaAttention, "forward", gated)
    check_pieces(model, prompt, cuts, [])


def test_layers_with_a_part_more_run_whole(cuts):
    model, prompt = tiny_model(), random_tokens(1, 50)
    model.model.layers[1].add_module("gate", torch.nn.Identity())
    check_pieces(model, prompt, cuts, [3, 3])


@pytest.mark.parametrize(("batch", "length", "rows"), [(1, 100, 17), (3, 100, 17), (5, 100, 3), (1, 34, 17), (1, 2, 9)])
def test_pieces_cover_every_token_once_in_order(batch, length, rows):
    pieces = list(Chunking(above=0, rows=rows).pieces(batch, length))
    assert [t for piece in pieces for t in range(piece.start, piece.stop)] == list(range(length))
    assert all(batch * (piece.stop - piece.start) <= max(rows, batch) for piece in pieces)
