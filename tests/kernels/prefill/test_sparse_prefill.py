"""Every prefill backend against the brute-force answer."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, assert_close, draw
from prefill_cases import CASES, GPU_CASES, SMALL_TILE, TILE
from torch_state import poisoned_memory

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill import triton as triton_prefill
from sparsekv.kernels.prefill.triton import PrefillLaunch
from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, tokens

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """An element that is never written shows."""
    with poisoned_memory():
        yield


def run(case: Case, backend: str, device: str = "cpu", want_lse: bool = True) -> AttentionOutput:
    problem = draw(case, device)
    found = problem.by(prefill_attention, want_lse=want_lse, backend=backend)
    assert_close(found, problem)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_backend_computes_exactly_the_indexed_mask(case: Case) -> None:
    run(case, "cpu")


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_kernel_computes_exactly_the_indexed_mask(case: Case) -> None:
    run(case, "triton")


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_reference_backend_computes_exactly_the_indexed_mask(case: Case) -> None:
    run(case, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_triton_kernel_on_the_gpu_computes_exactly_the_indexed_mask(case: Case) -> None:
    run(case, "triton", "cuda")


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_log_sum_exp_is_only_returned_on_request(backend: str) -> None:
    assert run(Case("x", lengths=(70,)), backend, want_lse=False).lse_BHS is None


@pytest.mark.parametrize("past", [0, 37])
def test_cpu_edges_done_in_several_calls_give_the_same_softmax(monkeypatch: pytest.MonkeyPatch, past: int) -> None:
    monkeypatch.setattr("sparsekv.kernels.prefill.cpu.EDGE_ELEMENTS", 1)
    case = Case("edges", past=(past,), lengths=(520,), share=0.8, columns=40, dense_heads=(1,), window=200)
    run(case, "cpu")
    run(replace(case, window=None), "cpu")


@needs_interpreter
@pytest.mark.parametrize(
    "launch",
    [
        PrefillLaunch(128, 128, 64, 8, 2, 3),
        PrefillLaunch(128, 64, 32, 8, 2, 3),
        PrefillLaunch(64, 128, 64, 4, 2, 3),
        PrefillLaunch(32, 32, 128, 4, 1, 1),
    ],
    ids=lambda launch: f"{launch.block_m}x{launch.block_n} and {launch.block_c}",
)
@pytest.mark.parametrize("tile", [TILE, SMALL_TILE], ids=["128 tiles", "64 tiles"])
def test_block_sizes_never_change_what_is_computed(
    launch: PrefillLaunch, tile: TileShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_prefill, "launch_for", lambda *rest: triton_prefill.fit(launch, tile))
    case = Case("x", past=(33,), lengths=(310,), tile=tile, columns=100, window=200, share=0.7, dense_heads=(1,))
    for problem in (draw(case), draw(Case("y", lengths=(150,), tile=tile, columns=50))):
        assert_close(triton_prefill.prefill(problem.call, problem.index, want_lse=True), problem)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_indices_as_the_builders_make_them_are_understood(backend: str) -> None:
    patterns = [
        VerticalSlash(vertical=tokens(30), slash=tokens(60), last_q=16, max_tiles=tokens(192)),
        AShape(sink=tokens(4), window=tokens(100)),
        BlockSparse(keep=tokens(192)),
        Dense(),
    ]
    q_BHSD, k_BGKD, v_BGKD = (torch.randn(1, heads, 400, 64) for heads in (4, 2, 2))
    chunk = Chunk((0,), (400,))
    index = build_index(patterns, q_BHSD, k_BGKD, chunk, SMALL_TILE, scale=0.125)
    found, answer = (
        prefill_attention(q_BHSD, k_BGKD, v_BGKD, index, chunk, scale=0.125, want_lse=True, backend=name)
        for name in (backend, "reference")
    )
    torch.testing.assert_close(found.out_BHSD, answer.out_BHSD, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.lse_BHS, answer.lse_BHS, atol=1e-4, rtol=1e-4)
