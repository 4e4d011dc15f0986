"""Decode attention of several new tokens a row: every backend against brute force, on poisoned memory."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from brute_force import capped
from decode_cases import DecodeCase, DecodeProblem, draw
from torch_state import poisoned_memory

from sparsekv.kernels.backends import decode_attention, decode_scores
from sparsekv.kernels.decode.selection import Scoring
from sparsekv.kernels.keys import Requests
from sparsekv.plans.errors import ShapeError

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
CASES = [
    (DecodeCase("two", (300, 2), None), 2, None),
    (DecodeCase("seven of one length", (300, 300), None), 7, None),
    (DecodeCase("seven, ragged, three heads a KV head", (300, 41, 7), None, heads=6), 7, None),
    (DecodeCase("sixteen, groups of eight", (130, 16), None, heads=8, kv_heads=1), 16, None),
    (DecodeCase("mixed counts, a row without any", (300, 41, 90, 12), None), 5, (5, 1, 0, 3)),
    (DecodeCase("a row without tokens", (0, 90), None), 4, (0, 4)),
    (DecodeCase("a window that ends between the new tokens", (300, 52, 20), None, window=50), 6, (6, 4, 6)),
    (DecodeCase("a window shorter than the new tokens", (300, 9), None, window=3), 7, None),
    (DecodeCase("pages, bfloat16", (300, 41), None, page=16, interleaved=True, dtype=torch.bfloat16), 7, (7, 2)),
    (DecodeCase("head size that is no power of two", (90, 33), None, dim=40), 3, None),
    (DecodeCase("head size 512", (90, 33), None, dim=512), 3, (3, 2)),
    (DecodeCase("learned sinks and a soft cap", (300, 41), None, learned_sinks=True, cap=1.5), 7, (7, 6)),
    (DecodeCase("8 bits", (300, 41), None, float8="kv"), 7, (7, 2)),
    (DecodeCase("8 bits of one length", (300, 300), None, float8="kv", dtype=torch.bfloat16), 7, None),
]
GPU_CASES = [
    (DecodeCase("long", (40000, 300), None, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16), 7, None),
    (DecodeCase("long, 16", (40000, 9001), None, heads=32, kv_heads=4, dim=128, dtype=torch.bfloat16), 16, (16, 9)),
    (DecodeCase("head size 256", (5000,), None, dim=256, dtype=torch.bfloat16), 7, None),
    (DecodeCase("head size 512", (5000,), None, heads=32, kv_heads=4, dim=512, dtype=torch.bfloat16), 7, None),
]


def problem_of(case: DecodeCase, queries: int, device: str = "cpu") -> DecodeProblem:
    seen = case.window and case.window + queries - 1  # by the oldest new token or a later one: all else is NaN
    problem = draw(replace(case, window=seen), device)
    generator = torch.Generator().manual_seed(case.seed + 1)
    q_BHQD = torch.randn((len(case.lengths), case.heads, queries, case.dim), generator=generator)
    return replace(problem, case=case, q_BHQD=q_BHQD.to(case.dtype).to(device))


def oracle(problem: DecodeProblem, counts: tuple[int, ...]) -> torch.Tensor:
    """The output in float64, a query and a head at a time."""
    case, q, keys = problem.case, problem.q_BHQD.double(), problem.keys
    out = torch.zeros_like(q)
    for b, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        for number in range(count):
            end = length - count + number + 1
            begin = max(0, end - case.window) if case.window else 0
            for h in range(case.heads):
                g = h // (case.heads // case.kv_heads)
                k, v = (
                    keys.head(x, b, g, torch.arange(begin, end, device=x.device)).double() for x in (keys.k, keys.v)
                )
                if keys.scales is not None:
                    k, v = k * keys.scales.k_G[g], v * keys.scales.v_G[g]
                scores = capped(k @ q[b, h, number] * problem.scale, case.cap)
                sinks_H = keys.softmax.sinks_H
                every = scores if sinks_H is None else torch.cat((scores, sinks_H[h : h + 1].double()))
                out[b, h, number] = (scores - every.logsumexp(0)).exp() @ v
    return out


def check(case: DecodeCase, queries: int, counts: tuple[int, ...] | None, backend: str, device: str = "cpu") -> None:
    problem = problem_of(case, queries, device)
    new_B = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=device)
    expected = oracle(problem, counts or (queries,) * len(case.lengths))
    tolerance = 3e-2 if case.dtype == torch.bfloat16 else 1e-4
    with poisoned_memory():
        found = decode_attention(
            problem.q_BHQD, problem.keys, scale=problem.scale, window=case.window, new_B=new_B, backend=backend
        )
    assert found.out_BHSD.dtype == case.dtype
    torch.testing.assert_close(found.out_BHSD.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("case", "queries", "counts"), CASES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_new_tokens_see_what_is_before_them_and_themselves(backend, case, queries, counts) -> None:
    check(case, queries, counts, backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "queries", "counts"), [*CASES, *GPU_CASES], ids=str)
def test_new_tokens_see_what_is_before_them_and_themselves_on_a_gpu(case, queries, counts) -> None:
    check(case, queries, counts, "triton", "cuda")


@dataclass(frozen=True)
class Shared:
    """Requests whose rows read their keys together: how many rows each has, and which rows are scored."""

    case: DecodeCase
    counts: tuple[int, ...]
    unscored: tuple[int, ...] = ()
    lists: int = 1


RAGGED, PAGED = (300, 41, 7, 90), {"chosen": None, "page": 16, "interleaved": True}
SHARED = [
    Shared(DecodeCase("groups of four", RAGGED, heads=8, **PAGED), (4, 1, 0, 3), (2, 4)),
    Shared(DecodeCase("groups of three, a list a KV head", RAGGED, heads=6, **PAGED), (5, 5, 1, 2), (), 2),
    Shared(DecodeCase("no groups, one row not scored", RAGGED, heads=2, **PAGED), (2, 2, 2, 2), (0, 7), 2),
    Shared(DecodeCase("groups of eight, bfloat16", RAGGED, heads=16, dtype=torch.bfloat16, **PAGED), (4, 4, 4, 4)),
    Shared(
        DecodeCase("head size 40, sinks, a cap", RAGGED, dim=40, learned_sinks=True, cap=1.5, **PAGED), (3, 1, 2, 0)
    ),
    Shared(DecodeCase("8 bits", RAGGED, float8="qkv", dtype=torch.bfloat16, **PAGED), (4, 1, 0, 3), (0,), 2),
]
LARGE = [
    Shared(
        DecodeCase("large", (40000, 300, 9001), heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, **PAGED),
        (4, 4, 2), (9,),
    ),
    Shared(DecodeCase("of 8", (9000, 41), heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, **PAGED), (8, 1), (), 8),
]  # fmt: skip


def check_shared(shared: Shared, backend: str, device: str = "cpu") -> None:
    """Against each row by itself; rows of a captured step behind the last one are left alone, and so is a request none
    of whose rows has tokens."""
    case, rows = shared.case, sum(shared.counts) + 2
    drawn = draw(case, device)
    owner_R = torch.arange(len(shared.counts)).repeat_interleave(torch.tensor(shared.counts))
    ends = [length - left for length, n in zip(case.lengths, shared.counts, strict=True) for left in reversed(range(n))]
    lengths = [*ends[: -shared.counts[-1] or None], *[0] * shared.counts[-1], 0, 0]
    starts, end = [], 0
    for row, length in enumerate(lengths):
        starts.append(end if length and row not in shared.unscored else -1)
        end += length if starts[-1] >= 0 else 0
    lengths_R, starts_R, first_X = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths, starts, (0, *accumulate(shared.counts)))
    )
    owner_R = torch.cat((owner_R, owner_R.new_zeros(2))).to(device)
    keys = replace(drawn.keys, lengths_B=lengths_R)
    apart, requests = replace(keys, table_BP=keys.table_BP[owner_R]), Requests(owner_R, first_X, max(shared.counts))
    source = torch.Generator().manual_seed(1)
    q_RHQD = torch.randn((rows, case.heads, 1, case.dim), generator=source).to(drawn.q_BHQD.dtype).to(device)
    scoring = Scoring(starts_R, end, shared.lists)
    found = []
    for view in (apart, replace(keys, requests=requests)):
        out_RHQD = torch.full(q_RHQD.shape, 7.0, dtype=case.dtype, device=device)
        with poisoned_memory():
            found.append(
                decode_attention(q_RHQD, view, scale=drawn.scale, scoring=scoring, out=out_RHQD, backend=backend)
            )
            scores_gT = decode_scores(q_RHQD, view, scoring, scale=drawn.scale, backend=backend)
        torch.testing.assert_close(scores_gT, found[-1].scores_gT, atol=1e-6, rtol=1e-5)
    alone, together = found
    assert (together.out_BHSD[lengths_R == 0] == 7.0).all()
    tolerance = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(together.out_BHSD, alone.out_BHSD, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(together.scores_gT, alone.scores_gT, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("shared", SHARED, ids=lambda shared: str(shared.case))
@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_rows_of_a_request_that_read_its_keys_once_are_each_as_by_itself(backend, shared) -> None:
    check_shared(shared, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [*SHARED, *LARGE], ids=lambda shared: str(shared.case))
def test_rows_of_a_request_that_read_its_keys_once_are_each_as_by_itself_on_a_gpu(shared) -> None:
    check_shared(shared, "triton", "cuda")


def test_more_new_tokens_than_a_call_takes_are_refused_and_so_are_several_beside_a_choice() -> None:
    for case, queries in ((DecodeCase("x", (300,), None), 17), (DecodeCase("x", (300,)), 2)):
        problem = problem_of(case, queries)
        with pytest.raises(ShapeError, match=str(queries)):
            decode_attention(problem.q_BHQD, problem.keys, problem.selection, scale=1.0, backend="cpu")


@needs_interpreter
@pytest.mark.parametrize("by_token", [False, True])
def test_several_tokens_are_written_behind_each_row_where_the_step_finds_its_keys(by_token: bool) -> None:
    from sparsekv.kernels.decode.place import append_newest
    from sparsekv.kernels.keys import COLUMNS, HEAD, KEYS, ROW, TOKEN, VALUES, KeyView

    k, v = torch.zeros((2, 2, 50, 3, 16) if by_token else (2, 2, 3, 50, 16)).unbind()
    k, v = (x.transpose(1, 2) if by_token else x for x in (k, v))
    new_k, new_v = torch.randn(2, 2, 3, 4, 16).unbind()
    anchor = torch.zeros(1, 3, 1, 16)
    where = torch.zeros(COLUMNS, dtype=torch.int64)
    where[KEYS], where[VALUES] = ((x.data_ptr() - anchor.data_ptr()) // 4 for x in (k, v))
    where[ROW], where[HEAD], where[TOKEN] = (step // 16 for step in k.stride()[:3])
    lengths_B = torch.tensor([50, 9], dtype=torch.int32)
    append_newest(KeyView(anchor, anchor, lengths_B, None, where), new_k, new_v)
    for x, new in ((k, new_k), (v, new_v)):
        assert torch.equal(x[0, :, 46:], new[0])
        assert torch.equal(x[1, :, 5:9], new[1])
        assert x.count_nonzero() == new.count_nonzero()
