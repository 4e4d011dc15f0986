"""bench serve, as far as it needs no vLLM: which model is served, and by which plan."""

from itertools import pairwise

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import every_head, plan_for
from transformers import AutoConfig

from sparsekv.bench.serve import Load, ServeBench, dense_up_to, dummy_plan, served_model
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, computed_tiles
from sparsekv.plans.patterns import AShape, Dense, TileShape, tokens
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


def test_a_plan_for_dummy_weights_has_its_density_where_all_scores_are_equal_cut_or_not() -> None:
    model = tiny_model()
    info, tile, length = plan_for(model, every_head(model, Dense()), None).model, TileShape(), 32768
    plan, words = dummy_plan(info, (length,), (0.2,), tile)
    assert "density of 0.2 " in words
    patterns = Program.of(plan.prefill, None, info).layers[0].patterns_at(length)[:2]
    torch.manual_seed(1)
    q_BHSD, k_BGSD = 1e-4 * torch.randn(2, 1, 2, length, 16)
    for cuts in ((), (16384,)):
        computed = causal = 0.0
        for first, end in pairwise((0, *cuts, length)):
            chunk = Chunk.uniform(1, first, end)
            part = (q_BHSD[:, :, first:end], k_BGSD[:, :, :end])
            index = build_index(patterns, *part, chunk, tile, scale=0.25, window=None, builder="torch")
            computed += float(computed_tiles(index).sum())
            causal += 2 * chunk.causal_tiles(tile)
        assert computed / causal == pytest.approx(0.2, rel=0.05)
