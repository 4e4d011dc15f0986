"""Prices of prefill from noisy timings, and fits that cannot be right."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planner_models import made_up_cost
from planner_profiles import made_up_model, options_for

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner import job
from sparsekv.planner.cost import measure
from sparsekv.planner.cost.device_cost import HeadShape, Line, Timing
from sparsekv.planner.cost.fit import fit_errors, fit_line, free_work
from sparsekv.planner.cost.measure import timed_lengths
from sparsekv.planner.cost.prefill_launches import features_of, layers_to_time
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.patterns import AShape, Dense, Pattern, TileShape, VerticalSlash, tokens

TILE, PROCESSORS, PASSES = TileShape(), 132, 2
SHAPES = [(2, 64), (14, 64), (8, 256), (32, 128), (64, 128)]
SEEDS = 200
WHAT = "sparse prefill"


@cache
def index_of(even: Pattern, odd: Pattern, length: int) -> TileIndex:
    """Two heads over random keys."""
    q_12SD, k_12SD = torch.randn(2, 1, 2, length, 8, generator=torch.Generator().manual_seed(length))
    return build_index((even, odd), q_12SD, k_12SD, Chunk.uniform(1, 0, length), TILE, scale=1.0)


def features(even: Pattern, odd: Pattern, length: int, heads: int) -> tuple[float, ...]:
    """Of a launch of so many heads, every other one alike."""
    index = index_of(even, odd, length)
    wider = {
        name: getattr(index, name).repeat_interleave(heads // 2, 1)
        for name in ("tiles_BHTW", "counts_BHT", "columns_BHC", "live_BHTN")
    }
    return features_of(replace(index, dense_H=index.dense_H.repeat_interleave(heads // 2), **wider), PROCESSORS)


def timed_features(heads: int, size: int) -> Iterator[tuple[int, tuple[float, ...]]]:
    for length in timed_lengths(HeadShape(heads=heads, kv_heads=1, head_dim=size), (8192, 16384, 32768), "cuda"):
        for even, odd in layers_to_time(length):
            yield length, features(even, odd, length, heads)


def left_out(heads: int) -> list[tuple[float, ...]]:
    """Layers as plans have them, at lengths in between: patterns mixed, a few heads dense."""
    found = []
    for length in (6144, 12288, 24576):
        lines = VerticalSlash(vertical=tokens(length // 20), slash=tokens(length // 8), max_tiles=tokens(length // 6))
        window = AShape(sink=tokens(128), window=tokens(length // 8))
        found += [features(*pair, length, heads) for pair in ((lines, lines), (lines, window), (lines, Dense()))]
    return found


@pytest.mark.parametrize(("heads", "size"), SHAPES)
def test_prices_and_other_launches_are_found_from_timings_with_a_tenth_of_noise(heads: int, size: int) -> None:
    """Tiles and columns within 15% in 85% of fits, launches that were not timed within 15% in 95%."""
    rng = np.random.default_rng(heads)
    work, others = list(timed_features(heads, size)) * PASSES, np.array(left_out(heads))
    close, launches = [], []
    for _ in range(SEEDS):
        tile = 0.01 * size / 64 * rng.uniform(0.7, 1.5)
        planted = (rng.uniform(5, 20), 2 * tile, tile, rng.uniform(1.5, 3) * tile, rng.uniform(0.8, 1.2) * tile)
        exact = Line(prices=planted)
        timings = [
            Timing(what=WHAT, length=length, features=own, us=exact.at(*own) * max(0.5, rng.normal(1.0, 0.1)))
            for length, own in work
        ]
        found = np.array(fit_line(timings, WHAT).prices)
        close.append((np.abs(found / planted - 1.0) < 0.15)[2:4].all())
        launches += list(np.abs(others @ found / (others @ np.array(planted)) - 1.0) < 0.15)
        assert not free_work([*timings, *dense_timings(tile)])
    assert np.mean(close) >= 0.85
    assert np.mean(launches) >= 0.95


def dense_timings(tile_us: float) -> list[Timing]:
    return [
        Timing(what="dense prefill", length=length, features=(1.0, float(tiles)), us=10.0 + tiles * tile_us)
        for length, tiles in ((1024, 36), (8192, 2080), (32768, 32896))
    ]


def launches(*prices: float, noise: float = 0.0, tiles: tuple[float, ...] = (100.0, 900.0)) -> list[Timing]:
    """Few and much of each work at three lengths, with these prices of tiles, columns and tiles of dense heads."""
    rng, found = np.random.default_rng(0), []
    for scale in (0.01, 0.1, 1.0):
        few, many = tiles[0] * scale, tiles[-1] * scale
        works = ((few, 0.0, 0.0), (many, 0.0, 0.0), (few, 800.0 * scale, 0.0), (few, 0.0, 800.0 * scale))
        for work in works:
            us = (50.0 + sum(price * one for price, one in zip(prices, work, strict=True))) * rng.normal(1.0, noise)
            own = (1.0, 8.0, *work)
            found.append(Timing(what=WHAT, length=round(4096 * scale), features=own, us=max(us, 1.0)))
    return found


@pytest.mark.parametrize("prices", [(1.0, 1.0, 1.0), (0.01, 3.0, 1.0), (1.0, 0.001, 1.0), (0.0, 0.0, 0.0)])
def test_a_fit_that_says_what_was_timed_is_never_refused(prices: tuple[float, ...]) -> None:
    """Work that takes nothing costs nothing, whatever the dense kernel takes for as much."""
    assert not free_work([*launches(*prices), *dense_timings(1.0)])


def test_work_without_a_price_is_found_where_it_takes_a_tenth_of_a_launch() -> None:
    """Short launches that contradict long ones outweigh them in a fit of relative errors."""
    for number, name in enumerate(("tiles", "columns", "tiles of dense heads")):
        prices = [1.0 if other == number else 0.0 for other in range(3)]
        timings = [
            one.model_copy(update={"us": 1e4 / one.us if one.length < 4096 else one.us}) for one in launches(*prices)
        ]
        timings = [one for one in timings if one.length < 4096] * 20 + [one for one in timings if one.length == 4096]
        found = free_work([*timings, *dense_timings(1.0)])
        assert any(line.startswith(f"{name} have a price of") for line in found), (name, found)


def test_work_that_no_launch_has_more_of_is_judged_by_the_dense_kernel() -> None:
    """As timings were that made a model dense: as many tiles in each launch of a length, told from nothing."""
    same = [one for one in launches(0.0, 1.0, 0.0, tiles=(100.0, 100.0)) if one.features[4] == 0.0]
    assert any(line.startswith("tiles have a price of") for line in free_work([*same, *dense_timings(1.0)]))
    assert not free_work([*same, *dense_timings(1e-4)]), "too little work to matter"


@pytest.mark.parametrize(("device", "rounds"), [("cuda", 3), ("cpu", 0)])
def test_work_without_a_price_is_timed_again_and_then_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, rounds: int
) -> None:
    """A CPU's timings beside other programs are what they are: CI plans there."""
    same = [one for one in launches(0.0, 1.0, 0.0, tiles=(100.0, 100.0)) if one.features[4] == 0.0]
    timings, again = [*same, *dense_timings(1.0)], []
    monkeypatch.setattr(measure, "device_name", str)
    prefill = SimpleNamespace(timed=lambda: again.append(1) or iter(timings))
    bench = SimpleNamespace(device=torch.device(device), prefill=lambda _: prefill)
    with pytest.raises(BackendError, match="tiles have a price of") if rounds else nullcontext():
        assert measure._priced(bench, (4096,), timings) == []
    assert len(again) == rounds


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_prices_that_were_measured_are_taken_from_a_file_too(backend: str) -> None:
    same = [one for one in launches(0.0, 1.0, 0.0, tiles=(100.0, 100.0)) if one.features[4] == 0.0]
    cost = made_up_cost(backend=backend, timings=(*same, *dense_timings(1.0)))
    options = options_for(target_density=(0.3,), phases=("prefill",))
    with nullcontext() if backend == "cpu" else pytest.raises(UsageError, match="tiles have a price of"):
        job._check_cost(cost, made_up_model(), options.but(tile=cost.tile))


def test_errors_say_how_far_a_timing_lies_from_the_line_through_the_others() -> None:
    exact = Line(prices=(10.0, 2.0))
    timings = [Timing(what="copy", length=1, features=(1.0, x), us=exact.at(1.0, x)) for x in (1.0, 5.0, 20.0, 50.0)]
    assert fit_errors(timings, "copy").worst_left_out == pytest.approx(0.0, abs=1e-6)
    off = [*timings, Timing(what="copy", length=1, features=(1.0, 80.0), us=2.0 * exact.at(1.0, 80.0))]
    found = fit_errors(off, "copy")
    assert found.timings == 5
    assert found.worst_left_out == pytest.approx(0.5, abs=0.01)
    assert found.residual < found.left_out <= found.worst_left_out
