"""What was timed of a plan's own buckets decides between dense and sparse, and the same file gives the same plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import bare_job, made_up_cost, quick_options
from planner_profiles import made_up_length, made_up_profile, options_for

from sparsekv.planner.allocate import allocate, candidates, timed_candidates
from sparsekv.planner.bucket_times import time_buckets
from sparsekv.planner.cost.device_cost import BucketTiming, DeviceCost, Line
from sparsekv.planner.cost.predict import SURE_GAIN
from sparsekv.planner.job import job_of
from sparsekv.planner.options import Settled, settle
from sparsekv.planner.plan import compile_once, compile_plan, plan_remarks
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.plans.files import dump_plan
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = options_for(target_density=(0.3,), phases=("prefill",))
FREE_TILES = made_up_cost(prefill_sparse=Line(prices=(100.0, 0.0, 0.0, 0.03, 0.0)))  # the fit that made a model dense


def made_up() -> Profile:
    return made_up_profile(made_up_length(8192, np.random.default_rng(0)))


def with_gain(cost: DeviceCost, gain: float, line_gain: float = 1.0, options: Settled = OPTIONS) -> DeviceCost:
    """The device cost with its candidate timed to gain so much, where the lines come to another gain."""
    (one,) = candidates(made_up(), cost, options)
    timing = BucketTiming(
        length=one.length,
        bucket=one.digest,
        layers=(0, 2),
        dense_us=1000.0 * gain,
        sparse_us=1000.0,
        dense_line_us=900.0 * line_gain,
        sparse_line_us=900.0,
        density=0.3,
    )
    return cost.model_copy(update={"buckets": (*cost.buckets, timing)})


def allocated(cost: DeviceCost, options: Settled = OPTIONS) -> PrefillPlan:
    return allocate(made_up(), cost, options, timed=timed_candidates(made_up(), cost, options))


def true_line_gain(cost: DeviceCost) -> float:
    """What the lines say of the candidate."""
    estimate = compile_once(made_up().model, OPTIONS.but(crossover=False), made_up(), cost).cost.lengths[0].prefill
    return estimate.dense_us / estimate.sparse_us


def test_a_fit_without_a_price_of_tiles_makes_nothing_dense_that_was_timed_to_gain() -> None:
    assert allocated(FREE_TILES).bucket(8192).dense, "by the lines alone"
    timed = with_gain(FREE_TILES, 2.4, true_line_gain(FREE_TILES))
    assert not allocated(timed).bucket(8192).dense


@settings(max_examples=60, deadline=None)
@given(gain=st.floats(0.3, 4.0))
def test_a_length_is_sparse_where_it_was_timed_to_gain_surely_and_nowhere_else(gain: float) -> None:
    timed = with_gain(made_up_cost(), gain, true_line_gain(made_up_cost()))
    if abs(gain / SURE_GAIN - 1.0) > 1e-3:  # lines and sums are rounded
        assert allocated(timed).bucket(8192).dense == (gain < SURE_GAIN)


def test_a_bucket_that_was_not_timed_is_decided_by_the_lines() -> None:
    timed = with_gain(made_up_cost(), 0.5, true_line_gain(made_up_cost()))
    assert allocated(timed).bucket(8192).dense
    other = OPTIONS.but(target_density=(0.35,))
    assert allocated(timed, other) == allocate(made_up(), made_up_cost(), other)
    assert not allocated(timed, other).bucket(8192).dense


def test_what_is_told_of_an_allocation_is_told_of_the_one_that_was_taken() -> None:
    said: list[str] = []
    for gain in (2.4, 0.5):
        timed = with_gain(FREE_TILES, gain, true_line_gain(FREE_TILES))
        found = timed_candidates(made_up(), timed, OPTIONS)
        plan = allocate(made_up(), timed, OPTIONS, said.append, timed=found)
        assert plan.bucket(8192).dense == (gain < 1.0)
    (line,) = said  # of the sparse one
    assert "damage 0 nats" not in line


def test_nothing_is_timed_of_a_length_that_no_price_would_make_sparse() -> None:
    assert candidates(made_up(), made_up_cost(), OPTIONS.but(target_density=(1.0,))) == ()


def test_a_head_of_a_preset_without_a_pattern_at_its_density_is_dense_where_others_are_timed() -> None:
    entry = made_up_length(8192, np.random.default_rng(0), levels=(0.3,))
    first = entry.layers[0]
    wider = tuple(tuple(tiles * (1.5 if head == 0 else 1.0) for head, tiles in enumerate(row)) for row in first.tiles)
    layers = (first.model_copy(update={"tiles": wider}), *entry.layers[1:])
    preset = made_up_profile(entry.model_copy(update={"layers": layers})).model_copy(update={"preset": "minference"})
    dear = made_up_cost(index={name: Line(prices=(1e6, 0.0, 0.0)) for name in made_up_cost().index})
    options = options_for(phases=("prefill",))
    assert allocate(preset, dear, options).bucket(8192).dense
    (one,) = candidates(preset, dear, options)
    assert (one.choice[0] >= 0).tolist()[0] is False
    assert (one.choice >= 0).any()


def test_a_timed_length_is_dense_only_where_it_gains_too_little_for_sure() -> None:
    for gain, is_dense in ((2.0, False), (1.01, True)):
        cost = with_gain(made_up_cost(), gain, true_line_gain(made_up_cost()))
        plan = compile_once(made_up().model, OPTIONS, made_up(), cost)
        assert plan.prefill.bucket(8192).dense == is_dense
        told = plan_remarks(plan, OPTIONS, made_up(), cost)
        assert any("prefill at 8k: dense is faster here" in line for line in told) == is_dense


def test_predictions_of_a_timed_length_are_those_of_the_timing() -> None:
    cost = with_gain(made_up_cost(), 2.0, true_line_gain(made_up_cost()))
    estimate = compile_once(made_up().model, OPTIONS, made_up(), cost).cost.lengths[0].prefill
    assert estimate.dense_us / estimate.sparse_us == pytest.approx(2.0, rel=0.01)


@pytest.fixture(scope="module")
def profiled(loaded: LoadedModel) -> Profile:
    return profile(bare_job(loaded, settle(quick_options(verify_samples=0), 4096, "cpu")))


def test_a_model_is_timed_once_and_a_later_compile_of_the_file_gives_the_same_plan(
    loaded: LoadedModel, profiled: Profile, tmp_path
) -> None:
    options = quick_options(verify_samples=0, crossover=True, decode_loss=1.0)
    path = tmp_path / "cost.json"
    first = compile_plan(job_of(loaded, options, profile=profiled), cost_out=path)
    cost = read_measured(DeviceCost, path)
    assert [one.length for one in cost.buckets] == [1024]
    (timing,) = first.timings
    assert timing == cost.buckets[0]
    assert set(timing.layers) <= {0, 1, 2}
    assert min(timing.dense_us, timing.sparse_us, timing.dense_line_us, timing.sparse_line_us) > 0
    assert 0 < timing.density <= 1
    again = compile_plan(job_of(loaded, options, profile=profiled, cost=cost))
    assert dump_plan(again.plan) == dump_plan(first.plan)
    job = bare_job(loaded, settle(options, 4096, "cpu"))
    assert time_buckets(job, profiled, cost, job.options) is cost, "what was timed is not timed again"
    write_measured(cost.model_copy(update={"buckets": ()}), path)
    assert read_measured(DeviceCost, path).buckets == ()


def test_nothing_is_timed_where_no_timing_decides(loaded: LoadedModel, profiled: Profile) -> None:
    cost = made_up_cost(tile=profiled.tile)
    for options in (quick_options(), quick_options(crossover=True, phases=("decode",))):
        job = bare_job(loaded, settle(options, 4096, "cpu"))
        assert time_buckets(job, profiled, cost, job.options) is cost
