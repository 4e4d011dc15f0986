"""Prices of a host that cuts prompts, and plans for it."""

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_models import made_up_cost
from planner_profiles import made_up_length, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.allocate import allocate
from sparsekv.planner.cost.device_cost import Chunks, DeviceCost, Line
from sparsekv.planner.cost.predict import causal_tiles, predict
from sparsekv.planner.cost.remarks import plan_remarks
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import check_plannable, compile_once, for_host
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Target

NO_DECODE = {"decode_dense": None, "decode_sparse": None, "decode_choose": None}


def engine_cost(chunk: int, **changes) -> DeviceCost:
    """The made-up device in vLLM's engine: it has no prices of decode."""
    return made_up_cost(host="vllm", chunk=chunk, prefill_copy=Line(prices=(0.0, 0.0)), **NO_DECODE, **changes)


@given(length=st.integers(1, 5000), most=st.integers(1, 6000))
def test_chunks_are_those_that_a_prompt_is_cut_into(length: int, most: int) -> None:
    ends = [*range(most, length, most), length]
    rows = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    found = Chunks.of(length, most)
    assert (found.count, found.first, found.keys) == (len(ends), ends[0], sum(ends))
    assert found.pairs == sum(row * end for row, end in zip(rows, ends, strict=True))
    assert Chunks.of(length, None) == Chunks.of(length, length)


def test_every_chunk_pays_for_its_launches_and_all_but_the_first_for_the_copy_of_their_keys() -> None:
    lines = {"prefill_dense": Line(prices=(10.0, 1.0)), "prefill_sparse": Line(prices=(30.0, 0.0, 1.0, 1.0))}
    cost = engine_cost(1000, index={"a_shape": Line(prices=(100.0, 1.0, 0.001))}, **lines)
    cost = cost.model_copy(update={"prefill_copy": Line(prices=(7.0, 0.5))})
    assert cost.prefill_dense_us(500, 2500) == 3 * 10 + 500
    index = 3 * 100 + 2 * (1000 + 2000 + 2500) + 2 * 0.001 * (1000 * 1000 + 1000 * 2000 + 500 * 2500)
    assert cost.index_us("a_shape", 2, 2500) == pytest.approx(index)
    copy = 2 * 7 + 0.5 * (2000 + 2500)
    assert cost.prefill_sparse_us(200, 0, {"a_shape": 2}, 2500) == pytest.approx(index + copy + 3 * 30 + 200)


def test_a_device_cost_lacks_prices_of_decode_for_vllm_alone() -> None:
    DeviceCost.model_validate(engine_cost(2048).model_dump())
    with pytest.raises(ValueError, match="prices of decode_dense, found none"):
        DeviceCost.model_validate(made_up_cost(**NO_DECODE).model_dump())


def test_what_copies_cost_moves_the_crossover() -> None:
    lengths = [made_up_length(length, np.random.default_rng(0), levels=(0.3,)) for length in (2048, 8192)]
    profile, options = made_up_profile(*lengths), options_for(target_density=(0.3, 0.3))
    saved = 0.5 * 4 * causal_tiles(8192, profile.tile)  # of the four heads of a layer, at most
    keys = Chunks.of(8192, 2048).keys
    cheap, dear = (
        allocate(profile, engine_cost(2048).model_copy(update={"prefill_copy": Line(prices=(0.0, us / keys))}), options)
        for us in (0.0, 3 * saved)
    )
    assert not cheap.bucket(8192).dense
    assert dear.bucket(8192).dense
    assert not dear.bucket(2048).dense, "a prompt of one chunk copies nothing"


def test_a_plan_for_vllm_names_it_and_its_chunks_and_has_no_decode_phase() -> None:
    reuse = made_up_reuse(np.eye(3))
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0)).model_copy(update={"reuse": reuse}))
    cost = engine_cost(2048)
    options = for_host(options_for(phases=("prefill", "decode"), target_density=(0.3,)), cost)
    plan = compile_once(profile.model, options, profile, cost)
    expected = Target(device=cost.device, host="vllm", backend="cpu", dtype="float32", chunk=2048)
    assert plan.targets == (expected,)
    assert plan.decode is None
    assert plan.cost == predict(profile, cost, plan.prefill, None)
    assert any("steps of 2048 tokens" in remark for remark in plan_remarks(plan, options, profile, cost))


def test_decode_alone_and_options_of_decode_are_refused_for_vllm() -> None:
    with pytest.raises(UsageError, match="leave --only decode out"):
        for_host(PlanOptions(host="vllm", phases=("decode",)), None)
    with pytest.raises(UsageError, match="--decode-loss or --host vllm"):
        for_host(PlanOptions(decode_loss=0.1), engine_cost(2048))
    assert for_host(PlanOptions(host="vllm"), None).phases == ("prefill",)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_is_refused_before_weights_are_read() -> None:
    profile = made_up_profile(made_up_length(4096, np.random.default_rng(0)))
    with pytest.raises(UsageError, match="expected vLLM, which is timed here, found none installed"):
        check_plannable(profile.model, PlanOptions(host="vllm"), "cpu", profile, None)
    check_plannable(profile.model, PlanOptions(), "cpu", profile, engine_cost(2048))
