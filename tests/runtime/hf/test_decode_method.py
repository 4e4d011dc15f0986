"""A decode method that is not ours: it reads other tokens in each layer and step, and only its role knows."""

import copy
import math

import pytest
import torch
from emulated_graphs import emulate
from even_spread import EvenSpread, lower_to, spread
from plans_samples import model_info
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import info_of, plan_for

from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.core.program import Program, count_step, decode
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.memory import MemoryModel, ModelSize, Request
from sparsekv.runtime.stores.store import Resident

ROLE = EvenSpread(6, 4)
SHORT, LONG = 9, 61  # the first attends to everything


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=3, head_dim=16, heads=2, kv_heads=1)


@pytest.fixture
def lowered(monkeypatch):
    lower_to(monkeypatch, ROLE)


def by_hand(q_BH1D, k_BGSD, v_BGSD, lengths, layer, step):
    groups, out = q_BH1D.shape[1] // k_BGSD.shape[1], []
    for row, length in enumerate(lengths):
        seen = torch.zeros(k_BGSD.shape[2], dtype=torch.bool)
        apart = max((length - ROLE.recent) // ROLE.chosen, 1)
        first = (step + layer) % apart
        seen[first : first + apart * ROLE.chosen : apart] = True
        seen[length - ROLE.recent : length] = True
        if length <= ROLE.dense_up_to:
            seen[:length] = True
        k_HSD, v_HSD = (x[row].repeat_interleave(groups, 0) for x in (k_BGSD, v_BGSD))
        scores_H1S = q_BH1D[row] @ k_HSD.mT * 0.25
        out.append(scores_H1S.masked_fill(~seen, -math.inf).softmax(-1) @ v_HSD)
    return torch.stack(out)


def test_each_step_and_layer_attends_to_other_tokens() -> None:
    program = spread(Program.of(None, None, model_info(4, 4, 2)), ROLE)
    state, lengths = DecodeState((), carried=program.carried), (SHORT, LONG)
    source = torch.Generator().manual_seed(0)
    k_BGSD, v_BGSD = torch.randn(2, 2, 2, 64, 16, generator=source)
    source_of_keys = Resident(KeyView(k_BGSD, v_BGSD, torch.tensor(lengths, dtype=torch.int32)))
    for number in range(3):
        state.begin(lengths, torch.device("cpu"))
        for layer in program.layers[1:]:
            q_BH1D = torch.randn(2, 4, 1, 16, generator=source)
            out = decode(layer, q_BH1D, source_of_keys, state, scale=0.25, backend="cpu")
            torch.testing.assert_close(out, by_hand(q_BH1D, k_BGSD, v_BGSD, lengths, layer.layer, number))
    count_step(program, lengths, meter := Meter())
    assert meter.read().decode_tokens_attended == (SHORT + LONG) + 3 * (SHORT + ROLE.chosen + ROLE.recent)


def test_a_failed_step_takes_back_what_the_role_carries() -> None:
    program = spread(Program.of(None, None, model_info(2, 4, 2)), ROLE)
    state = DecodeState((), carried=program.carried)
    state.begin((LONG,), torch.device("cpu"))
    before = state.remembered
    state.carried[1] += 5
    state.restore(1, before)
    assert state.carried[1].tolist() == [0]


def test_captured_steps_are_those_of_single_launches_whatever_cache_comes_next(model, lowered, monkeypatch) -> None:
    prompts, new = [random_tokens(1, length, length) for length in (40, 61)], random_tokens(1, 4, 1)
    plan = plan_for(model)
    with apply(model, plan, backend="cpu"):
        expected = [steps(model, prompt, new)[0][:, -4:] for prompt in prompts]
    emulate(monkeypatch)
    with apply(model, plan, backend="triton") as handle:
        caches = [steps(model, prompt, new[:, :0])[1] for prompt in prompts]
        found = [[], []]
        for token in new.split(1, 1):
            for cache, logits in zip(caches, found, strict=True):
                logits.append(steps(model, token, new[:, :0], cache)[0])
            caches[0] = copy.deepcopy(caches[0])
        assert (handle.steps.replayed, handle.steps.why_not) == (8, "")
    for mine, logits in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.cat(logits, 1), mine, rtol=1e-3, atol=1e-4)


def test_layers_in_host_memory_give_the_same(model, lowered) -> None:
    prompt, new, plan = random_tokens(1, 2600), random_tokens(1, 3, 1), plan_for(model)
    with apply(model, plan, backend="cpu"):
        expected = steps(model, prompt, new)[0][:, -3:]
    with apply(model, plan, backend="cpu", kv_host_layers=(1, 2)) as handle:
        torch.testing.assert_close(steps(model, prompt, new)[0][:, -3:], expected)
        stats = handle.stats()
    assert stats.kv_bytes_host > 0
    assert stats.host_tokens_chosen == 2 * 3 * ROLE.chosen, "a step brings what it attends to"


def test_memory_counts_what_the_role_carries(model, monkeypatch) -> None:
    size, request = ModelSize.of(model, info_of(model)), Request(2600)

    def use():
        memory = MemoryModel(size, None, None, on_cpu=True, host_layers=(1, 2))
        return memory.use(request, memory.permitted)

    dense = use()
    lower_to(monkeypatch, ROLE)
    assert use().kv_device == dense.kv_device + 2 * 8
