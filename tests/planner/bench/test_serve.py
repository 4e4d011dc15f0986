"""bench serve, as far as it needs no vLLM: which model is served, and by which plan."""

import torch
from tiny_models import tiny_model
from tiny_plans import every_head, plan_for
from transformers import AutoConfig

from sparsekv.planner.bench.serve_bench import Load, ServeBench, dense_up_to, served_model
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.plan_checks import check_plan


def test_random_weights_are_served_from_a_config_that_vllm_can_load_and_that_fits_the_prompts() -> None:
    with served_model("llama3-8b", True, 20_000) as model:
        config = AutoConfig.from_pretrained(model.folder)
        assert config.architectures == ["LlamaForCausalLM"]
        assert (config.max_position_embeddings, model.vocabulary) == (20_000, 128256)
        assert "context stretched" in model.note


def test_a_plan_made_by_hand_is_dense_up_to_the_crossover_and_as_it_was_behind_it() -> None:
    model = tiny_model()
    plan = plan_for(model, every_head(model, AShape(sink=tokens(64), window=tokens(64))), None)
    later = dense_up_to(plan, 700)
    check_plan(later, plan.model, False)
    before, layer = (Program.of(one.prefill, None, plan.model).layers[0] for one in (plan, later))
    assert not layer.patterns_at(700)
    assert layer.patterns_at(701) == before.patterns_at(701) != ()


def test_engines_have_room_for_the_longest_request_and_for_all_that_come_at_once() -> None:
    bench = ServeBench((Load(1000, 10), Load(500, 600, 8, 16)), torch.device("cpu"), torch.float32, step_tokens=2048)
    assert bench.engine["max_model_len"] == 1100
    assert bench.engine["max_num_seqs"] == 8
    assert "gpu_memory_utilization" not in bench.engine
