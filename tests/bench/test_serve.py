"""bench serve, as far as it needs no vLLM: which model is served, and how engines are set."""

import torch
from transformers import AutoConfig

from sparsekv.bench.serve import Load, ServeBench, served_model


def test_random_weights_are_served_from_a_config_that_vllm_can_load_and_that_fits_the_prompts() -> None:
    with served_model("llama3-8b", True, 20_000) as model:
        config = AutoConfig.from_pretrained(model.folder)
        assert config.architectures == ["LlamaForCausalLM"]
        assert (config.max_position_embeddings, model.vocabulary) == (20_000, 128256)
        assert model.note


def test_engines_have_room_for_the_longest_request_and_for_all_that_come_at_once() -> None:
    bench = ServeBench((Load(1000, 10), Load(500, 600, 8, 16)), torch.device("cpu"), torch.float32, step_tokens=2048)
    assert bench.engine["max_model_len"] == 1100
    assert bench.engine["max_num_seqs"] == 8
    assert "gpu_memory_utilization" not in bench.engine
