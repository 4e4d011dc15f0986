"""What a pattern says about itself must hold of the index that is built from it, whatever the family: those of plans,
and that of docs/extending.md, registered from outside."""

from collections import Counter
from random import Random

import pytest
import torch
from strided import index_strided
from strided_pattern import Strided

from sparsekv.kernels.index.build import BUILDERS, IndexBuilder, build_index
from sparsekv.kernels.tiles import Chunk, TileIndex, density
from sparsekv.plans.patterns import PATTERNS, AShape, BlockSparse, Pattern, TileShape, VerticalSlash, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan

TILES = (TileShape(query=64, key=64), TileShape(query=128, key=128), TileShape(query=128, key=64))
FAMILIES = {"strided": Strided, **PATTERNS}
SEARCHED = [name for name, kind in FAMILIES.items() if kind.ranges(TileShape(), 1)]


def diffuse_index(pattern: Pattern, length: int, tile: TileShape) -> TileIndex:
    """Of one head whose attention goes nowhere in particular."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, length, 32, generator=random) for _ in range(2))
    return build_index([pattern], q, k, Chunk.uniform(1, 0, length), tile, scale=32**-0.5, builder="torch")


@pytest.fixture(autouse=True)
def strided_builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "family" in request.fixturenames:
        monkeypatch.setitem(BUILDERS, Strided, IndexBuilder(index_strided))  # type: ignore[misc]


def test_every_pattern_that_a_plan_may_hold_has_a_builder() -> None:
    assert set(BUILDERS) == set(PATTERNS.values())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("length", [200, 1024, 3000])
@pytest.mark.parametrize("family", SEARCHED)
def test_no_index_has_more_columns_than_its_pattern_says(family: str, length: int, tile: TileShape) -> None:
    pattern = FAMILIES[family].timed(length)
    assert diffuse_index(pattern, length, tile).columns_BHC.shape[-1] <= pattern.most_columns(length)


@pytest.mark.parametrize("window", [2, 64, 65, 66, 129, 130])
def test_a_window_reaches_the_tile_of_the_oldest_key_that_the_first_row_of_a_tile_sees(window: int) -> None:
    index = diffuse_index(AShape(sink=tokens(1), window=tokens(window)), 640, TILES[0])
    for row in range(10):
        found = {*index.tiles_BHTW[0, 0, row, : index.counts_BHT[0, 0, row]].tolist()}
        assert found == {0, *range(max(0, (64 * row - window + 1) // 64), row + 1)}


def random_pattern(random: Random, length: int) -> Pattern:
    first, second, third = (tokens(random.randint(1, length // 2)) for _ in range(3))
    return random.choice(
        (
            AShape(sink=first, window=second),
            BlockSparse(keep=first),
            VerticalSlash(vertical=first, slash=second, last_q=64, max_tiles=third),
        )
    )


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_are_left_out_wherever_a_plan_says_that_its_budgets_leave_some_out(tile: TileShape) -> None:
    random, counts = Random(0), Counter[bool]()
    drawn = [(length := random.randint(300, 1200), random_pattern(random, length)) for _ in range(60)]
    for length, pattern in (*drawn, (633, AShape(sink=tokens(100), window=tokens(333)))):
        group = HeadGroup(layer=0, heads=(0,), pattern=pattern)
        says = PrefillPlan(tile=tile, lengths=(PrefillBucket(up_to=None, heads=(group,)),)).skips_at(length)
        counts[says] += 1
        assert not says or density(diffuse_index(pattern, length, tile), Chunk.uniform(1, 0, length)) < 1.0
    assert min(counts.values()) > 5


@pytest.mark.parametrize("family", SEARCHED)
def test_a_larger_size_of_a_range_never_computes_less(family: str) -> None:
    length, tile = 2048, TILES[0]
    for one in FAMILIES[family].ranges(tile, length):
        assert one.family == family
        sizes = [one.sizes(length) * part // 8 for part in range(8)]
        computed = [
            density(diffuse_index(one.pattern(n, length), length, tile), Chunk.uniform(1, 0, length)) for n in sizes
        ]
        assert computed == sorted(computed)
