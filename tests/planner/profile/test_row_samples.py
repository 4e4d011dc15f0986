"""Rows that candidates are scored on compute what they compute in the whole prompt."""

import pytest
import torch
from planner_models import TILE

from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.profile.head_errors import SampledRows
from sparsekv.planner.profile.search_space import CommonPrefix, in_steps
from sparsekv.plans.errors import BackendError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, tokens

PATTERNS = (
    Dense(),
    AShape(sink=tokens(64), window=tokens(128)),
    VerticalSlash(vertical=tokens(40), slash=tokens(10), max_tiles=tokens(320)),
    BlockSparse(keep=tokens(256)),
)


def in_steps_of_their_own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: Chunk, tile: TileShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of each step by an index of its own, one after the other, and the log-sum-exps."""
    length, outputs = steps.longest, []
    patterns = PATTERNS if len(steps.past) == 1 else [pattern.of_context(length) for pattern in PATTERNS]
    for past, end in zip(steps.past, steps.lengths, strict=True):
        chunk, queries, keys = Chunk.uniform(1, past, end), q[:, :, past:end], k[:, :, :end]
        index = build_index(patterns, queries, keys, chunk, tile, scale=0.5)
        found = prefill_attention(queries, keys, v[:, :, :end], index, chunk, scale=0.5, want_lse=True, backend="cpu")
        outputs.append((found.out_BHSD, found.lse_BHS))
    out, lse = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
    return out, lse


@pytest.mark.parametrize("length", [640, 611, 65])
@pytest.mark.parametrize(("stride", "step"), [(2, None), (3, None), (50, None), (1, 256), (2, 300), (3, 192)])
@pytest.mark.parametrize("runs", [None, 2])
@pytest.mark.parametrize("tile", [TILE, TileShape()], ids=["64", "128"])
def test_sampled_tiles_give_the_rows_of_the_steps(
    length: int, stride: int, step: int | None, runs: int | None, tile: TileShape
) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    steps = in_steps(length, step, tile)
    rows, index = (
        SampledRows.of(steps, length - 20, tile, stride, runs),
        CommonPrefix(q, k, steps, tile, 0.5).index(PATTERNS),
    )
    whole_out, whole_lse = in_steps_of_their_own(q, k, v, steps, tile)
    found = prefill_attention(
        rows.queries(q),
        rows.keys(k),
        rows.keys(v),
        rows.index(index),
        rows.chunk,
        scale=0.5,
        want_lse=True,
        backend="cpu",
    )
    for place, number in enumerate(rows.numbers or (0,)):
        run = (rows.run if rows.numbers else 100) * tile.query
        span = slice(number * run, min((number + 1) * run, length))
        size = span.stop - span.start
        torch.testing.assert_close(found.out_BHSD[place, :, :size], whole_out[0, :, span])
        torch.testing.assert_close(found.lse_BHS[place, :, :size], whole_lse[0, :, span])


@pytest.mark.parametrize(("stride", "runs"), [(1, None), (4, 8), (3, 7)])
def test_no_run_crosses_a_step(stride: int, runs: int | None) -> None:
    rows = SampledRows.of(in_steps(100_000, 16_384, TileShape()), 99_936, TileShape(), stride, runs)
    assert {
        (past // 16_384, (end - 1) // 16_384) for past, end in zip(rows.chunk.past, rows.chunk.lengths, strict=True)
    } <= {(n, n) for n in range(7)}
    assert rows.weights(torch.device("cpu")).sum() == pytest.approx(100_000, rel=0.05)


def test_the_tail_is_always_sampled_and_nothing_beyond_the_prompt() -> None:
    rows = SampledRows.of(Chunk.uniform(1, 0, 1000), 900, TILE, 4)
    weights_XM = rows.weights(torch.device("cpu"))
    positions_XM = torch.tensor(rows.numbers)[:, None] * 64 + torch.arange(64)
    counted = positions_XM[weights_XM > 0].tolist()
    assert len(set(counted)) == len(counted)
    assert {position for position in counted if position >= 900} == set(range(900, 1000))
    assert (weights_XM[positions_XM >= 1000] == 0).all()
    assert (weights_XM[(positions_XM >= 900) & (positions_XM < 1000)] == 1).all()


def test_all_rows_are_one_batch_row_and_nothing_is_copied() -> None:
    rows = SampledRows.of(Chunk.uniform(1, 0, 1000), 900, TILE, 1)
    assert rows.numbers is None
    q, k = torch.randn(1, 4, 1000, 16), torch.randn(1, 2, 1000, 16)
    index = build_index(PATTERNS, q, k, rows.chunk, TILE, scale=0.5)
    assert rows.queries(q) is q
    assert rows.keys(k) is k
    assert rows.index(index) is index
    assert rows.weights(torch.device("cpu")).tolist() == [[1.0] * 1000]


def test_runs_of_tiles_stay_together() -> None:
    rows = SampledRows.of(Chunk.uniform(1, 0, 131_072 - 300), 131_072 - 364, TileShape(), 4, 8)
    assert rows.numbers == (3, 7, 11, 15, 19, 23, 27, 31)
    assert rows.chunk.past[0] == 3 * 4096
    assert rows.chunk.lengths == (*(4096 * number for number in (4, 8, 12, 16, 20, 24, 28)), 131_072 - 300)


def test_a_short_prompt_is_sampled_in_as_many_places() -> None:
    short, long = (
        SampledRows.of(Chunk.uniform(1, 0, length), length - 64, TileShape(), 4, 8) for length in (8192, 131_072)
    )
    assert short.numbers == long.numbers
    assert (short.run, long.run) == (2, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_runs_of_tiles_give_the_rows_of_the_whole_on_a_gpu(backend: str) -> None:
    length, tile = 20_000, TileShape()
    q, k, v = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    try:
        choose_backend(q.device, q.dtype, 64, backend, tile)
    except BackendError as error:
        pytest.skip(str(error))
    chunk = Chunk.uniform(1, 0, length)
    rows = SampledRows.of(chunk, length - 64, tile, 3, 7)
    index = build_index(PATTERNS, q, k, chunk, tile, scale=0.125)
    whole = prefill_attention(q, k, v, index, chunk, scale=0.125, backend=backend).out_BHSD
    found = prefill_attention(
        rows.queries(q), rows.keys(k), rows.keys(v), rows.index(index), rows.chunk, scale=0.125, backend=backend
    ).out_BHSD
    for place, number in enumerate(rows.numbers):
        span = slice(number * rows.run * 128, min((number + 1) * rows.run * 128, length))
        torch.testing.assert_close(found[place, :, : span.stop - span.start], whole[0, :, span], atol=2e-2, rtol=2e-2)
