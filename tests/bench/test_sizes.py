"""Budgets and structure must come to the density that is asked for, or rows compare different things."""

import pytest
import torch

from sparsekv.bench.structure import diffuse_pattern, pattern_for, sizes_for
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape

TILE = TileShape()


@pytest.mark.parametrize("length", [32768, 131072])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_static_pattern_comes_to_the_density(length, share):
    nothing = torch.empty(1, 1, length, 1)
    pattern = pattern_for(sizes_for("a_shape", length, share, TILE), length, share, TILE)
    chunk = Chunk.uniform(1, 0, length)
    index = build_index([pattern], nothing, nothing, chunk, TILE, scale=1.0)
    assert float(density(index, chunk)) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("family", ["vertical_slash", "a_shape", "block_sparse"])
def test_where_attention_is_diffuse_the_budgets_bind(family):
    length, share, tile = 4096, 0.3, TileShape(query=64, key=64)
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, length, 32, generator=random) for _ in range(2))
    chunk = Chunk.uniform(1, 0, length)
    index = build_index([diffuse_pattern(family, length, share, tile)], q, k, chunk, tile, scale=32**-0.5)
    assert float(density(index, chunk)) == pytest.approx(share, rel=0.2)


def test_a_pattern_whose_density_attention_decides_cannot_be_sized():
    with pytest.raises(UsageError, match="adaptive"):
        diffuse_pattern("adaptive", 4096, 0.3, TILE)


def test_structure_grows_with_density_and_runs_are_never_narrower_than_can_be_planted():
    shares = (0.02, 0.05, 0.1, 0.2, 0.4)
    sizes = [sizes_for("vertical_slash", 131072, share, TILE, narrowest=1000) for share in shares]
    assert all(size.band >= 1000 for size in sizes)
    counts = [(size.columns, size.band * len(size.bands)) for size in sizes]
    assert counts == sorted(counts)
    assert [len(size.bands) for size in sizes] == sorted(len(size.bands) for size in sizes)
    hot = [sizes_for("block_sparse", 131072, share, TILE).clusters for share in shares]
    assert hot == sorted(hot, reverse=True)
