"""Scores of tokens in the pass of attention, and the choice of the best: every backend against brute force."""

from unittest import mock

import pytest
import torch
from brute_force import capped
from decode_cases import DecodeCase, DecodeProblem, assert_close, draw, with_sinks
from torch_state import torch_threads

from sparsekv.kernels import cpu_threads
from sparsekv.kernels.backends import decode_attention, decode_scores
from sparsekv.kernels.decode.selection import Scoring, choose

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
CASES = [
    DecodeCase("one row", (300,), None),
    DecodeCase("ragged rows", (300, 41, 130), None),
    DecodeCase("groups of three", (200, 90), None, heads=6, kv_heads=2),
    DecodeCase("head size 40, bfloat16", (150, 60), None, dim=40, dtype=torch.bfloat16),
    DecodeCase("head size 512", (90, 40), None, dim=512),
    DecodeCase("pages", (300, 16, 17), None, page=16, interleaved=True),
    DecodeCase("a soft cap", (300, 41), None, cap=1.5),
    DecodeCase("learned sinks", (300, 41), None, learned_sinks=True),
]
GPU_CASES = [
    *CASES,
    DecodeCase("large", (40000, 100, 33000), None, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16),
    DecodeCase("large, pages", (9000, 8500), None, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, page=16),
]


def scoring_of(problem: DecodeProblem, lists: int, skip: int = 1) -> Scoring:
    """Of every row but `skip`, in a scratch that is larger than it need be."""
    starts, total = [], 0
    for b, length in enumerate(problem.case.lengths):
        starts.append(-1 if b == skip else total)
        total += 0 if b == skip else length
    return Scoring(torch.tensor(starts, dtype=torch.int32, device=problem.q_BHQD.device), total + 7, lists)


def expected_scores(problem: DecodeProblem, b: int, lists: int) -> torch.Tensor:
    """[g, length]: the largest softmax weight over the heads of each list."""
    group, length = problem.case.heads // problem.case.kv_heads, problem.case.lengths[b]
    k_GSD = problem.keys.contiguous_keys(problem.keys.capacity)[b, :, :length]
    logits_H1S = problem.q_BHQD[b].float() @ k_GSD.float().repeat_interleave(group, 0).mT * problem.scale
    logits_H1S = with_sinks(capped(logits_H1S, problem.case.cap)[None], problem)[0]
    return logits_H1S.softmax(-1)[:, 0, :length].unflatten(0, (lists, -1)).amax(1)


def check_scores(case: DecodeCase, backend: str, device: str = "cpu", alone: bool = False) -> None:
    """With attention, or without it: then values are not looked at."""
    problem = draw(case, device)
    how = {"scale": problem.scale, "backend": backend}
    if alone:
        problem.keys.v.fill_(float("nan"))
    for lists in {1, case.kv_heads}:
        scoring = scoring_of(problem, lists)
        if alone:
            found_gT = decode_scores(problem.q_BHQD, problem.keys, scoring, **how)
        else:
            found = decode_attention(problem.q_BHQD, problem.keys, scoring=scoring, **how)
            assert_close(found, problem)
            found_gT = found.scores_gT
        assert (found_gT.shape, found_gT.dtype) == ((lists, scoring.tokens), torch.float32)
        for b, start in enumerate(scoring.starts_B.tolist()):
            if start >= 0:
                own = found_gT[:, start : start + case.lengths[b]]
                torch.testing.assert_close(own, expected_scores(problem, b, lists), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("alone", [False, True], ids=["with attention", "alone"])
def test_scores_are_the_largest_attention_weights_and_alone_read_no_values(
    case: DecodeCase, backend: str, alone: bool
) -> None:
    check_scores(case, backend, alone=alone)


def test_cpu_scores_cover_every_block_of_tokens_with_heads_side_by_side() -> None:
    with torch_threads(2), mock.patch.object(cpu_threads, "THREAD_ELEMENTS", 1):
        check_scores(DecodeCase("x", (5000, 30), None, dim=128), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["with attention", "alone"])
def test_gpu_scores_are_the_largest_attention_weights_and_alone_read_no_values(case: DecodeCase, alone: bool) -> None:
    check_scores(case, "triton", "cuda", alone)


def by_sorting(scores_gS: torch.Tensor, count: int, sink: int, recent: int) -> torch.Tensor:
    """[g, count]: the best among the free tokens, the lower position first among equals; ascending."""
    free_gS = scores_gS[:, sink : scores_gS.shape[1] - recent]
    order = free_gS.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return order.sort(1).values + sink


def random_scores(kind: str, lists: int, tokens: int, source: torch.Generator) -> torch.Tensor:
    """Scores as they come, mostly equal ones, or nearly all zero."""
    if kind == "spread":
        return torch.rand((lists, tokens), generator=source) ** 20
    if kind == "equal":
        return torch.randint(0, 3, (lists, tokens), generator=source) / 4
    return torch.zeros((lists, tokens)).masked_fill_(torch.rand((lists, tokens), generator=source) < 0.01, 0.5)


def check_choice(chooser, kind: str, lists: int, rows, device: str = "cpu") -> None:  # type: ignore[no-untyped-def]
    """rows: (length, count) each; a count of None is a row that is not scored."""
    source, sink, recent = torch.Generator().manual_seed(len(kind)), 4, 20
    parts = [random_scores(kind, lists, length, source) for length, count in rows if count is not None]
    scores_gT = torch.cat([*parts, torch.full((lists, 5), float("nan"))], 1)
    starts, total = [], 0
    for length, count in rows:
        starts.append(-1 if count is None else total)
        total += 0 if count is None else length
    lengths_B, starts_B, counts_B = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([length for length, _ in rows], starts, [-1 if count is None else count for _, count in rows])
    )
    most = max(count or 0 for _, count in rows) + 3
    capacity = max(length for length, _ in rows) + 11
    scoring = Scoring(starts_B, scores_gT.shape[1], lists)
    found = chooser(
        scores_gT.to(device),
        scoring,
        lengths_B,
        counts_B,
        capacity=capacity,
        most=most,
        sink=sink,
        recent=recent,
        backend="triton",
    ).cpu()
    assert (found.dtype, found.shape) == (torch.int32, (len(rows), lists, most))
    for b, (_, count) in enumerate(rows):
        row = found[b, :, : count or 0]
        if count is not None:
            own = scores_gT[:, starts[b] : starts[b] + rows[b][0]]
            assert torch.equal(row.long(), by_sorting(own, count, sink, recent)), (kind, b)
        assert (found[b, :, count or 0 :] == -1).all()


ROWS = ((5000, 700), (900, None), (300, 276), (41, 0), (2500, 1))
KINDS = ["spread", "equal", "zeros"]


@pytest.mark.parametrize("lists", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_tokens_are_chosen_in_order(kind: str, lists: int) -> None:
    check_choice(choose, kind, lists, ROWS)


def by_radix(scores_gT, scoring, lengths_B, counts_B, backend="", **options):  # type: ignore[no-untyped-def]
    from sparsekv.kernels.decode.radix import choose as radix

    return radix(scores_gT, scoring.starts_B, lengths_B, counts_B, **options)


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_the_radix_select_chooses_the_same(kind: str) -> None:
    check_choice(by_radix, kind, 2, ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("lists", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_radix_select_chooses_the_same_on_a_gpu(kind: str, lists: int) -> None:
    check_choice(by_radix, kind, lists, (*ROWS, (131_072, 2048), (1_000_000, 8000)), "cuda")


@needs_interpreter
def test_scores_that_are_no_numbers_or_too_large_stay_within_bounds() -> None:
    scores_gT = torch.full((1, 100), 0.25)
    scores_gT[0, 30], scores_gT[0, 40], scores_gT[0, 50] = float("nan"), 3.0, float("inf")
    one = torch.tensor([100], dtype=torch.int32)
    found = by_radix(scores_gT, Scoring(one * 0, 100, 1), one, one * 0 + 4, capacity=100, most=4, sink=0, recent=1)
    assert found.tolist() == [[[0, 30, 40, 50]]]
