"""The Triton builders on a GPU: choices as by torch, planted lines found, no wait, little memory."""

import pytest
import torch
from index_cases import differences, make_layer

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

pytestmark = pytest.mark.gpu

H, G, D = 8, 2, 128
COLUMNS, OFFSETS = (7, 700, 3000, 5555), (0, 300, 4097)


def planted(length: int, past: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys at random, and queries that look at a few of them, at a few places back, and at nothing else."""
    generator = torch.Generator("cuda").manual_seed(length)
    k_1GSD = torch.randn(1, G, length, D, generator=generator, device="cuda")
    k_1HSD = k_1GSD.repeat_interleave(H // G, 1)
    place_S = torch.arange(past, length, device="cuda")
    q_1HSD = k_1HSD[:, :, list(COLUMNS)].sum(2, keepdim=True).expand(-1, -1, length - past, -1)
    for offset in OFFSETS:
        q_1HSD = q_1HSD + k_1HSD[:, :, (place_S - offset).clamp(min=0)]
    return q_1HSD.to(dtype), k_1GSD.to(dtype)


def build(builder: str, patterns, q, k, chunk: Chunk, tile: TileShape, window: int | None = None) -> TileIndex:
    return build_index(patterns, q, k, chunk, tile, scale=D**-0.5, window=window, builder=builder)


def same_share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of rows of the last dimension that are the same to the last number."""
    assert found.shape == expected.shape
    return float((found == expected).all(-1).float().mean())


def kept_share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the listed columns that both list."""
    both = [torch.isin(mine[mine >= 0], theirs[theirs >= 0]) for mine, theirs in zip(found, expected, strict=True)]
    return float(torch.cat(both).float().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "past"), [(8192, 0), (32768, 30000), (131072, 0)])
@pytest.mark.parametrize("last_q", [64, 256])
@pytest.mark.parametrize("tile", [TileShape(), TileShape(query=128, key=64)], ids=["128x128", "128x64"])
def test_choices_are_those_of_torch_and_planted_lines_are_found(dtype, length, past, last_q, tile) -> None:
    pattern = VerticalSlash(vertical=tokens(500), slash=tokens(200), max_tiles=fraction(0.2), last_q=last_q)
    q, k = planted(length, past, dtype)
    chunk = Chunk((past,), (length,))
    found, expected = (build(builder, (pattern,) * H, q, k, chunk, tile) for builder in ("triton", "torch"))
    for index in (found, expected):
        assert torch.isin(torch.tensor(COLUMNS, device="cuda"), index.columns_BHC).all()
        row = index.tiles_BHTW[0, :, -1]
        first = past + (length - 1 - past) // tile.query * tile.query  # token of the last row tile
        for offset in OFFSETS:
            assert (row == (first - offset) // tile.key).any(-1).all(), offset
    assert kept_share(found.columns_BHC.flatten(0, 1), expected.columns_BHC.flatten(0, 1)) > 0.99
    assert same_share(found.tiles_BHTW, expected.tiles_BHTW) > 0.9
    counts, other = found.counts_BHT.double(), expected.counts_BHT.double()
    torch.testing.assert_close(counts.mean(), other.mean(), rtol=1e-2, atol=0.5)
    assert counts.max() <= found.tiles_BHTW.shape[3]


@pytest.mark.parametrize(("length", "past"), [(8192, 0), (32768, 30001), (262144, 200000)])
@pytest.mark.parametrize("tile", [TileShape(), TileShape(query=64, key=64)], ids=["128x128", "64x64"])
def test_blocks_are_those_of_torch(length, past, tile) -> None:
    q, k = planted(length, past, torch.bfloat16)
    chosen = [BlockSparse(keep=tokens(keep)) for keep in (0, 1024, 4096, 7000)] * (H // 4)
    found, expected = (build(builder, chosen, q, k, Chunk((past,), (length,)), tile) for builder in ("triton", "torch"))
    assert torch.equal(found.counts_BHT, expected.counts_BHT)
    assert same_share(found.tiles_BHTW, expected.tiles_BHTW) > 0.99


def test_small_layers_have_exactly_the_index_of_torch() -> None:
    chosen = [
        VerticalSlash(vertical=tokens(20), slash=tokens(12), max_tiles=fraction(0.6)),
        AShape(sink=tokens(64), window=tokens(128)),
        VerticalSlash(vertical=tokens(45), slash=tokens(2), last_q=100, max_tiles=fraction(0.5)),
        Dense(),
        BlockSparse(keep=fraction(0.4)),
        BlockSparse(keep=tokens(256)),
    ]
    for tile in (TileShape(), TileShape(query=64, key=64)):
        for window in (None, 200):
            layer = make_layer(chosen, Chunk((192, 0), (900, 633)), tile, kv_heads=2, spare=60, seed=3, size=64,
                               window=window, dtype=torch.float16).to("cuda")  # fmt: skip
            found, expected = (
                build_index(layer.patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, tile, scale=layer.scale,
                            window=window, builder=builder)
                for builder in ("triton", "torch")
            )  # fmt: skip
            assert differences(found, expected) == []


def test_a_build_does_not_wait_for_the_device_and_gives_the_same_again() -> None:
    pattern = VerticalSlash(vertical=tokens(500), slash=tokens(200), max_tiles=fraction(0.2))
    q, k = planted(20000, 0, torch.bfloat16)
    call = ((pattern,) * H, q, k, Chunk((0,), (20000,)), TileShape())
    first = build("triton", *call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = build("triton", *call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert differences(first, second) == []


def test_memory_is_two_scores_a_key_and_head_and_the_index() -> None:
    length = 131072
    pattern = VerticalSlash(vertical=tokens(500), slash=tokens(200), max_tiles=fraction(0.05))
    q, k = (torch.randn(1, n, length, D, device="cuda", dtype=torch.bfloat16) for n in (H, G))
    build("triton", (pattern,) * H, q, k, Chunk((0,), (length,)), TileShape())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = build("triton", (pattern,) * H, q, k, Chunk((0,), (length,)), TileShape())
    torch.cuda.synchronize()
    parts = (index.tiles_BHTW, index.counts_BHT, index.columns_BHC, index.live_BHTN)
    held = sum(part.numel() * part.element_size() for part in parts)
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * (2 * 4 * H * length + held) + (8 << 20)
