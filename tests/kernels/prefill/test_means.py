"""Means of what a row tile skips, against the definition row tile by row tile."""

import pytest
import torch
from attention_cases import Case, Problem, draw
from poison import poisoned_memory
from prefill_cases import CASES, GPU_CASES, TILE
from small_blocks import small_blocks

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.means import add_means, attend_with_means, tiles_with_means
from sparsekv.kernels.reference import reference_with_means
from sparsekv.kernels.tiles import AttentionOutput, computed_tiles
from sparsekv.plans.patterns import TileShape


def sparse_heads(problem: Problem) -> list[int]:
    return torch.nonzero(~problem.index.dense_H).flatten().tolist()


def check(case: Case, backend: str, device: str = "cpu") -> None:
    problem = draw(case, device)
    heads = sparse_heads(problem)[-2:]
    with poisoned_memory():
        plain = problem.by(prefill_attention, want_lse=True, backend=backend)
        tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD)
        options = {"scale": problem.scale, "window": problem.window}
        found = add_means(*tensors, plain, problem.index, problem.chunk, heads, **options)
    wanted = reference_with_means(*tensors, problem.index, problem.chunk, heads, **options)
    close(found, wanted, case.dtype)


def close(found: AttentionOutput, wanted: AttentionOutput, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.lse_BHS, wanted.lse_BHS, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.out_BHSD.float(), wanted.out_BHSD.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_means_join_the_softmax_as_often_as_they_have_keys(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES[:-4:3], ids=str)
def test_means_on_the_gpu_join_the_softmax_as_often_as_they_have_keys(case: Case) -> None:
    check(case, "triton", "cuda")


def test_small_blocks_of_row_tiles_change_nothing() -> None:
    with small_blocks():
        check(Case("x", past=(77,), lengths=(700,), share=0.2, columns=40), "cpu")


def test_heads_without_means_are_left_as_they_are() -> None:
    problem = draw(Case("x", lengths=(700,), share=0.2, columns=40))
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.index, problem.chunk)
    one, none = (attend_with_means(*tensors, heads, scale=problem.scale, backend="cpu") for heads in ((1,), ()))
    assert torch.equal(one[:, 0], none[:, 0])
    assert not torch.equal(one[:, 1], none[:, 1])


def test_without_anything_skipped_means_change_nothing() -> None:
    problem = draw(Case("x", lengths=(700,), share=1.0, columns=9, tile=TILE))
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.index, problem.chunk)
    all_heads, none = (attend_with_means(*tensors, heads, scale=problem.scale, backend="cpu") for heads in ((0, 1), ()))
    torch.testing.assert_close(all_heads, none)


def test_batch_rows_may_share_their_keys() -> None:
    """As the profiler scores row tiles: keys that one row does not see are others' to read."""
    problem = draw(Case("x", past=(64, 320), lengths=(128, 384), share=0.0, columns=9))
    k_BGKD, v_BGKD = (x[1:].expand(2, -1, -1, -1) for x in (problem.k_BGKD, problem.v_BGKD))
    before = k_BGKD.clone(), v_BGKD.clone()
    tensors, heads = (problem.q_BHSD, k_BGKD, v_BGKD), (0, 1)
    found = attend_with_means(*tensors, problem.index, problem.chunk, heads, scale=problem.scale, backend="cpu")
    assert torch.equal(k_BGKD, before[0])
    assert torch.equal(v_BGKD, before[1])
    wanted = reference_with_means(*tensors, problem.index, problem.chunk, heads, scale=problem.scale)
    torch.testing.assert_close(found, wanted.out_BHSD)


@pytest.mark.parametrize("tile", [TILE, TileShape(query=64, key=64)], ids=str)
def test_a_mean_counts_as_a_key_of_its_row_tile(tile: TileShape) -> None:
    problem = draw(Case("x", lengths=(640,), share=0.0, columns=30, tile=tile))
    before = sum(row for row in range(640 // tile.query))  # key tiles before each row tile
    extra_BH = tiles_with_means(problem.index, problem.chunk, (1,)) - computed_tiles(problem.index)
    assert extra_BH.tolist() == [[0.0, before / tile.key]]
