"""The oracle itself, against plain loops."""

import math

import pytest
import torch

from sparsekv.kernels.reference import mask_of, reference_attention
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, Chunk, TileIndex
from sparsekv.plans.patterns import TileShape


def random_index(batch: int, heads: int, rows: int, tiles: int, seed: int) -> TileIndex:
    """Any tiles, columns and live bits, whether a builder would make them or not."""
    g = torch.Generator().manual_seed(seed)
    tiles_BHTW = torch.full((batch, heads, rows, 3), NO_TILE, dtype=torch.int32)
    counts = torch.randint(0, 4, (batch, heads, rows), generator=g, dtype=torch.int32)
    columns = torch.full((batch, heads, 40), NO_COLUMN, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            columns[b, h, :35] = torch.randperm(tiles * 64, generator=g)[:35].sort().values
            for t in range(rows):
                count = min(int(counts[b, h, t]), tiles)
                counts[b, h, t] = count
                tiles_BHTW[b, h, t, :count] = torch.randperm(tiles, generator=g)[:count].sort().values
    live = torch.randint(-(1 << 31), 1 << 31, (batch, heads, rows, 2), generator=g).int()
    live[..., 1] &= 0b111
    dense = torch.arange(heads) == 1
    return TileIndex(TileShape(query=128, key=64), tiles_BHTW, counts, columns, live, dense)


@pytest.mark.parametrize("window", [None, 70])
def test_mask_is_the_definition_of_the_tile_index(window: int | None) -> None:
    chunk, queries = Chunk((30, 0), (230, 150)), 210
    index = random_index(2, 3, 2, 4, 0)
    mask = mask_of(index, chunk, queries, window)
    assert mask.shape == (2, 3, queries, 230)
    found, bits_BHTN = mask.tolist(), index.live_BHTN.tolist()
    for b in range(2):
        for h in range(3):
            columns = index.columns_BHC[b, h].tolist()
            for r in range(queries):
                i, t = chunk.past[b] + r, r // 128
                listed = index.tiles_BHTW[b, h, t, : index.counts_BHT[b, h, t]].tolist()
                for j in range(0, 230, 3):
                    live = j in columns and bits_BHTN[b][h][t][columns.index(j) // 32] >> columns.index(j) % 32 & 1
                    expected = j <= i and i < chunk.lengths[b] and (window is None or i - j < window)
                    expected = expected and bool(h == 1 or j // 64 in listed or live)
                    assert found[b][h][r][j] == expected, (b, h, r, j)


def test_attention_is_the_weighted_mean_of_what_the_mask_shows() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 9, 5, generator=g) for heads in (4, 2, 2))
    mask = torch.rand(2, 4, 9, 7, generator=g) < 0.5
    mask[0, 0, 3] = False
    k[:, :, 7:], v[:, :, 7:] = torch.nan, torch.nan
    found = reference_attention(q, k, v, mask, scale=0.3)
    for b in range(2):
        for h in range(4):
            for i in range(9):
                seen = [j for j in range(7) if mask[b, h, i, j]]
                weights = {j: math.exp(0.3 * float(q[b, h, i] @ k[b, h // 2, j])) for j in seen}
                total = sum(weights.values())
                out = sum((weights[j] / total * v[b, h // 2, j] for j in seen), torch.zeros(5))
                torch.testing.assert_close(found.out_BHSD[b, h, i], out)
                lse = math.log(total) if seen else -math.inf
                assert float(found.lse_BHS[b, h, i]) == pytest.approx(lse, rel=1e-5)


def test_values_that_no_row_sees_do_not_leak() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    mask[..., 2] = False
    expected = reference_attention(q, k, v, mask, scale=1.0)
    k[:, :, 2], v[:, :, 2] = torch.inf, torch.nan
    found = reference_attention(q, k, v, mask, scale=1.0)
    torch.testing.assert_close(found.out_BHSD, expected.out_BHSD)
    torch.testing.assert_close(found.lse_BHS, expected.lse_BHS)


def test_output_keeps_the_dtype_and_the_sums_are_float32() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    found = reference_attention(q, k, v, torch.ones(1, 2, 4, 4, dtype=torch.bool).tril(), scale=1.0)
    assert found.out_BHSD.dtype == torch.bfloat16
    assert found.lse_BHS.dtype == torch.float32
