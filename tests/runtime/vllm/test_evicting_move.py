"""Kept rows of a prompt move to the first blocks of a request: on a CPU by torch, as on a GPU by Triton."""

import pytest
import torch
from plans_samples import model_info
from tiny_plans import drops

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import PLAIN, Scales, scaled
from sparsekv.kernels.pages import move_rows
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.state import Observed
from sparsekv.runtime.paged.plan_host import Scratch
from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks, EvictingHost, PromptRows, move


@pytest.mark.parametrize("lists", [1, 3])
@pytest.mark.parametrize(("length", "count", "shared"), [(75, 40, 11), (96, 3, 0), (1, 1, 1)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there both are the same")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_both_ways_write_the_same_pages(length: int, count: int, shared: int, lists: int, dtype: torch.dtype) -> None:
    keys = tuple((torch.rand(3, length, 16) * 200 + 1).to(dtype) for _ in range(2))
    rows_gK = torch.stack([torch.randperm(length)[:count].sort().values for _ in range(lists)])
    table_P = torch.randperm(20)[:8].int()
    found = []
    for by in (move, move_rows):
        pages = torch.zeros(20, 3, 16, 16, dtype=dtype), torch.zeros(20, 3, 16, 16, dtype=dtype)
        by(keys, rows_gK, pages, table_P, shared)
        found.append(torch.stack(pages))
    assert torch.equal(*found)
    assert (found[0] != 0).sum() == 2 * 3 * count * 16


def test_bytes_of_a_cache_in_8_bits_move_as_they_are() -> None:
    """What stays is what stays of the numbers that they stand for."""
    prompt, page, source = 150, 16, torch.Generator().manual_seed(0)
    rule = drops((0,), 40, sink=4, recent=10, generated=16, observe=8)
    program = Program.of(None, None, model_info(1, 4, 2), evicting={0: rule})
    scales = Scales(torch.tensor([0.02, 0.3]), torch.tensor([0.1, 0.04]), torch.float32)
    pages = [torch.randint(0, 0x70, (12, 2, page, 8), generator=source).to(torch.uint8) for _ in range(2)]
    numbers = [scaled(x, scale_G, torch.float32) for x, scale_G in zip(pages, (scales.k_G, scales.v_G), strict=True)]
    table_P = torch.randperm(12, generator=source).int()
    observed = Observed(torch.randn(1, 4, 8, 8, generator=source), 0.3, PLAIN)
    scratch = Scratch(prompt, 2 * 8, torch.float32, torch.device("cpu"))
    before = [x.clone() for x in pages]
    for given, by in ((pages, scales), (numbers, None)):
        host = EvictingHost("cpu", Fallback("cpu"), scratch.copy, 1, None)
        rows = PromptRows("one", 0, slice(0, 8), prompt - 8, prompt, EvictedBlocks.of(rule, page))
        host.requests.knows = lambda name: True
        host.observe(program.layers[0], rows, observed, given, table_P, by)
    for was, stored, moved, scale_G in zip(before, pages, numbers, (scales.k_G, scales.v_G), strict=True):
        assert not torch.equal(was, stored)
        assert torch.equal(scaled(stored, scale_G, torch.float32), moved)
