"""Decode attention over chosen tokens: every backend against the brute-force answer."""

from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, GPU_CASES, DecodeCase, assert_close, attend, draw

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.plans.errors import ShapeError

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")


def check(case: DecodeCase, backend: str, device: str = "cpu") -> None:
    problem = draw(case, device)
    for want_lse in (True, False):
        found = attend(problem, backend, want_lse)
        assert (found.lse_BHS is not None) == want_lse
        assert_close(found, problem)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_backend_attends_to_the_chosen_tokens_only(case: DecodeCase) -> None:
    check(case, "cpu")


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_kernels_attend_to_the_chosen_tokens_only(case: DecodeCase) -> None:
    check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gpu_backends_attend_to_the_chosen_tokens_only(case: DecodeCase, backend: str) -> None:
    check(case, backend, "cuda")


@needs_interpreter
@pytest.mark.parametrize("runs", [1, 2, 3, 64])
def test_split_of_the_tokens_never_changes_the_answer(runs: int) -> None:
    from sparsekv.kernels.decode.triton_backend import decode

    problem = draw(DecodeCase("x", listed=150, tail=(230, 300)))
    found = decode(
        problem.q_BHQD,
        problem.k_BGSD,
        problem.v_BGSD,
        problem.rows,
        scale=problem.scale,
        want_lse=True,
        runs=runs,
    )
    assert_close(found, problem)


def test_misfits_are_refused_with_what_was_found() -> None:
    problem = draw(DecodeCase("x"))
    tokens = problem.rows.tokens_BGN

    def refuse(message: str, rows: DecodeRows = problem.rows, q: torch.Tensor = problem.q_BHQD) -> None:
        with pytest.raises(ShapeError, match=message):
            decode_attention(q, problem.k_BGSD, problem.v_BGSD, rows, scale=0.1, backend="cpu")

    refuse("takes one query token a call, found 2", q=problem.q_BHQD.expand(-1, -1, 2, -1))
    refuse("tokens must be \\[1, 1 or 2, listed\\]", replace(problem.rows, tokens_BGN=tokens.expand(1, 3, -1)))
    refuse("tokens must be int32", replace(problem.rows, tokens_BGN=tokens.long()))
    refuse("stride 1 in their last dimension", replace(problem.rows, tokens_BGN=tokens[..., ::2]))
    refuse("tail_stop <= 300 keys, found \\[280, 301\\)", replace(problem.rows, tail_stop=301))
    refuse("found \\[290, 280\\)", replace(problem.rows, tail_start=290, tail_stop=280))
