"""Antidiagonal scores by the Triton kernel against the torch ones, which are held to loops elsewhere."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, layers, make_layer
from small_blocks import small_blocks

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.index.layout import HeadGroup, IndexCall
from sparsekv.kernels.index.tile_scores import tile_scores
from sparsekv.kernels.index.triton import adaptive
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import Adaptive, Dense, TileShape, tokens

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel runs there")


def joined(found, call: IndexCall, heads: list[int]) -> torch.Tensor:
    """[B, h, T, key tiles]; every head and row tile must come exactly once, with no NaN."""
    layout = call.layout
    shape = (layout.batch, len(heads), layout.row_tiles, layout.key_tiles)
    joined_BhTM = torch.full(shape, torch.nan, device=layout.device)
    for part in found:
        into = joined_BhTM[:, list(part.heads), part.rows]
        assert into.isnan().all()
        into = torch.zeros_like(into)
        into[..., : part.scores_BhRM.shape[-1]] = part.scores_BhRM
        joined_BhTM[:, list(part.heads), part.rows] = into
    assert not joined_BhTM.isnan().any()
    return joined_BhTM


def check(layer: Layer, heads: list[int], atol: float = 2e-6) -> torch.Tensor:
    call = IndexCall.of(layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window)
    expected = joined(tile_scores("antidiagonal", heads, call), call, heads)
    found = joined(adaptive.score("antidiagonal", heads, call), call, heads)
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    return found


@needs_interpreter
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(layers(st.just(Dense())), st.data())
def test_the_kernel_scores_as_torch_does_with_poison_all_around(layer: Layer, data: st.DataObject) -> None:
    heads = sorted(data.draw(st.sets(st.sampled_from(range(len(layer.patterns))), min_size=1, max_size=2)))
    check(layer, heads)


@needs_interpreter
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("window", [None, 150])
def test_long_rows_take_several_steps_and_blocks(tile: TileShape, window: int | None) -> None:
    layer = make_layer([Dense()] * 2, Chunk((1030,), (1800,)), tile, window=window, size=24)
    found = check(layer, [1])
    assert (found.sum(-1) - 1.0).abs().max() < 1e-5


@needs_interpreter
def test_parts_of_the_row_tiles_join_without_seams() -> None:
    layer = make_layer([Dense()] * 3, Chunk((7, 64), (500, 400)), TILES[0], kv_heads=3, spare=20)
    whole = check(layer, [0, 2])
    with small_blocks(150):
        torch.testing.assert_close(check(layer, [0, 2]), whole, atol=1e-6, rtol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("size", [24, 12], ids=["by the kernel", "by torch, which takes any head size"])
def test_adaptive_heads_get_the_same_tiles_when_triton_builds(size: int) -> None:
    patterns = [Adaptive(mass=0.6, max_tiles=tokens(256)), Adaptive(score="pooled", mass=0.5, max_tiles=tokens(256))]
    layer = make_layer(patterns, Chunk((40,), (700,)), TILES[0], size=size)
    given_ = (layer.patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile)
    by_torch, by_triton = (build_index(*given_, scale=layer.scale, builder=name) for name in ("torch", "triton"))
    assert torch.equal(by_torch.tiles_BHTW, by_triton.tiles_BHTW)
    assert torch.equal(by_torch.counts_BHT, by_triton.counts_BHT)
    call = IndexCall.of(layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, None)
    obstacle = adaptive.obstacle(HeadGroup.of(patterns[:1], [0]), call)
    assert obstacle is None if size == 24 else "multiples of 8" in (obstacle or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_gpu_scores_as_torch_does_and_twice_alike(dtype: torch.dtype, size: int) -> None:
    for tile in TILES:
        for window in (None, 700):
            chunk = Chunk((192, 0), (5000, 3333))
            layer = make_layer([Dense()] * 4, chunk, tile, kv_heads=2, window=window, dtype=dtype, size=size, spare=60)
            layer = layer.to("cuda")
            first, second = (check(layer, [0, 1, 3], atol=1e-5) for _ in range(2))
            assert torch.equal(first, second)
