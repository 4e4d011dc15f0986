"""Beam search, and other caches whose rows are picked anew."""

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, plan_for, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.stores.device import DeviceStore

BEAMS = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
WINDOWED = decode_plan(segment(0, (1, 2), 8, selector="uniform", window=3))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5_text"])
def test_beams_of_a_plan_that_keeps_everything_are_those_of_transformers(architecture):
    model, prompt = tiny_model(architecture), random_tokens(2, 40)
    options = BEAMS | {"num_return_sequences": 2, "length_penalty": 0.3}
    expected = model.generate(prompt, **options)
    layers = (2,) if architecture == "qwen3_5_text" else (1, 2)
    with apply(model, plan_for(model, None, decode_plan(segment(layers[0] - 1 or 1, layers, EVERYTHING)))):
        assert torch.equal(model.generate(prompt, **options), expected)


def test_beams_of_a_padded_batch_are_those_of_each_row(model):
    lengths = (30, 55)
    ids, mask = torch.zeros(2, 55, dtype=torch.long), torch.zeros(2, 55, dtype=torch.long)
    prompts = [random_tokens(1, length, length) for length in lengths]
    for row, prompt in enumerate(prompts):
        ids[row, 55 - lengths[row] :], mask[row, 55 - lengths[row] :] = prompt[0], 1
    with apply(model, plan_for(model, None, WINDOWED)):
        found = model.generate(ids, attention_mask=mask, **BEAMS)
        for row, prompt in enumerate(prompts):
            assert torch.equal(found[row, 55:], model.generate(prompt, **BEAMS)[0, lengths[row] :])


def test_captured_steps_take_beams(monkeypatch):
    emulate(monkeypatch)
    model, prompt = tiny_model(layers=2, head_dim=16, heads=2, kv_heads=1), random_tokens(1, 40)
    plan = plan_for(model, None, decode_plan(segment(0, (1,), 12, sink=4, recent=10)))
    with apply(model, plan, backend="triton") as handle:
        found = model.generate(prompt, **BEAMS)
        assert (handle.steps.replayed, handle.steps.why_not) == (7, "")
    with apply(model, plan, backend="cpu"):
        assert torch.equal(found, model.generate(prompt, **BEAMS))


def test_rows_that_are_repeated_and_left_out_go_on_alone(model):
    prompts, token = random_tokens(2, 40), random_tokens(1, 1, 7)
    with torch.no_grad(), apply(model, plan_for(model, None, WINDOWED)):
        cache = model(prompts).past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        found = model(token.expand(3, 1), past_key_values=cache).logits
        for row, source in enumerate((1, 0, 0)):
            alone = model(prompts[source : source + 1]).past_key_values
            expected = model(token, past_key_values=alone).logits[0]
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_beams_over_layers_in_host_memory_are_refused_before_anything_runs(model):
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 8), offload=(1,)))
    ran = model.get_input_embeddings().register_forward_pre_hook(lambda *_: pytest.fail("something ran"))
    with apply(model, plan), ran, pytest.raises(UnsupportedError, match="offload='never'"):
        model.generate(random_tokens(1, 6), num_beams=2)


@pytest.mark.parametrize("seed", range(8))
def test_a_store_under_random_operations_holds_what_lists_hold(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    store, rows, clock = DeviceStore(), [[] for _ in range(4)], 0
    for _ in range(200):
        operation = number(0, 5)
        if operation == 0:
            chosen = [number(0, 4) for _ in range(4)]
            store.select(chosen)
            rows = [list(rows[source]) for source in chosen]
        elif operation == 1 and rows[0]:
            rows = [row[: number(1, len(row) + 1)] for row in rows]
            store.truncate([len(row) for row in rows])
        else:
            new = torch.arange(clock, clock + 4 * (count := number(1, 4))).float()
            clock += len(new)
            k_BGSD = new.view(4, 1, count, 1).expand(4, 2, count, 3)
            store.append(k_BGSD, -k_BGSD)
            for row, more in zip(rows, new.view(4, count).tolist(), strict=True):
                row += more
        assert store.lengths == (tuple(map(len, rows)) if any(rows) else ())
        for b, row in enumerate(rows if any(rows) else ()):
            for sign, x_BGCD in zip((1, -1), store.tensors, strict=True):
                assert (x_BGCD[b, :, : len(row)] == sign * torch.tensor(row)[:, None]).all()
