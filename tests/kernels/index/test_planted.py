"""Attention with known structure: the builders must find it."""

import pytest
import torch

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.patterns import BlockSparse, Pattern, TileShape, VerticalSlash, tokens

S = 1024
COLUMNS = (5, 300, 301, 770)
OFFSETS = {0: 11.0, 190: 10.0, 517: 9.0}  # and how strongly each is looked at
TILE = TileShape(query=64, key=64)
FEW_LINES = VerticalSlash(vertical=tokens(9), slash=tokens(9), max_tiles=tokens(512))


def planted_lines() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries that look back by each offset, and at each of the columns, and at nothing else."""
    code, place = torch.eye(S), torch.arange(S)
    q_SD = 10.0 * sum(code[column] for column in COLUMNS).expand(S, S)
    for offset, strength in OFFSETS.items():
        q_SD = q_SD + strength * code[place - offset] * (place >= offset)[:, None]
    return q_SD[None, None], code[None, None]


def test_planted_lines_are_selected_and_nothing_else() -> None:
    q, k = planted_lines()
    pattern = VerticalSlash(vertical=tokens(len(COLUMNS)), slash=tokens(len(OFFSETS)), max_tiles=tokens(S))
    index = build_index([pattern], q, k, Chunk.uniform(1, 0, S), TILE, scale=1.0)
    assert index.columns_BHC[0, 0].tolist() == list(COLUMNS)
    # Row 12 starts at token 768: offsets 190 and 517 cross key tiles 9 and 10, 3 and 4; 770 lies in the diagonal tile.
    assert index.tiles_BHTW[0, 0, 12, : index.counts_BHT[0, 0, 12]].tolist() == [0, 3, 4, 9, 10, 11, 12]
    assert index.live_BHTN[0, 0, 12].item() == 0  # 5 in tile 0, 300 and 301 in tile 4, 770 on the diagonal
    assert index.live_BHTN[0, 0, 7].item() == 0  # 300 and 301 in tile 4, which 190 crosses; 770 is later
    assert (
        index.live_BHTN[0, 0, 15].item() == 0b0110
    )  # 300 and 301: nothing crosses tile 4; 770 in tile 12, which 190 crosses


@pytest.mark.parametrize("pattern", [BlockSparse(keep=tokens(256)), FEW_LINES], ids=["block_sparse", "vertical_slash"])
def test_queries_that_are_not_numbers_list_as_many_tiles_as_they_count(pattern: Pattern) -> None:
    q_BHSD, k_BGKD = torch.randn(1, 2, 700, 16), torch.randn(1, 1, 700, 16)
    q_BHSD[:, 1] = torch.nan
    index = build_index((pattern,) * 2, q_BHSD, k_BGKD, Chunk.uniform(1, 0, 700), TileShape(), scale=0.25)
    listed_BHT = (index.tiles_BHTW != NO_TILE).sum(-1)
    assert torch.equal(listed_BHT, index.counts_BHT.long())
    assert (index.counts_BHT > 0).all()
