"""Decode attention over all tokens or a selection, contiguous or paged: every backend against brute force."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from decode_cases import CASES, GPU_CASES, DecodeCase, assert_close, attend, draw
from torch.utils._python_dispatch import TorchDispatchMode
from torch_state import poisoned_memory, torch_threads

from sparsekv.kernels import cpu_threads
from sparsekv.kernels.backends import decode_attention, decode_scores
from sparsekv.kernels.decode.selection import ALL, Scoring, Selection, choose
from sparsekv.kernels.keys import (
    COLUMNS,
    HEAD,
    KEYS,
    ROW,
    TOKEN,
    VALUES,
    KeyView,
    full_view,
    in_8_bits,
    stored_as_bytes,
)  # fmt: skip
from sparsekv.plans.errors import ShapeError

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")


def check(case: DecodeCase, backend: str, device: str = "cpu") -> None:
    problem = draw(case, device)
    assert_close(attend(problem, backend), problem)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_backend_attends_to_the_selected_tokens_only(case: DecodeCase) -> None:
    check(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_backend_joins_blocks_of_tokens_with_heads_side_by_side(dtype: torch.dtype) -> None:
    with torch_threads(2), mock.patch.object(cpu_threads, "THREAD_ELEMENTS", 1):
        check(DecodeCase("x", (5000, 30), (4500, ALL), 4500, dim=128, dtype=dtype), "cpu")


class Watch(TorchDispatchMode):
    """Notes how many threads the operations of the calling thread have, and the bytes of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view and any(isinstance(x, torch.Tensor) and x.numel() > 1000 for x in (*args, found)):
            self.threads.add(torch.get_num_threads())
            self.most_bytes = max(self.most_bytes, found.nbytes if isinstance(found, torch.Tensor) else 0)
        return found


def test_a_layer_over_selected_tokens_shares_no_operation_between_threads() -> None:
    """On a busy machine, each would wait for the slowest thread: a time slice of the scheduler."""
    problem = draw(DecodeCase("x", (4000,), (3000,), 3000))
    with torch_threads(2), Watch() as watch:
        attend(problem, "cpu")
    assert watch.threads == {1}


def test_the_choice_on_a_cpu_shares_no_operation_between_threads() -> None:
    scoring, lengths_B = Scoring(torch.tensor([0], dtype=torch.int32), 40000, 1), torch.tensor([40000]).int()
    counts_B, scores = torch.tensor([3000]).int(), torch.rand(1, 40000)
    for row in (scores, torch.ones(1, 40000)):  # all of them equal: decided by position
        with torch_threads(2), Watch() as watch:
            choose(row, scoring, lengths_B, counts_B, capacity=40000, most=50000, sink=4, recent=20, backend="cpu")
        assert watch.threads == {1}


def test_a_filter_layer_on_a_cpu_copies_no_keys() -> None:
    q, k, v = torch.randn(1, 4, 1, 64), *torch.randn(2, 1, 2, 4000, 64)
    scoring = Scoring(torch.zeros(1, dtype=torch.int32), 4000, 1)
    with torch_threads(1), Watch() as watch:
        decode_attention(q, full_view(k, v), scale=0.1, scoring=scoring, backend="cpu")
    assert 0 < watch.most_bytes < k[0, 0].nbytes / 4


@needs_interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_kernels_attend_to_the_selected_tokens_only(case: DecodeCase) -> None:
    check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_gpu_backends_attend_to_the_selected_tokens_only(case: DecodeCase, backend: str) -> None:
    check(case, backend, "cuda")


SPLIT = [
    DecodeCase("ragged", (300, 41, 130), (70, ALL, 80), heads=6),
    DecodeCase("a row without tokens, head size 40, bfloat16", (0, 90), None, dim=40, dtype=torch.bfloat16),
    DecodeCase("a window that leaves splits without tokens", (300,), (70,), window=50),
]


@needs_interpreter
@pytest.mark.parametrize("splits", [1, 3, 16])  # of 10 blocks
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_of_the_tokens_never_changes_the_answer(splits: int, case: DecodeCase) -> None:
    from sparsekv.kernels.decode.triton import DecodeLaunch, decode

    problem = draw(case)
    with poisoned_memory():  # splits without tokens leave their part unwritten
        found = decode(
            problem.q_BHQD,
            problem.keys,
            problem.selection,
            scale=problem.scale,
            window=case.window,
            launch=DecodeLaunch(splits, 32, 4, 1),
        )
    assert_close(found, problem)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_a_row_that_attends_to_everything_is_dense_bit_for_bit(backend: str) -> None:
    problem = draw(DecodeCase("x", (300, 90, 17), (ALL, ALL, ALL)))
    dense = decode_attention(problem.q_BHQD, problem.keys, None, scale=problem.scale, backend=backend)
    assert torch.equal(attend(problem, backend).out_BHSD, dense.out_BHSD)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("page", [16, 64, 128, 256, 272])
def test_paged_keys_give_what_contiguous_keys_give_bit_for_bit(backend: str, page: int) -> None:
    paged = draw(DecodeCase("x", (300, 41, 130), (60, ALL, 80), page=page))
    length = -(-300 // page) * page  # the capacity decides how the tokens are split
    whole = KeyView(*(x.contiguous() for x in paged.keys.contiguous(length)), paged.keys.lengths_B)
    contiguous = replace(paged, keys=whole)
    assert torch.equal(attend(contiguous, backend).out_BHSD, attend(paged, backend).out_BHSD)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("chosen", [(70, 5, ALL, ALL), None])
def test_rows_without_tokens_are_left_as_they_are_in_a_given_output(backend: str, chosen: tuple[int, ...]) -> None:
    """As vLLM has it: token-major pages, and an output in which other rows are another kernel's."""
    case = DecodeCase("x", (300, 130, 0, 41), chosen, page=16, interleaved=True)
    check_given_output(case, backend, "cpu")


@pytest.mark.gpu
def test_rows_without_tokens_are_left_as_they_are_in_a_given_output_on_a_gpu() -> None:
    check_given_output(
        DecodeCase("x", (300, 130, 0, 41), (70, 5, ALL, ALL), page=16, interleaved=True), "triton", "cuda"
    )


def check_given_output(case: DecodeCase, backend: str, device: str) -> None:
    problem = draw(case, device)
    out_BHQD = torch.full((4, 9, 64), 7.0, device=device)[:, 2:6, None]  # heads of a wider tensor
    found = decode_attention(
        problem.q_BHQD, problem.keys, problem.selection, scale=problem.scale, out=out_BHQD, backend=backend
    )
    assert found.out_BHSD.data_ptr() == out_BHQD.data_ptr()
    assert (out_BHQD[2] == 7.0).all()
    out_BHQD[2] = 0.0
    assert_close(found, problem)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_scores_in_memory_of_the_host_are_those_in_memory_of_their_own(backend: str) -> None:
    problem = draw(DecodeCase("x", (300, 41), None, page=16))
    scoring = Scoring(torch.tensor([0, -1], dtype=torch.int32), 320, 2)
    given = replace(scoring, scratch=torch.full((320 * 6 + 5,), 3.0))
    scores = [
        decode_attention(problem.q_BHQD, problem.keys, scale=problem.scale, scoring=one, backend=backend).scores_gT
        for one in (scoring, given)
    ]
    assert torch.equal(scores[0][:, :300], scores[1][:, :300])
    assert (given.scratch[-5:] == 3.0).all()


def test_the_cpu_backend_takes_pages_with_transposed_keys_as_vllm_has_them_there() -> None:
    problem = draw(DecodeCase("x", (300, 41), (60, ALL), page=32))
    keys = replace(problem.keys, k=problem.keys.k.mT.contiguous().mT)
    assert_close(attend(replace(problem, keys=keys), "cpu"), problem)


def test_a_listed_selection_names_every_token_that_a_row_attends_to() -> None:
    lengths_B = torch.tensor([50, 30, 9], dtype=torch.int32)
    chosen = torch.tensor([[[5, 9, 40]], [[7, 0, 0]], [[0, 0, 0]]], dtype=torch.int32)
    listed, counts = Selection(chosen, torch.tensor([3, 1, ALL], dtype=torch.int32), 2, 3).listed(lengths_B)
    rows = [[0, 1, 5, 9, 40, 47, 48, 49], [0, 1, 7, 27, 28, 29, -1, -1], [-1] * 8]
    assert listed.tolist() == [[row] for row in rows]
    assert counts.tolist() == [8, 6, 0]
    listed, _ = Selection(chosen[:, :, :0], torch.zeros(3, dtype=torch.int32), 2, 1).listed(lengths_B)
    assert listed.tolist() == [[[0, 1, 49]], [[0, 1, 29]], [[0, 1, 8]]]


def test_misfits_are_refused_with_what_was_found() -> None:
    problem = draw(DecodeCase("x"))
    keys = problem.keys

    def refuse(message: str, *, q=problem.q_BHQD, keys=keys, backend: str = "cpu") -> None:
        with pytest.raises(ShapeError, match=message):
            decode_attention(q, keys, problem.selection, scale=0.1, backend=backend)

    refuse("found 2", q=problem.q_BHQD.expand(-1, -1, 2, -1))
    refuse("int32 \\(1,\\)", keys=KeyView(keys.k, keys.v, keys.lengths_B.long()))
    refuse("32\\)", keys=KeyView(keys.k, keys.v[..., :32], keys.lengths_B))
    refuse("contiguous", keys=KeyView(keys.k.mT, keys.v.mT, keys.lengths_B), backend="triton")
    refuse("k must", keys=KeyView(keys.k[0], keys.v[0], keys.lengths_B))
    refuse("torch.float32", keys=KeyView(keys.k.half(), keys.v.half(), keys.lengths_B))
    twice = KeyView(*(x.expand(2, -1, -1, -1) for x in (keys.k, keys.v)), keys.lengths_B)
    refuse("\\(2, 2, 300, 64\\)", keys=twice)
    with pytest.raises(ShapeError, match="301 tokens"):
        keys.contiguous(301)


def elsewhere(keys: KeyView, capacity: int) -> tuple[KeyView, tuple[torch.Tensor, torch.Tensor]]:
    """The same keys, found by offsets from tensors that only say their shape; and where they really are."""
    (batch, heads, tokens, size), anchor = keys.k.shape, torch.empty_like(keys.k[:, :, :1])
    k, v = (x.new_empty((batch, heads, tokens + 5, size)) for x in (keys.k, keys.v))
    for own, given in zip((k, v), (keys.k, keys.v), strict=True):
        stored_as_bytes(own)[:, :, :tokens] = stored_as_bytes(given)
    offsets = [(x.data_ptr() - anchor.data_ptr()) // x.element_size() for x in (k, v)]
    where = torch.zeros(COLUMNS, dtype=torch.int64)
    where[[KEYS, VALUES, HEAD, TOKEN, ROW]] = torch.tensor([*offsets, tokens + 5, 1, heads * (tokens + 5)])
    shape = anchor.expand(-1, -1, capacity, -1)
    return KeyView(shape, shape, keys.lengths_B, None, where.to(k.device), scales=keys.scales), (k, v)


def check_elsewhere(device: str) -> None:
    from sparsekv.kernels.decode.place import append_newest

    for chosen in ((70, ALL), None):
        problem = draw(DecodeCase("x", (300, 90), chosen), device)
        there, (k, v) = elsewhere(problem.keys, 512)
        assert_close(attend(replace(problem, keys=there), "triton"), problem)
        new_k, new_v = torch.randn(2, 2, 2, 1, 64, device=device)
        before = k.clone()
        append_newest(there, new_k, new_v)
        for b, length in enumerate(problem.case.lengths):
            assert torch.equal(k[b, :, length - 1], new_k[b, :, 0])
            assert torch.equal(v[b, :, length - 1], new_v[b, :, 0])
            before[b, :, length - 1] = k[b, :, length - 1]
        assert torch.equal(k.nan_to_num(), before.nan_to_num())  # nothing else was written


def check_elsewhere_in_8_bits(device: str) -> None:
    from sparsekv.kernels.decode.place import append_newest

    problem = draw(DecodeCase("x", (300, 90), (70, ALL), float8="kv"), device)
    there, (k, v) = elsewhere(problem.keys, 512)
    assert_close(attend(replace(problem, keys=there), "triton"), problem)
    new = torch.randn(2, 2, 2, 1, 64, device=device) * torch.tensor([0.01, 1, 1000, 1e-6], device=device).repeat(16)
    append_newest(there, *new)
    for x, new_BG1D, scale_G in zip((k, v), new, (there.scales.k_G, there.scales.v_G), strict=True):
        expected_BG1D = in_8_bits(new_BG1D, scale_G)
        for b, length in enumerate(problem.case.lengths):
            assert torch.equal(stored_as_bytes(x)[b, :, length - 1], expected_BG1D[b, :, 0])


@needs_interpreter
def test_keys_are_read_and_written_where_a_tensor_says() -> None:
    check_elsewhere("cpu")
    check_elsewhere_in_8_bits("cpu")


@pytest.mark.gpu
def test_keys_on_a_gpu_are_read_and_written_where_a_tensor_says() -> None:
    check_elsewhere("cuda")
    check_elsewhere_in_8_bits("cuda")


def check_scores_in_8_bits(backend: str, device: str) -> None:
    case = DecodeCase("x", (300, 41), None, float8="qkv", dtype=torch.bfloat16, page=16, interleaved=True)
    problem = draw(case, device)
    scales = replace(problem.keys.scales, dtype=torch.float32)
    k, v = replace(problem.keys, scales=scales).contiguous(304)
    q = problem.q_BHQD.float() * scales.q_G.repeat_interleave(2)[:, None, None]
    starts_B, found = torch.tensor([0, 300], dtype=torch.int32, device=device), []
    whole = KeyView(k, v, problem.keys.lengths_B)
    for queries, keys, by in ((problem.q_BHQD, problem.keys, backend), (q, whole, "reference")):
        scoring = Scoring(starts_B, 341, 2)
        found.append(decode_scores(queries, keys, scoring, scale=problem.scale, backend=by))
        beside = decode_attention(queries, keys, scale=problem.scale, scoring=scoring, backend=by).scores_gT
        torch.testing.assert_close(beside, found[-1], atol=1e-6, rtol=1e-4)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=needs_interpreter)])
def test_scores_of_keys_in_8_bits_are_float32_and_count_the_scales(backend: str) -> None:
    check_scores_in_8_bits(backend, "cpu")


@pytest.mark.gpu
def test_scores_of_keys_in_8_bits_on_a_gpu_are_float32_and_count_the_scales() -> None:
    check_scores_in_8_bits("triton", "cuda")
