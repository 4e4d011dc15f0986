"""Which rows of an engine step are prefill, and which of those run sparse."""

import pytest
import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.paged.plan_host import PlanHost
from sparsekv.runtime.paged.step_rows import (
    PrefillRows,
    Rest,
    StepRows,
    behind_decode,
    contiguous_ranges,
    decode_rows,
    prefill_rows,
)

SPARSE = (AShape(sink=tokens(64), window=tokens(64)),) * 2
LAYER = LayerProgram(0, heads=2, kv_heads=1, window=None, bounds=(512,), patterns=((), SPARSE))


def test_decode_rows_and_padding_are_no_prefill_and_single_prompt_tokens_are() -> None:
    # a decode row, a chunk behind 300 tokens, padding, the last token of a prompt, a prompt computed again
    rows = prefill_rows([0, 1, 101, 101, 102, 152], [80, 400, 0, 513, 50], [False, True, False, True, False])
    assert rows == (
        PrefillRows(1, slice(1, 101), Chunk((300,), (400,))),
        PrefillRows(3, slice(101, 102), Chunk((512,), (513,))),
        PrefillRows(4, slice(102, 152), Chunk((0,), (50,))),
    )


def test_rows_that_a_drafter_proposed_are_no_prefill_and_the_end_of_a_prompt_is() -> None:
    # four rows to be verified, four at the end of a prompt, five of a prompt computed again
    starts, lengths = [0, 4, 8, 13], [80, 400, 60]
    found = prefill_rows(starts, lengths, [False, True, False], decoded=4)
    assert [rows.request for rows in found] == [1, 2]
    assert found[0].chunk == Chunk((396,), (400,))
    assert [rows.request for rows in prefill_rows(starts, lengths, [False] * 3, decoded=4)] == [2]


def test_rows_beside_drafts_are_found_in_the_order_of_either_runner() -> None:
    """Runner V2 sorts verification first, then as many rows of a prompt, then single rows; V1 keeps the order of its
    batch. Lengths count drafts that were rejected, which only the kernel that verifies would read."""
    second = [0, 4, 7, 11, 12, 112], [83, 90, 304, 77, 400], [False, False, True, False, True]
    found = prefill_rows(*second, decoded=4)
    assert [(rows.request, rows.chunk) for rows in found] == [(2, Chunk((300,), (304,))), (4, Chunk((300,), (400,)))]
    assert contiguous_ranges(second[0], frozenset({2, 4})) == ((0, 2), (3, 4))
    optimistic = prefill_rows(second[0], [86, 93, 304, 78, 400], second[2], decoded=4)
    assert optimistic == found
    first = prefill_rows([0, 100, 104, 105], [400, 83, 77], [True, False, False], decoded=4)
    assert [rows.request for rows in first] == [0]
    assert contiguous_ranges((0, 100, 104, 105), frozenset({0})) == ((1, 3),)


def test_requests_before_the_first_chunk_decode_with_the_padding_of_a_captured_step() -> None:
    chunk = prefill_rows([0, 1, 2, 40], [80, 90, 400], [False, False, True])
    assert decode_rows((0, 1, 2, 40), chunk) == 2
    assert decode_rows((0, 1, 2, 2, 2), ()) == 4
    assert decode_rows((0, 40), prefill_rows([0, 40], [40], [True])) == 0


def test_a_single_row_of_a_prompt_before_others_that_decode_is_computed_with_those() -> None:
    """Runner V2 sorts by rows alone; what lies behind the first chunk would be decoded dense, and by nobody counted."""
    starts, lengths, unfinished = [0, 1, 2, 3, 40], [513, 2001, 300, 400], [True, False, True, True]
    alone = behind_decode(starts, unfinished)
    assert alone == [False, False, True, True]
    chunks = prefill_rows(starts, lengths, alone)
    assert [rows.request for rows in chunks] == [2, 3]
    assert decode_rows(starts, chunks) == 2
    assert behind_decode(starts, unfinished, 0) == unfinished  # nothing decodes by the plan
    assert behind_decode([0, 1, 1], [True, False]) == [True, False]  # padding decodes nothing


def test_a_chunk_is_sparse_by_the_length_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [PrefillRows(n, slice(n, n + 1), Chunk((end - 100,), (end,))) for n, end in enumerate((512, 513))]
    host, dense = object.__new__(PlanHost), []
    monkeypatch.setattr(host, "_attend_chunk", lambda layer, step, rows: torch.ones(1), raising=False)
    monkeypatch.setattr(host, "count_dense", lambda layers, chunk: dense.append((layers, chunk)), raising=False)
    out_T = torch.zeros(2)
    assert host.attend_chunks(LAYER, None, chunks, out_T) == {1}
    assert out_T.tolist() == [0, 1]
    assert dense == [((LAYER,), chunks[0].chunk)]


def test_what_is_left_to_the_dense_kernel_is_in_contiguous_ranges_without_padding() -> None:
    starts = (0, 1, 2, 3, 103, 103, 110, 200)  # three that decode, a chunk, padding, two chunks
    assert contiguous_ranges(starts, frozenset({3})) == ((0, 3), (5, 7))
    assert contiguous_ranges(starts, frozenset({5, 6})) == ((0, 4),)
    assert contiguous_ranges(starts, frozenset({0, 3, 6})) == ((1, 3), (5, 6))
    assert contiguous_ranges(starts, frozenset({0, 1, 2, 3, 5, 6})) == ()


def test_what_is_left_to_the_dense_kernel_is_built_once_a_step() -> None:
    asked: list[tuple[int, int]] = []
    step = StepRows((0, 10, 20, 50), (), torch.zeros(3, 1), lambda first, end: asked.append((first, end)) or len(asked))
    for done in ({1}, {1}, {1, 2}, {1}):
        step.rest(frozenset(done))
    assert asked == [(0, 1), (2, 3), (0, 1)]
    assert step.rest(frozenset({1})) == (Rest(slice(0, 10), 1), Rest(slice(20, 50), 2))
