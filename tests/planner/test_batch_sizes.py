"""How many prompts run at once: bounded by device memory, whatever the length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_indexers import KINDS, planted_model
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekv.planner.evaluation.batches import STEP, bytes_per_token, dense_step, prompts_at_once
from sparsekv.runtime.architecture import record_of

GIB = 1 << 30


def _llama(dtype: torch.dtype, layers: int = 3) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def _on_gpu(monkeypatch: pytest.MonkeyPatch, total: int, vocabulary: int = 50) -> Any:
    """A model that says it is on a GPU with so much memory."""
    model = _llama(torch.bfloat16)
    model.config.vocab_size = vocabulary
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    device = torch.device("cuda", 0)
    own: dict[str, Any] = {"config": model.config, "dtype": model.dtype, "base_model": model.base_model}
    return SimpleNamespace(**own, device=device, parameters=model.parameters)


def test_a_token_costs_its_keys_and_values_and_a_copy_of_them_or_the_widest_layer() -> None:
    cached, widest = 3 * 2 * 2 * 32, 2 * 64 + 2 * 4 * 32 + 3 * 96
    assert widest > cached
    assert bytes_per_token(_llama(torch.float32), 1) == 4 * (cached + widest)
    assert bytes_per_token(_llama(torch.bfloat16, layers=6), 1) == 2 * 2 * (2 * cached)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_model_with_indexers_costs_what_transformers_caches_and_the_scores_of_its_indexer(
    kind: str,
) -> None:
    model: Any = planted_model(kind).to(torch.bfloat16)
    cache = model(torch.arange(100)[None], use_cache=True).past_key_values
    tensors = {id(x): x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)}
    cached = sum(x.nbytes for x in tensors.values()) // 100
    short, long = (bytes_per_token(model, length) for length in (0, 1000))
    widest = 2 * (2 * 64 + 2 * 4 * 24 + 3 * record_of(kind).width_of(model.config))
    assert short == cached + max(cached, widest)
    assert long == cached + widest + 1000 * 16 * 2 * 4


def test_longer_prompts_are_fewer_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _on_gpu(monkeypatch, 8 * GIB)
    counts = [prompts_at_once(model, length) for length in (4096, 65536, 262144, 16 << 20)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > 1 == counts[-1] == prompts_at_once(_llama(torch.float32), 128)  # on a CPU
    assert all(count.bit_count() == 1 for count in counts)
    assert counts[2] * 262144 * bytes_per_token(model, 262144) < 4 * GIB


def test_dense_runs_whole_prompts_unless_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _on_gpu(monkeypatch, GIB)
    longest = int(0.7 * GIB) // bytes_per_token(model, 1)
    assert [dense_step(model, length) for length in (longest, 2 * longest)] == [None, STEP]
    assert dense_step(_llama(torch.float32), 1 << 30) is None  # on a CPU


def test_prompts_take_no_more_than_they_need_of_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much memory runs other things, and a plan that was made there should be made on a smaller one."""
    counts = [prompts_at_once(_on_gpu(monkeypatch, total * GIB), 1 << 20) for total in (16, 80, 640)]
    assert counts[0] < counts[1] == counts[2]
    assert counts[2] * (1 << 20) * bytes_per_token(_llama(torch.bfloat16), 1 << 20) <= 20 * GIB
