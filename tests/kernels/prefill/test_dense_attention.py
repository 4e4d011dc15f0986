"""Dense attention by torch's kernels: every way it is called gives causal attention over the right keys."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import Case, Problem, assert_close, draw
from plans_samples import model_info

from sparsekv.kernels.backends import Fallback, dense_prefill
from sparsekv.kernels.decode.cpu import decode
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.prefill import dense
from sparsekv.kernels.prefill import triton as triton_prefill
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import ShapeError
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program

CASES = [
    Case("whole prompt", lengths=(150,), heads=4, kv_heads=2),
    Case("whole prompts, batch", past=(0, 0), lengths=(90, 90), heads=4, kv_heads=2),
    Case("no groups", lengths=(150,), heads=2, kv_heads=2),
    Case("past", past=(70,), lengths=(150,), heads=4, kv_heads=2),
    Case("past, batch", past=(70, 70), lengths=(150, 150), heads=4, kv_heads=2),
    Case("other pasts and lengths", past=(0, 70, 30), lengths=(55, 150, 31), heads=4, kv_heads=2, spare_rows=5),
    Case("a row without queries", past=(0, 40), lengths=(55, 40)),
    Case("decode step", past=(149,), lengths=(150,), heads=4, kv_heads=2),
    Case("decode step in a window", past=(149,), lengths=(150,), window=20),
    Case("window", lengths=(150,), heads=4, kv_heads=2, window=20),
    Case("window and past", past=(70,), lengths=(150,), heads=4, kv_heads=2, window=20),
    Case("window of one", lengths=(40,), window=1),
    Case("window longer than the prompt", lengths=(40,), window=64),
    Case("memory behind the keys", lengths=(140,), spare_keys=60, heads=4, kv_heads=2),
    Case("token-major memory", past=(5,), lengths=(140,), heads=4, kv_heads=2, token_major=True),
    Case("bfloat16", past=(70,), lengths=(150,), dtype=torch.bfloat16),
]
GPU_CASES = [
    *CASES,
    *(replace(case, name=f"{case.name}, bf16", dtype=torch.bfloat16) for case in CASES),
    *(replace(case, name=f"{case.name}, fp16", dtype=torch.float16, dim=128) for case in CASES),
    Case("large", lengths=(4096,), heads=8, kv_heads=2, dtype=torch.bfloat16, dim=128),
    Case("large, past", past=(1000,), lengths=(4096,), heads=8, kv_heads=2, dtype=torch.bfloat16, dim=128),
    Case("large, window", lengths=(4096,), heads=8, kv_heads=2, dtype=torch.bfloat16, dim=128, window=700),
]


def draw_dense(case: Case, device: str = "cpu") -> Problem:
    return draw(replace(case, dense_heads=tuple(range(case.heads))), device)


def check(problem: Problem) -> None:
    found = dense_attention(
        problem.q_BHSD,
        problem.k_BGKD,
        problem.v_BGKD,
        problem.chunk,
        scale=problem.scale,
        window=problem.window,
    )
    assert found.lse_BHS is None
    assert_close(found, problem)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_attention_sees_every_causal_key_and_no_other(case: Case) -> None:
    check(draw_dense(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_dense_attention_on_the_gpu_sees_every_causal_key_and_no_other(case: Case) -> None:
    check(draw_dense(case, "cuda"))


def by_triton(case: Case, device: str) -> None:
    problem = draw_dense(case, device)
    assert_close(triton_prefill.dense(problem.call), problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel runs there")
@pytest.mark.parametrize("case", CASES[4:-1:3], ids=str)
def test_our_dense_kernel_for_large_heads_sees_every_causal_key_and_no_other(case: Case) -> None:
    by_triton(replace(case, dim=512), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_our_dense_kernel_for_large_heads_does_so_on_the_gpu(case: Case) -> None:
    by_triton(replace(case, dim=512), "cuda")


@pytest.mark.gpu
def test_long_prompts_on_the_gpu_agree_with_short_blocks_of_rows() -> None:
    q_BHSD, k_BGSD, v_BGSD = (torch.randn(1, h, 20000, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    whole = dense_attention(q_BHSD, k_BGSD, v_BGSD, Chunk((0,), (20000,)), scale=0.1).out_BHSD
    last = dense_attention(q_BHSD[:, :, 19000:], k_BGSD, v_BGSD, Chunk((19000,), (20000,)), scale=0.1).out_BHSD
    assert (whole[:, :, 19000:] - last).float().norm() / last.float().norm() < 5e-3


def test_blocks_of_rows_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MOST_ROWS", 16)
    for case in CASES:
        check(draw_dense(case))


def test_chunk_longer_than_the_keys_is_refused() -> None:
    q_BHSD, k_BGKD = torch.zeros(1, 2, 8, 64), torch.zeros(1, 1, 8, 64)
    with pytest.raises(ShapeError, match="longest row has 9 keys, k holds 8"):
        dense_prefill(q_BHSD, k_BGKD, k_BGKD, Chunk((1,), (9,)), scale=1.0, backend="cpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_chunk_with_more_keys_than_there_are_is_refused(seed: int) -> None:
    """Of one length or of several; by the hosts' prefill, and decode of several tokens, too."""
    source = random.Random(seed)
    held, rows = source.randrange(2, 40), source.choice([1, 2])
    longest, new = held + source.randrange(1, 9), source.randrange(2, held + 1)
    chunk = Chunk((longest - new,) * rows, (longest, source.choice([longest, longest - 1]))[:rows])
    q_BHSD, k_BGSD = torch.randn(rows, 4, new, 8), torch.randn(rows, 2, held, 8)
    layer = Program.of(None, None, model_info(1, 4, 2)).layers[0]
    view = replace(full_view(k_BGSD, k_BGSD), lengths_B=torch.tensor([longest] * rows, dtype=torch.int32))
    for attend in (
        partial(dense_attention, q_BHSD, k_BGSD, k_BGSD, chunk, scale=0.1),
        partial(prefill, layer, q_BHSD, view, chunk, scale=0.1, fallback=Fallback("cpu")),
        partial(decode, q_BHSD, view, None, scale=0.1),
    ):
        with pytest.raises(ShapeError, match=rf"{longest} .* {held}$"):
            attend()
