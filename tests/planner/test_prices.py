"""Tables of prices: what is read off between their points, and of other heads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import made_up_prices
from planner_profiles import made_up_length, made_up_profile, options_for

from sparsekv.planner.allocate import allocate
from sparsekv.planner.options import FAMILIES
from sparsekv.planner.predict import ScoreTables, choice_of, layer_times, step_us
from sparsekv.planner.prices import HeadShape, Prices, Table, shipped_prices
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.records import read_measured
from sparsekv.plans.phases import DecodeBudget, PrefillPlan, Segment


@st.composite
def tables(draw: st.DrawFn) -> Table:
    def points(low: float, high: float) -> list[float]:
        return sorted(draw(st.sets(st.floats(low, high).map(lambda x: float(f"{x:.3g}")), min_size=1, max_size=5)))

    across, along = points(0.01, 1.0), sorted({round(point) for point in points(64, 1e6)})
    us = st.lists(st.floats(1e-3, 1e5), min_size=len(along), max_size=len(along))
    return Table.measured(across, along, draw(st.lists(us, min_size=len(across), max_size=len(across))))


SHARES, LENGTHS = st.floats(0.0, 2.0), st.floats(1.0, 1e7)


@given(table=tables(), growth=st.sampled_from((1.0, 2.0)))
def test_a_measured_point_has_its_time(table: Table, growth: float) -> None:
    for share, row in zip(table.across, table.us, strict=True):
        for length, us in zip(table.along, row, strict=True):
            assert table.at(length, share, growth) == pytest.approx(us, rel=1e-9)


@given(tables(), st.tuples(SHARES, SHARES), st.tuples(LENGTHS, LENGTHS), st.sampled_from((1.0, 2.0)))
def test_more_of_anything_never_takes_less(table: Table, shares: Any, lengths: Any, growth: float) -> None:
    less, more = (table.at(*point, growth) for point in zip(sorted(lengths), sorted(shares), strict=True))
    assert less <= more * (1 + 1e-9)
    assert table.at(1.0, 0.0) == pytest.approx(table.us[0][0])


@given(tables(), tables(), st.floats(1.0, 1000.0))
def test_beyond_the_points_times_grow_with_work_and_keep_their_ratios(one: Table, other: Table, times: float) -> None:
    for growth in (1.0, 2.0):
        assert one.at(one.along[-1] * times, 1.0, growth) == pytest.approx(one.at(one.along[-1], 1.0) * times**growth)
    far = 1e6 * times
    ratios = [one.at(length, 1.0) / other.at(length, 1.0) for length in (1e6, far)]
    assert ratios[0] == pytest.approx(ratios[1])


def test_a_time_that_falls_is_taken_for_noise() -> None:
    table = Table.measured((0.1, 0.5), (512, 1024), [[3.0, 2.0], [1.0, 7.0]])
    assert table.us == ((3.0, 3.0), (3.0, 7.0))


@settings(max_examples=30, deadline=None)
@given(st.integers(64, 100_000), st.integers(0, 2000))
def test_more_tokens_and_larger_budgets_never_cost_less(length: int, more: int) -> None:
    prices = shipped_prices(HeadShape(heads=4, kv_heads=2, head_dim=32))
    shares = np.array([0.0, 0.03, 0.2, 1.0])
    for read in (prices.dense_us, lambda n: prices.index_us("vertical_slash", n)[1]):
        assert read(length) <= read(length + more) * (1 + 1e-9)
    heads, denser = prices.heads_us(shares, 0 * shares, length), prices.heads_us(shares, shares / 5, length + more)
    assert (heads <= denser + 1e-9).all()
    assert (np.diff(heads) >= 0).all()
    model = made_up_profile(made_up_length(4096, np.random.default_rng(0))).model
    budgets = (DecodeBudget(tokens=tokens) for tokens in (length, length + more))
    steps = (Segment(filter=0, layers=(1, 2), budget=budget, sink=4, recent=128) for budget in budgets)
    small, large = (step_us([one], prices, 200_000, model) for one in steps)
    assert small <= large * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "like"), [((4, 2, 64), (9, 3, 64)), ((32, 8, 128), (32, 8, 128)), ((28, 4, 128), (32, 8, 128))]
)
def test_the_prices_that_ship_are_scaled_from_the_heads_most_like_these(shape, like) -> None:
    names = ("heads", "kv_heads", "head_dim")
    own, measured = (HeadShape(**dict(zip(names, one, strict=True))) for one in (shape, like))
    found, known = shipped_prices(own), shipped_prices(measured)
    assert (found.shape, found.device) == (own, "NVIDIA H200")
    ratio = shape[0] * shape[2] / (like[0] * like[2])
    assert found.dense_us(32768) == pytest.approx(ratio * known.dense_us(32768), rel=1e-4)
    decode = shape[1] * shape[2] / (like[1] * like[2])
    assert found.step.dense.at(32768) == pytest.approx(decode * known.step.dense.at(32768), rel=1e-4)


PROFILE = read_measured(Profile, Path(__file__).parents[1] / "data" / "profile.json")
INDEXED = ("a_shape", "vertical_slash", "block_sparse")


def tilted(prices: Prices, scale: float, work: float, index: Sequence[float]) -> Prices:
    """The prices of a device that takes `scale` times as long, and up to `work` times that where much is computed; each
    index by a factor of its own."""

    def other(table: Table, tilt: float) -> Table:
        factors = scale * np.linspace(1.0, tilt, len(table.across))[:, None]
        return Table.measured(table.across, table.along, np.array(table.us) * factors)

    tables = {name: other(getattr(prices, name), work) for name in ("tiles", "columns")}
    indices = {name: prices.index[name].scaled(scale * factor) for name, factor in zip(INDEXED, index, strict=True)}
    return prices.model_copy(update={**tables, "dense": prices.dense.scaled(scale), "index": indices})


def planned(prices: Prices, **changes: Any) -> PrefillPlan:
    return allocate(PROFILE, prices, options_for(lengths=(2048, 4096), **changes))


def share_and_time(prices: Prices, plan: PrefillPlan, entry: LengthProfile) -> tuple[float, float]:
    tables = ScoreTables.of(entry)
    choice = choice_of(plan.bucket(entry.length), tables)
    return tables.density(choice), float(layer_times(prices, tables, choice)[1].sum())


@settings(max_examples=20, deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.floats(1.0, 2.0),
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.sampled_from((1e-5, 1e-3, 0.01, 0.03)),
    st.sampled_from((FAMILIES, INDEXED)),
)
def test_two_devices_give_plans_of_like_shares_each_nearly_as_fast_on_the_other(
    scale, work, index, loss, families
) -> None:
    """Both have one damage, which prices have no part in. Among all families, an index of 2,048 tokens is a quarter of
    a head's time, and the devices' prices of it are up to 4 times apart."""
    first = made_up_prices(tiles=(200.0, 1.0), column=1.5, index=dict.fromkeys(INDEXED, (100.0, 0.005, 0.0)))
    second = tilted(first, scale, work, index)
    one, other = (planned(prices, loss=loss, families=families) for prices in (first, second))
    for entry in PROFILE.lengths:
        (share, us), (shifted, foreign_us) = (share_and_time(first, plan, entry) for plan in (one, other))
        assert max(share, shifted) <= 1.1 * min(share, shifted)
        slower = 1.15 if entry.length == 2048 and families == INDEXED else 1.05
        assert foreign_us <= slower * us
        (_, foreign_us), (_, us) = (share_and_time(second, plan, entry) for plan in (one, other))
        assert foreign_us <= slower * us
