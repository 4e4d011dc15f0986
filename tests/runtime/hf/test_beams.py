"""Beam search, and other caches whose rows are picked anew."""

import copy
from dataclasses import replace

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, plan_for, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.stores.device import DeviceStore

BEAMS = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_5_text"])
def test_beams_of_a_plan_that_keeps_everything_are_those_of_transformers(architecture):
    model, prompt = tiny_model(architecture), random_tokens(2, 40)
    options = BEAMS | {"num_return_sequences": 2, "length_penalty": 0.3}
    expected = model.generate(prompt, **options)
    layers = (2,) if architecture == "qwen3_5_text" else (1, 2)
    with apply(model, plan_for(model, None, decode_plan(segment(layers[0] - 1 or 1, layers, EVERYTHING)))):
        assert torch.equal(model.generate(prompt, **options), expected)


def test_captured_steps_take_beams(monkeypatch):
    emulate(monkeypatch)
    model, prompt = tiny_model(layers=2, head_dim=16, heads=2, kv_heads=1), random_tokens(1, 40)
    plan = plan_for(model, None, decode_plan(segment(0, (1,), 12, sink=4, recent=10)))
    with apply(model, plan, backend="triton") as handle:
        found = model.generate(prompt, **BEAMS)
        assert (handle.steps.replayed, handle.steps.why_not) == (7, "")
    with apply(model, plan, backend="cpu"):
        assert torch.equal(found, model.generate(prompt, **BEAMS))


IN_HOST_MEMORY = "in host memory.* offload='never'"


def test_where_the_layers_of_a_cache_are_counts_and_not_where_those_of_the_next_one_will_be(model):
    ids, token = random_tokens(2, 30), random_tokens(2, 1)
    with torch.no_grad(), apply(model, plan_for(model), kv_host_layers=(1,)) as handle:
        in_host_memory, placed = model(ids).past_key_values, handle._engine.placement
        handle._engine.placement = replace(placed, layers=frozenset())
        beams = {"num_beams": 2, "max_new_tokens": 2, "do_sample": False}
        longer = torch.cat((ids, token), 1)
        for cache in (in_host_memory, copy.deepcopy(in_host_memory)):
            with pytest.raises(UnsupportedError, match=IN_HOST_MEMORY):
                model.generate(longer, past_key_values=cache, **beams)
            with pytest.raises(UnsupportedError, match=IN_HOST_MEMORY):
                cache.batch_repeat_interleave(2)
        on_device = model(ids).past_key_values
        handle._engine.placement = placed
        on_device.batch_repeat_interleave(2)
        handle._engine.placement = replace(placed, layers=frozenset())
        in_host_memory.reset()
        model(ids, past_key_values=in_host_memory)
        in_host_memory.batch_select_indices(torch.tensor([1]))


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
