"""Models whose layers are of several kinds are planned: with a recurrent state, of other sizes, without keys."""

import pytest
from planner_models import loaded_hybrid, made_up_prices, quick_options
from tiny_models import SHARED, random_tokens, tiny_model, tiny_tokenizer

from sparsekv.planner.job import job_of
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.predict import decode_share, dense_step_us
from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = quick_options(lengths=(512,), loss=200.0, refine_rounds=1, verify="small")


@pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2", "nemotron_h"])
def test_a_plan_of_a_hybrid_makes_its_layers_with_attention_sparse(architecture: str) -> None:
    loaded = loaded_hybrid(architecture)
    result = compile_plan(job_of(loaded, OPTIONS))
    plan = result.plan
    assert {group.layer for bucket in plan.prefill.lengths for group in bucket.heads} == {0, 1, 3}
    assert plan.decode.sparse_layers <= {0, 1, 3}
    assert plan.quality.cells
    ask = {"max_new_tokens": 3, "do_sample": False}
    with apply(loaded.model, plan) as handle:
        loaded.model.generate(random_tokens(1, 500), **ask)
        assert handle.stats().prefill_density < 1.0
        assert handle.stats().decode_share < 1.0


KINDS = ["full_attention", "sliding_attention", *["full_attention"] * 3]


def test_a_plan_of_layers_of_several_sizes_some_without_keys_of_their_own() -> None:
    model = tiny_model(SHARED, layers=5, layer_types=KINDS, sliding_window=100)
    loaded = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/sizes"))
    plan = compile_plan(job_of(loaded, OPTIONS.but(offload=True))).plan
    assert {4} <= {group.layer for bucket in plan.prefill.lengths for group in bucket.heads} <= {0, 2, 3, 4}
    assert plan.decode.sparse_layers <= {0, 2, 3, 4}
    assert not plan.decode.offload or not loaded.info.sharing.intersection(plan.decode.offload.layers)
    assert plan.quality.cells
    with apply(loaded.model, plan) as handle:
        loaded.model.generate(random_tokens(1, 500), max_new_tokens=3, do_sample=False)
        assert handle.stats().prefill_density < 1.0
        assert handle.stats().decode_share < 1.0


def test_only_layers_whose_keys_no_other_layer_reads_are_made_to_evict() -> None:
    model = tiny_model(SHARED, layers=5, layer_types=KINDS, sliding_window=100)
    loaded = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/sizes"))
    plan = compile_plan(job_of(loaded, quick_options(lengths=(512,), retain=0.7, verify="none"))).plan
    assert {*plan.evicting} <= {0, 2}
    assert plan.evicting


def test_layers_with_a_recurrent_state_cost_nothing_that_a_plan_could_save() -> None:
    info = loaded_hybrid().info
    assert decode_share((), 1000, info) == 1.0
    assert dense_step_us(made_up_prices(), 1000, info) == pytest.approx(3 * 1.0)


def test_a_model_that_loses_its_state_behind_a_past_is_planned_for_prefill_alone() -> None:
    model = tiny_model("jamba", layers=4)
    loaded = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/jamba"))
    alone = OPTIONS.but(phases=("prefill",))
    for refused in (OPTIONS, alone.but(prefill_chunk=64)):
        with pytest.raises(UnsupportedError, match="plan with --only prefill"):
            job_of(loaded, refused)
    plan = compile_plan(job_of(loaded, alone)).plan
    assert {group.layer for bucket in plan.prefill.lengths for group in bucket.heads} == {1, 3}
    assert plan.quality.cells
    with apply(model, plan) as handle:
        model.generate(random_tokens(1, 500), max_new_tokens=3, do_sample=False)
        assert handle.stats().prefill_density < 1.0
