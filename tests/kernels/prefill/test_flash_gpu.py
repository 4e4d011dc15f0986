"""The flash backend on a Hopper GPU with flash-attn-4: right, the same every time, compiled once for all lengths."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from attention_cases import Case, assert_close, draw
from flash_cases import GPU_CASES, SQUARE

from sparsekv.kernels.backends import dense_prefill, prefill_attention
from sparsekv.kernels.prefill.flash import backend
from sparsekv.kernels.prefill.flash.limits import device_obstacle, package, shape_obstacle
from sparsekv.kernels.tiles import AttentionOutput

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    obstacle = device_obstacle(torch.device("cuda"))
    if obstacle:
        pytest.skip(obstacle)


def run(case: Case, name: str = "flash") -> AttentionOutput:
    """In a process of vLLM without what its copy does not take."""
    obstacle = shape_obstacle(case.dtype, case.dim, case.tile)
    if name == "flash" and not package().asks_lists and obstacle:
        pytest.skip(obstacle)
    problem = draw(case, "cuda")
    found = problem.by(prefill_attention, want_lse=True, backend=name)
    assert_close(found, problem)
    return found


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_flash_on_the_gpu_computes_exactly_the_indexed_mask(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("case", [case for case in GPU_CASES if case.dense_heads], ids=str)
def test_dense_heads_come_out_the_same_listed_or_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in (0, 1 << 20):
        monkeypatch.setattr(backend, "LISTED_TILES", listed)
        run(case)


CASE = Case("x", lengths=(3000,), heads=8, kv_heads=2, dim=128, tile=SQUARE, columns=300, dense_heads=(2,),
            dtype=torch.bfloat16)  # fmt: skip


def test_results_are_identical_run_to_run() -> None:
    first, again = run(CASE), run(CASE)
    assert torch.equal(first.out_BHSD, again.out_BHSD)
    assert torch.equal(first.lse_BHS, again.lse_BHS)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(("past", "length"), [(0, 17000), (3001, 5200)])
def test_dense_layers_come_out_as_by_torch(past: int, length: int, window: int | None) -> None:
    problem = draw(
        Case("x", past=(past,), lengths=(length,), heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16), "cuda"
    )
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.chunk)
    assert backend.takes_dense(*tensors)
    found, other = (
        dense_prefill(*tensors, scale=problem.scale, window=window, backend=name) for name in ("flash", "triton")
    )
    torch.testing.assert_close(found.out_BHSD, other.out_BHSD, atol=2e-2, rtol=2e-2)


def test_another_length_past_or_width_compiles_nothing() -> None:
    _flash_attn_fwd = import_module(f"{package().module}.interface")._flash_attn_fwd

    def compiled() -> int:
        return len(_flash_attn_fwd.compile_cache.cache)

    run(CASE)
    before = compiled()
    for past, length, share in ((0, 2000, 0.3), (500, 2500, 0.3), (77, 3333, 0.3), (0, 5000, 0.7), (130, 3000, 1.0)):
        run(replace(CASE, past=(past,), lengths=(length,), share=share))
    assert compiled() == before


def test_a_call_does_not_wait_for_the_device() -> None:
    problem = draw(CASE, "cuda")
    index = replace(problem.index, dense_heads=CASE.dense_heads)

    def attend() -> None:
        prefill_attention(
            problem.q_BHSD,
            problem.k_BGKD,
            problem.v_BGKD,
            index,
            problem.chunk,
            scale=problem.scale,
            backend="flash",
        )

    attend()  # kernels compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("heads", [(32, 8), (1, 1)], ids=str)
def test_tensors_of_more_than_2_31_elements_are_addressed_right(heads: tuple[int, int]) -> None:
    """A million tokens of the attention of an 8B model: 8.6 GB of queries."""
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs 70 GB of device memory")
    H, G = heads
    tokens, D, scale = 1 << 20, 128, 128**-0.5
    q_BHSD, k_BGKD, v_BGKD = (torch.randn((1, n, tokens, D), device="cuda", dtype=torch.bfloat16) for n in (H, G, G))
    from sparsekv.kernels.index.build import build_index
    from sparsekv.kernels.tiles import Chunk
    from sparsekv.plans.patterns import AShape
    from sparsekv.plans.patterns import tokens as keep

    chunk = Chunk((0,), (tokens,))
    pattern = AShape(sink=keep(128), window=keep(1024))
    index = build_index([pattern] * H, q_BHSD, k_BGKD, chunk, SQUARE, scale=scale)
    found = prefill_attention(q_BHSD, k_BGKD, v_BGKD, index, chunk, scale=scale, want_lse=True, backend="flash")
    assert torch.isfinite(found.lse_BHS).all()
    row = tokens - 5
    for head in (0, H - 1):
        first = (row // 128 * 128 - 1024 + 1) // 128 * 128
        keys = torch.cat((torch.arange(128), torch.arange(first, row + 1))).cuda()
        k_KD, v_KD = (x[0, head * G // H, keys].float() for x in (k_BGKD, v_BGKD))
        weights_K = (k_KD @ q_BHSD[0, head, row].float() * scale).softmax(0)
        torch.testing.assert_close(found.out_BHSD[0, head, row].float(), weights_K @ v_KD, atol=2e-2, rtol=2e-2)
