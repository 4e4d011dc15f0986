"""Kept rows of a prompt move to the first blocks of a request: on a CPU by torch, as on a GPU by Triton."""

import pytest
import torch

from sparsekv.kernels.pages import move_rows
from sparsekv.runtime.vllm.evicting_step import move


@pytest.mark.parametrize("lists", [1, 3])
@pytest.mark.parametrize(("length", "count", "shared"), [(75, 40, 11), (96, 3, 0), (1, 1, 1)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there both are the same")
def test_both_ways_write_the_same_pages(length: int, count: int, shared: int, lists: int) -> None:
    keys = (torch.randn(3, length, 16), torch.randn(3, length, 16))
    rows_gK = torch.stack([torch.randperm(length)[:count].sort().values for _ in range(lists)])
    table_P = torch.randperm(20)[:8].int()
    found = []
    for by in (move, move_rows):
        pages = torch.zeros(20, 3, 16, 16), torch.zeros(20, 3, 16, 16)
        by(keys, rows_gK, pages, table_P, shared)
        found.append(torch.stack(pages))
    assert torch.equal(*found)
    assert (found[0] != 0).sum() == 2 * 3 * count * 16
