"""Models with random weights, and plans made by hand: their shape, their density, and what is refused."""

from itertools import pairwise

import pytest
import torch
from tiny_models import tiny_model
from tiny_plans import info_of

from sparsekv.bench import random_model as random_models
from sparsekv.bench.hand_plans import budget_of, decode_by_hand, dummy_plan, hand_plan
from sparsekv.bench.random_model import describe_named, random_model
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, computed_tiles
from sparsekv.plans.brief import decode_share
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.core.program import Program

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def info():
    return info_of(tiny_model(context=1024))


def test_random_weights_have_the_shape_of_the_config_a_seed_and_a_note():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = random_model("tiny-retriever", device=CPU, dtype=torch.bfloat16, longest=65536, layers=2, seed=1)
    assert torch.equal(torch.rand(3), expected)  # of the caller
    assert (made.weights, made.info.layers, made.info.context_length) == ("random", 2, 65536)
    assert (made.model.dtype, made.model.training) == (torch.bfloat16, False)
    for said in ("random", "32k", "2 of 12"):
        assert said in made.note
    same = random_model("tiny-retriever", device=CPU, dtype=torch.bfloat16, longest=512, layers=2, seed=1)
    assert torch.equal(made.model.lm_head.weight, same.model.lm_head.weight)
    with pytest.raises(UsageError, match="12"):
        random_model("tiny-retriever", device=CPU, dtype=torch.float32, longest=512, layers=13)


@pytest.mark.parametrize(
    ("dtype", "cached", "gib", "said"),
    [
        (torch.float32, 0, 25, ["29.9 GiB", "25.0 GiB", "fewer layers"]),
        (torch.bfloat16, 0, 12, ["15.0 GiB", "12.0 GiB", "fewer layers"]),
        (torch.bfloat16, 131072, 25, ["15.0 GiB", "16.0 GiB", "--lengths"]),
    ],
)
def test_weights_that_do_not_fit_in_memory_are_refused_before_they_are_made(monkeypatch, dtype, cached, gib, said):
    monkeypatch.setattr(random_models, "available_on", lambda device: gib << 30)
    with pytest.raises(UsageError) as refused:
        random_model("llama3-8b", device=CPU, dtype=dtype, longest=131072, cached=cached)
    assert [part for part in said if part not in str(refused.value)] == []


def test_a_plan_by_hand_has_a_bucket_a_length_and_a_pattern_for_every_head(info):
    made, words = hand_plan(info, (1024, 512), (0.3, 0.5), TileShape(query=64, key=64))
    assert [bucket.up_to for bucket in made.prefill.lengths] == [512, None]
    for bucket in made.prefill.lengths:
        kinds = {pattern.pattern for layer in range(2) for pattern in bucket.patterns(layer, 4)}
        assert kinds == {"vertical_slash", "a_shape"}
    assert "0.5, 0.3" in words
    with pytest.raises(UsageError):
        hand_plan(info, (512, 1024), (0.5, 0.3, 0.1), TileShape())
    recurrent = info_of(tiny_model("qwen3_5_text", layers=1, layer_types=["linear_attention"]))
    with pytest.raises(UsageError, match="full attention, found none among 1; take more layers"):
        hand_plan(recurrent, (512,), (0.5,), TileShape())


def test_a_plan_for_dummy_weights_has_its_density_where_all_scores_are_equal_cut_or_not(info):
    tile, length = TileShape(), 32768
    plan, _ = dummy_plan(info, (length,), (0.2,), tile)
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


@pytest.mark.parametrize("share", [0.26, 0.39, 0.61])
def test_a_budget_has_a_step_read_the_share_that_is_asked_for(share):
    info, length = describe_named("llama3-8b", random_weights=True), 32768
    plan, _ = decode_by_hand(info, length, budget_of(info, length, share))
    assert decode_share(plan, length).computed == pytest.approx(share, abs=0.005)


def test_filters_by_hand_choose_for_all_layers_up_to_the_next():
    info = describe_named("llama3-8b", random_weights=True)
    plan, words = decode_by_hand(info, 1 << 17)
    (bucket,) = plan.decode.lengths
    layers = {one.filter: one.layers for one in bucket.segments}
    assert layers == {2: tuple(range(3, 8)), 8: tuple(range(9, 18)), 18: tuple(range(19, 32))}
    assert {(one.budget.fraction, one.sink, one.recent) for one in bucket.segments} == {(0.1, 4, 128)}
    assert all(str(number) in words for number in (0.1, 18))
