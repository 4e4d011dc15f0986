"""The copy of a request's past, and what is compiled before requests come."""

from random import Random
from typing import Any

import pytest
import torch

from sparsekv.kernels.index.triton.sizes import strips_for
from sparsekv.kernels.keys import PLAIN, KeyView
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import VerticalSlash, fraction, tokens
from sparsekv.runtime.core.program import LayerProgram, Program, Rank
from sparsekv.runtime.paged.plan_host import PlanHost, Scratch


@pytest.mark.parametrize("length", [1, 16, 17, 100, 128])
def test_a_copied_past_is_the_requests_tokens_in_order_from_pages_of_any_strides(length: int) -> None:
    k_NGDS, v_NGSD = torch.randn(2, 40, 3, 8, 16).unbind()
    pages = k_NGDS.transpose(2, 3), v_NGSD.transpose(2, 3).contiguous()
    table_P = torch.randperm(40)[:8].int()
    table_P[-(-length // 16) :] = 10_000  # behind the end anything may stand
    scratch = Scratch(128, 3 * 8, torch.float32, torch.device("cpu"))
    copied = scratch.copy(pages, table_P, length).contiguous(length)
    lengths_B = torch.tensor([length], dtype=torch.int32)
    expected = KeyView(*pages, lengths_B, table_P[None]).contiguous(length)
    for got, wanted in zip(copied, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("window", [None, 6000])
@pytest.mark.parametrize("step", [2048, 3000, 8192, 16384])
def test_kernels_are_compiled_for_as_many_queries_as_any_chunk_samples(
    monkeypatch: pytest.MonkeyPatch, step: int, window: int | None
) -> None:
    """In each bucket, whose patterns sample more or fewer, behind any past."""
    lines = (VerticalSlash(vertical=tokens(64), slash=tokens(64), last_q=n, max_tiles=fraction(0.5)) for n in (256, 64))
    layer = LayerProgram(0, 1, 1, window, bounds=(4096, 16384), patterns=((), *((pattern,) for pattern in lines)))
    longest, random, compiled = 40_000, Random(step), set[object]()
    host = PlanHost(Program(Rank(), (layer,)), "cpu", Scratch(longest, 8, torch.float32, torch.device("cpu")), longest)

    def compiled_for(chunk: Chunk) -> object:
        (pattern,) = layer.patterns_at(chunk.longest)
        assert isinstance(pattern, VerticalSlash)
        return strips_for(max(chunk.sampled(pattern.last_q))), window is not None and window < chunk.longest

    def prefill(layer: LayerProgram, q_THD: torch.Tensor, keys: KeyView, chunk: Chunk, *_: Any, **named: Any) -> None:
        assert (len(q_THD), keys.capacity) == (chunk.rows[0], chunk.longest)
        compiled.add(compiled_for(chunk))

    monkeypatch.setattr(host, "prefill", prefill)
    host.warm_up(layer, torch.zeros(step, 1, 8), PLAIN, 1.0)
    for _ in range(3000):
        rows = random.randint(128, step)
        length = random.randint(max(4097, rows), longest)
        assert compiled_for(Chunk.uniform(1, length - rows, length)) in compiled
