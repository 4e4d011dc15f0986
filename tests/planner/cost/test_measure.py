"""Device costs: lines fitted to timings, and what is predicted from them."""

import numpy as np
import pytest
import torch
from planner_models import TILE, made_up_cost
from planner_profiles import made_up_length, made_up_profile, options_for

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.keys import full_view
from sparsekv.planner.allocate import allocate
from sparsekv.planner.cost.device_cost import DeviceCost, HeadShape, LayerWork, Line
from sparsekv.planner.cost.fit import fit_line
from sparsekv.planner.cost.measure import (
    Bench,
    OffloadedSteps,
    copies_to_read_cold,
    measure_cost,
    timed_lengths,
)
from sparsekv.planner.cost.predict import causal_tiles, predict
from sparsekv.planner.cost.timed_host import Host
from sparsekv.planner.options import PRESET_FAMILIES
from sparsekv.planner.profile.profile_data import StepReads
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan, Segment
from sparsekv.runtime.stores.pinned import HostMemory

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if CUDA else (torch.device("cpu"), torch.float32)
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def measured() -> DeviceCost:
    device, every = torch.device("cpu"), PRESET_FAMILIES
    return measure_cost(SHAPE, (2048,), device=device, dtype=torch.float32, tile=TILE, families=every, offload=True)


def test_everything_costs_something_and_more_costs_no_less(measured: DeviceCost) -> None:
    assert measured.prefill_dense.us(1000) > 0
    assert measured.prefill_dense.us(2000) >= measured.prefill_dense.us(1000)
    less, more = (LayerWork(tiles, 10.0, 0.0, 30.0, {"a_shape": 4}) for tiles in (1000.0, 2000.0))
    assert measured.prefill_sparse_us(more, 2048) >= measured.prefill_sparse_us(less, 2048) > 0
    assert measured.decode_dense.us(4096) >= measured.decode_dense.us(2048) > 0
    assert measured.decode_choose.us(4096) > 0
    assert set(measured.index) == set(PRESET_FAMILIES)


@pytest.mark.parametrize(
    ("what", "prices", "unseen"),
    [
        ("dense prefill", (50.0, 3.0), (1.0, 1e6)),
        ("sparse prefill", (80.0, 2.0, 3.0, 5.0, 1.0), (1.0, 4096.0, 1e5, 1e4, 1e5)),
        ("index a_shape", (200.0, 1e-3, 0.0), (1.0, 65536.0, 1e9)),
        ("index block_sparse", (200.0, 1e-3, 1e-6), (1.0, 65536.0, 1e9)),
        ("sparse decode", (9.0, 0.01), (1.0, 1e5)),
        ("host decode", (9.0, 0.01, 0.1), (1.0, 1e5, 9e4)),
        ("check", (9.0, 0.01, 0.001), (1.0, 1e5, 7e5)),
        ("product", (7.0, 1e-3, 1e-6), (1.0, 1e9, 7e9)),
    ],
)
def test_what_is_timed_tells_every_price_apart(measured: DeviceCost, what: str, prices, unseen) -> None:
    """A line through exact timings is that very line, far beyond the timed lengths too."""
    exact = Line(prices=prices)
    timed = [timing for timing in measured.timings if timing.what == what]
    own = [timing.model_copy(update={"us": exact.at(*timing.features)}) for timing in timed]
    assert len(own) >= len(prices)
    assert fit_line(own, what).at(*unseen) == pytest.approx(exact.at(*unseen), rel=0.01)


def test_rows_in_host_memory_are_timed_with_many_and_with_few_of_them_there(measured: DeviceCost) -> None:
    timed = [timing.features for timing in measured.timings if timing.what == "host decode"]
    assert len(timed) == 12
    assert all(0 <= cold < chosen for _, chosen, cold in timed)
    assert all(many > few for (_, _, many), (_, _, few) in zip(timed[::2], timed[1::2], strict=True))
    assert measured.decode_host.us(200, 100.0) > 0
    assert measured.decode_choose_alone.us(1000) > 0
    assert measured.decode_host.us(200, 200.0) >= measured.decode_host.us(200, 100.0)


def test_what_is_timed_of_captured_steps_from_host_memory_is_attention_over_the_choice() -> None:
    pytest.importorskip("triton")
    draws, backend = torch.Generator().manual_seed(0), "triton"
    k, v = torch.randn(2, 1, 2, 200, 16, generator=draws).to(DEVICE, DTYPE)
    q, keys = torch.randn(1, 4, 1, 16, generator=draws).to(DEVICE, DTYPE), full_view(k, v)
    counts_1 = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    first, other = (
        Selection(torch.arange(at, at + 10, dtype=torch.int32, device=DEVICE)[None, None], counts_1, 0, 2)
        for at in (20, 25)
    )
    steps = OffloadedSteps(first, keys, HostMemory())
    for selection in (first, other):
        steps.reads.reset()
        expected = decode_attention(q, keys, selection, scale=0.25, backend=backend).out_BHSD
        for found in steps.run(selection, q, scale=0.25, backend=backend):
            torch.testing.assert_close(found, expected)
    reads = steps.reads.collect()
    assert (reads.chosen / reads.steps, reads.fetched / reads.steps) == (10, 5)


@pytest.mark.gpu
def test_on_a_gpu_rows_in_host_memory_are_timed_as_captured_steps_fetch_them() -> None:
    shape, length = HeadShape(heads=4, kv_heads=2, head_dim=64), 1 << 18
    bench = Bench(shape, DEVICE, DTYPE, TILE, (), "triton", True, Host())  # without indices
    timed = [timing for timing in bench.run(length) if timing.what == "host decode"]
    works = [timing.features for timing in timed]
    assert [attended for _, attended, _ in works] == [16386, 16386, 32768, 32768]  # as many as there may be slots
    assert [fetched / attended for _, attended, fetched in works] == pytest.approx([1, 0.125] * 2, abs=0.001)
    assert all(timing.us > 0 for timing in timed)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_on_a_gpu_products_and_checks_of_drafts_are_timed_as_captured_steps_run_them(backend: str) -> None:
    shape = HeadShape(heads=32, kv_heads=8, head_dim=128)
    found = measure_cost(shape, (8192,), device=DEVICE, dtype=DTYPE, tile=TileShape(), families=(), backend=backend)
    assert found.products is not None
    assert found.decode_check is not None
    assert found.products.at(1, 2e9, 2e9) > found.products.at(1, 1e9, 1e9) > 0
    assert found.decode_check.us(1e5, 7e5) > found.decode_check.us(1e4, 7e4) > 0


@pytest.mark.parametrize(
    ("heads", "lengths", "device", "timed"),
    [
        (4, (4096, 8192), "cpu", (512, 1536, 4608)),
        (4, (1024,), "cpu", (512, 768, 1024)),
        (256, (131072,), "cpu", (512, 768, 1024)),
        (32, (4096, 131072), "cuda", (512, 2048, 4096, 8192, 32768, 131072)),
        (14, (10000, 20000), "cuda", (512, 1792, 5888, 10000, 19968, 20000)),
        (32, (1 << 20,), "cuda", (512, 2176, 8960, 37376, 156160)),
    ],
)
def test_short_lengths_are_timed_for_launches_and_long_ones_for_work(heads, lengths, device, timed) -> None:
    shape = HeadShape(heads=heads, kv_heads=2, head_dim=64 if heads < 32 else 128)
    assert timed_lengths(shape, lengths, device) == timed


@pytest.mark.parametrize(
    ("read", "cache", "copies"),
    [(1 << 30, 50 << 20, 1), (100 << 20, 50 << 20, 1), (33 << 20, 50 << 20, 4), (1 << 20, 50 << 20, 16), (0, 1, 2)],
)
def test_steps_are_timed_on_more_keys_than_the_cache_of_the_device_holds(read: int, cache: int, copies: int) -> None:
    assert copies_to_read_cold(read, cache) == copies
    assert copies == 16 or copies * read >= cache or not read


def test_the_first_head_of_a_family_pays_its_launch_and_every_head_its_work() -> None:
    cost = made_up_cost(index={"a_shape": Line(prices=(100.0, 0.5, 0.001))})
    assert cost.index_us("a_shape", 0, 10) == 100.0
    assert cost.index_us("a_shape", 3, 10) == pytest.approx(100.0 + 3 * 5.1)


def test_a_made_up_prediction_is_what_paper_and_pencil_give() -> None:
    entry = made_up_length(8192, np.random.default_rng(0), levels=(0.3,))
    profile, cost = made_up_profile(entry), made_up_cost()
    prefill = allocate(profile, cost, options_for(target_density=(0.3,), crossover=False))
    segment = Segment(filter=0, layers=(1, 2), budget=DecodeBudget(tokens=1000), sink=4, recent=128)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    (found,) = predict(profile, cost, prefill, decode).lengths
    tiles = 3 * 4 * causal_tiles(8192, TILE)
    assert found.prefill.dense_us == pytest.approx(tiles)
    assert found.prefill.sparse_us == pytest.approx(0.3 * tiles, rel=1e-4)
    assert found.prefill.density == pytest.approx(0.3, rel=1e-4)
    assert found.decode.dense_us == pytest.approx(3 * 8.192)
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 2 * 1.132)
    assert found.decode.density == pytest.approx((8192 + 2 * 1132) / (3 * 8192), rel=1e-4)


DRAFT_PRICES = {"decode_check": Line(prices=(2.0, 0.001, 0.0001)), "products": Line(prices=(3.0, 1e-3, 1e-5))}
READS = StepReads(matrices=22, parameters=1e6, experts=8e6, share=0.25)


def drafting(**changes) -> DecodePlan:
    segment = Segment(filter=0, layers=(1, 2), budget=DecodeBudget(tokens=1000), sink=4, recent=128, **changes)
    return DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))


def test_a_step_of_the_model_is_its_attention_and_the_weights_that_its_tokens_read() -> None:
    """Seven tokens go to more experts than one."""
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0))).model_copy(update={"reads": READS})
    (found,) = predict(profile, made_up_cost(**DRAFT_PRICES), None, drafting()).lengths
    rest, seven = 22 * 3 + 1e-3 * 3e6 + 1e-5 * 3e6, 22 * 3 + 1e-3 * (1e6 + 8e6 * (1 - 0.75**7)) + 1e-5 * 7 * 3e6
    assert found.step.dense_us == pytest.approx(rest + found.decode.dense_us, rel=1e-4)
    assert found.step.sparse_us == pytest.approx(rest + found.decode.sparse_us, rel=1e-4)
    check_us = seven + 3 * (2 + 0.001 * 8192 + 0.0001 * 7 * 8192)
    assert found.step.token_us == pytest.approx((check_us - found.step.dense_us) / 6, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "cost", "reads"),
    [
        (drafting(), {"decode_check": DRAFT_PRICES["decode_check"]}, READS),
        (drafting(), DRAFT_PRICES, None),
        (drafting(selector="uniform", window=8), DRAFT_PRICES, READS),
        (DecodePlan(lengths=(DecodeBucket(up_to=None, dense=True),)), DRAFT_PRICES, READS),
    ],
    ids=["no prices", "no weights", "looks back", "dense"],
)
def test_steps_are_not_predicted_where_nothing_can_be_drafted_or_something_has_no_price(plan, cost, reads) -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0))).model_copy(update={"reads": reads})
    (found,) = predict(profile, made_up_cost(**cost), None, plan).lengths
    assert found.decode
    assert found.step is None


def test_a_length_that_sinks_chosen_and_recent_tokens_cover_costs_what_dense_costs() -> None:
    profile, cost = made_up_profile(made_up_length(8192, np.random.default_rng(0))), made_up_cost()
    segment = Segment(filter=0, layers=(1, 2), budget=DecodeBudget(tokens=8060), sink=4, recent=128)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    (found,) = predict(profile, cost, None, decode).lengths
    assert found.decode.sparse_us == found.decode.dense_us
    assert found.decode.density == 1.0


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
