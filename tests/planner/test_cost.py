"""Device costs: lines fitted to timings, and what is predicted from them."""

import numpy as np
import pytest
import torch
from planner_models import TILE, made_up_cost
from planner_profiles import made_up_length, made_up_profile

from sparsekv.planner.allocate import allocate
from sparsekv.planner.cost import measure_cost
from sparsekv.planner.cost_data import DeviceCost, HeadShape, Line
from sparsekv.planner.crossover import dense_below
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.predict import causal_tiles, predict
from sparsekv.plans.budget import tokens
from sparsekv.plans.decode import DecodeBucket, DecodePlan, Segment
from sparsekv.plans.patterns import AShape
from sparsekv.plans.prefill import HeadGroup, PrefillBucket, PrefillPlan


@pytest.fixture(scope="module")
def measured() -> DeviceCost:
    shape = HeadShape(heads=4, kv_heads=2, head_dim=32)
    return measure_cost(shape, (2048,), device=torch.device("cpu"), dtype=torch.float32, tile=TILE)


def test_everything_costs_something_and_more_costs_no_less(measured: DeviceCost) -> None:
    assert measured.prefill_dense_us(1000) > 0
    assert measured.prefill_dense_us(2000) >= measured.prefill_dense_us(1000)
    assert measured.prefill_sparse_us(1000, 10, {"a_shape": 4}, 2048) > 0
    assert measured.prefill_sparse_us(2000, 10, {"a_shape": 4}, 2048) >= measured.prefill_sparse_us(
        1000, 10, {"a_shape": 4}, 2048
    )
    assert measured.decode_dense_us(4096) >= measured.decode_dense_us(2048) > 0
    assert measured.decode_choose_us(4096) > 0


def test_the_lines_pass_near_what_was_timed(measured: DeviceCost) -> None:
    timed = [timing for timing in measured.timings if timing.what == "dense prefill"]
    for timing in timed:
        assert measured.prefill_dense.at(*timing.features) == pytest.approx(timing.us, rel=0.5)


def test_it_says_where_it_was_measured(measured: DeviceCost) -> None:
    assert measured.backend == "cpu"
    assert measured.dtype == "float32"
    assert measured.device.startswith("cpu")
    assert set(measured.index) == {"a_shape", "vertical_slash", "block_sparse"}


def test_a_made_up_prediction_is_what_paper_and_pencil_give() -> None:
    entry = made_up_length(8192, np.random.default_rng(0))
    profile, cost = made_up_profile(entry), made_up_cost()
    prefill = allocate(profile, cost, PlanOptions(target_density=(0.3,), crossover=False))
    segment = Segment(filter=0, layers=(1, 2), budget=tokens(1000))
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    (found,) = predict(profile, cost, prefill, decode).lengths
    tiles = 3 * 4 * causal_tiles(8192, TILE)
    assert found.prefill.dense_us == pytest.approx(tiles)
    assert found.prefill.sparse_us == pytest.approx(0.3 * tiles, rel=1e-4)
    assert found.prefill.density == pytest.approx(0.3, rel=1e-4)
    assert found.decode.dense_us == pytest.approx(3 * 8.192)
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 2 * 1.0)
    assert found.decode.density == pytest.approx((8192 + 2000) / (3 * 8192), rel=1e-4)


def test_a_dense_length_is_predicted_to_cost_what_dense_costs() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0)))
    plan = PrefillPlan(tile=TILE, lengths=(PrefillBucket(up_to=None, dense=True),))
    (found,) = predict(profile, made_up_cost(), plan, None).lengths
    assert found.prefill.sparse_us == found.prefill.dense_us
    assert found.prefill.density == 1.0


def test_a_length_with_patterns_that_were_not_profiled_is_not_predicted() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0)))
    own = HeadGroup(layer=0, heads=(0,), pattern=AShape(sink=tokens(7), window=tokens(7)))
    plan = PrefillPlan(tile=TILE, lengths=(PrefillBucket(up_to=None, heads=(own,)),))
    assert predict(profile, made_up_cost(), plan, None).lengths == ()


@pytest.mark.parametrize(("pays_from", "found"), [(1, None), (1000, 512), (3000, 2048), (10**9, 4096)])
def test_the_crossover_is_the_longest_length_that_does_not_pay(pays_from: int, found: int | None) -> None:
    assert dense_below(lambda length: length >= pays_from, 8192) == found


def test_a_line_needs_its_own_features() -> None:
    with pytest.raises(ValueError, match="zip"):
        Line(prices=(1.0, 2.0)).at(1.0)
