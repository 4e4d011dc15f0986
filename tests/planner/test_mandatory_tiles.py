"""Densities that leave no room for mandatory tiles: known before anything runs, and just those."""

import pytest
import torch

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.planner.options import KNOWN_FAMILIES, PlanOptions
from sparsekv.planner.profile.profiler import check_targets
from sparsekv.planner.profile.search_space import search_space
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape, mandatory_density

ALL = KNOWN_FAMILIES
TILES = (TileShape(query=64, key=64), TileShape(query=128, key=128), TileShape(query=128, key=64))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 200, 700, 1024, 1091])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_smallest_pattern_of_each_ray_computes_the_mandatory_tiles(length: int, tile: TileShape) -> None:
    q_11LD = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(0))
    chunk = Chunk.uniform(1, 0, length)
    options = PlanOptions(families=ALL).but(tile=tile)
    for ray in search_space(options, length):
        smallest = ray.pattern(0, tile.mandatory * tile.key)
        index = build_index((smallest,), q_11LD, q_11LD, chunk, tile, scale=1.0)
        assert mandatory_density(length, tile, ray.family) == pytest.approx(float(density(index, chunk))), ray.name


def test_the_triangle_is_all_mandatory_up_to_three_tiles_and_hardly_any_of_it_in_long_contexts() -> None:
    tile = TileShape()
    for family in ALL:
        assert mandatory_density(384, tile, family) == 1.0
        assert 0.005 < mandatory_density(131072, tile, family) < 0.006


def test_a_target_is_refused_below_the_least_of_its_families_and_not_above() -> None:
    tile = TileShape()
    least = mandatory_density(1024, tile, "a_shape")
    assert least == pytest.approx(21 / 36)
    check_targets({1024: [1024]}, [least], tile, ALL)
    with pytest.raises(UsageError, match=r"0\.584"):
        check_targets({1024: [1024]}, [0.5], tile, ALL)
    with pytest.raises(UsageError, match="at 1024 tokens"):
        check_targets({1024: [1024], 32768: [32768]}, [0.1, 0.1], tile, ALL)
    check_targets({1024: [1024]}, [], tile, ALL)  # the preset has a target of its own


def test_shorter_prompts_than_the_length_say_count_as_long_as_they_are() -> None:
    tile = TileShape()
    target = 1.01 * mandatory_density(2048, tile, "a_shape")
    check_targets({2048: [2048, 2048]}, [target], tile, ALL)
    with pytest.raises(UsageError, match="at 2048 tokens"):
        check_targets({2048: [2048, 1024]}, [target], tile, ALL)
