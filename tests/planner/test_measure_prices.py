"""What is measured of a device."""

from collections.abc import Sequence

import pytest
import torch
from planner_models import TILE

from sparsekv.planner import measure_prices as measuring
from sparsekv.planner.measure_prices import Times, copies_to_read_cold, dense_heads_us, measure_prices, timed_lengths
from sparsekv.planner.options import PRESET_FAMILIES
from sparsekv.planner.prices import HeadShape, Prices
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.core.timed_layers import Launch

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def measured() -> Prices:
    """Launches run on the CPU, and each takes as long as it is behind the first of its turn."""

    def taken(launches: Sequence[Launch], device: torch.device) -> list[float]:
        return [float(number) for number, launch in enumerate(launches, 1) if launch() is not launch]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "device_us", taken)
        patch.setattr(measuring, "step_us", lambda launches, device: taken(launches, device)[-1])
        patch.setattr(measuring, "cache_bytes", lambda device: 1)
        how = {"device": torch.device("cpu"), "dtype": torch.float32, "tile": TILE, "families": PRESET_FAMILIES}
        return measure_prices(SHAPE, (2048,), **how)


def test_every_table_is_measured_at_every_length(measured: Prices) -> None:
    lengths = timed_lengths(SHAPE, (2048,))
    step = measured.step
    tables = (measured.dense, measured.tiles, measured.columns, *measured.index.values())
    for table in (*tables, step.dense, step.sparse, step.chooses, step.chooses_alone):
        assert table.along == lengths
    assert set(measured.index) == set(PRESET_FAMILIES)
    assert {table.across for table in measured.index.values()} == {(1.0, 4.0)}


@pytest.mark.parametrize(("heads", "mixed"), [(1, 1000.0), (3, 700.0), (4, 550.0)])
def test_dense_heads_of_a_sparse_launch_are_priced_beside_narrow_ones(heads: int, mixed: float) -> None:
    """A launch takes the mean of its heads: 1000 of a dense one, 100 of a narrow one."""
    assert dense_heads_us(mixed, 100.0, heads) == pytest.approx(1000.0)


def test_shares_as_a_kernel_has_them_are_read_off_at_those_of_the_table() -> None:
    times = Times()
    times.add_between("tiles", 4096, (0.1, 0.2, 0.5, 1.0), [(0.3, 30.0), (0.15, 15.0), (1.0, 100.0)])
    (column,) = zip(*times.table("tiles").us, strict=True)
    assert column == (15.0, 20.0, 50.0, 100.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_on_a_gpu_more_of_everything_takes_longer(backend: str) -> None:
    shape = HeadShape(heads=32, kv_heads=8, head_dim=128)
    how = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "tile": TileShape(), "backend": backend}
    found = measure_prices(shape, (8192, 32768), **how)
    assert found.tiles.at(32768, 1.0) > 2 * found.tiles.at(32768, 0.25) > found.tiles.at(8192, 0.25)


@pytest.mark.parametrize(
    ("heads", "lengths", "timed"),
    [
        (4, (1024,), (512, 1024)),
        (32, (4096, 131072), (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)),
        (14, (10000, 20000), (512, 896, 1792, 3200, 5888, 10000, 10880, 19968, 20000)),
    ],
)
def test_short_lengths_are_timed_for_launches_and_long_ones_for_work(heads, lengths, timed) -> None:
    shape = HeadShape(heads=heads, kv_heads=2, head_dim=64 if heads < 32 else 128)
    assert timed_lengths(shape, lengths) == timed


@pytest.mark.parametrize(
    ("read", "cache", "copies"),
    [(1 << 30, 50 << 20, 1), (100 << 20, 50 << 20, 1), (33 << 20, 50 << 20, 4), (1 << 20, 50 << 20, 16), (0, 1, 2)],
)
def test_steps_are_timed_on_more_keys_than_the_cache_of_the_device_holds(read: int, cache: int, copies: int) -> None:
    assert copies_to_read_cold(read, cache) == copies
    assert copies == 16 or copies * read >= cache or not read
