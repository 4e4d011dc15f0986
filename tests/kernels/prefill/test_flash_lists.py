"""Lowering an index to block lists, held against what each tile is: seen by every row, by some, or by none."""

from dataclasses import dataclass
from typing import Any

import flash_emulator
import pytest
import torch
from attention_cases import Case, draw
from flash_cases import SQUARE, TALL
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.prefill.flash.call import HeadRange, Span, dense_ranges, lower, spans, widest
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import TileShape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel runs there")

SMALL = TileShape(query=64, key=64)


@dataclass(frozen=True)
class Drawn:
    case: Case
    list_dense: bool


@st.composite
def drawn(draw_from: st.DrawFn) -> Drawn:
    past = draw_from(st.lists(st.integers(0, 400), min_size=1, max_size=2))
    lengths = [start + draw_from(st.integers(0, 400)) for start in past]
    lengths[0] += 1  # some row is no padding
    case = Case(
        "drawn",
        past=tuple(past),
        lengths=tuple(lengths),
        heads=3,
        dim=16,
        tile=draw_from(st.sampled_from([SQUARE, TALL, SMALL, TileShape(query=64, key=128)])),
        share=draw_from(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        dense_heads=draw_from(st.sampled_from([(), (1,), (0, 2), (0, 1, 2)])),
        window=draw_from(st.none() | st.integers(1, 500)),
        spare_rows=draw_from(st.integers(0, 150)),
        seed=draw_from(st.integers(0, 999)),
    )
    return Drawn(case, draw_from(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(one=drawn())
def test_lists_hold_each_tile_once_where_it_belongs(one: Drawn) -> None:
    problem = draw(one.case)
    asked = {"window": one.case.window, "list_dense": one.list_dense}
    found, expected = (by(problem.index, problem.chunk, **asked) for by in (lower, flash_emulator.lower))
    for counts, tiles in (("full_block_cnt_BHT", "full_block_idx_BHTW"), ("mask_block_cnt_BHT", "mask_block_idx_BHTE")):
        counts_BHT = getattr(expected, counts)
        assert torch.equal(getattr(found, counts), counts_BHT)
        assert counts_BHT.max() <= getattr(expected, tiles).shape[3]
        is_listed = torch.arange(getattr(expected, tiles).shape[3]) < counts_BHT[..., None]
        assert torch.equal(getattr(found, tiles)[is_listed], getattr(expected, tiles)[is_listed])


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("past", [0, 256, 77])
def test_lists_are_no_wider_than_they_have_to_be(past: int, window: int | None) -> None:
    case = Case("x", past=(past,), lengths=(past + 700,), tile=SQUARE, share=0.3, window=window)
    problem = draw(case)
    lists = lower(problem.index, problem.chunk, window=window)
    assert lists.full_block_idx_BHTW.shape == problem.index.tiles_BHTW.shape
    crossed = 1 if past % 128 == 0 else 2
    assert lists.mask_block_idx_BHTE.shape[3] <= crossed + (0 if window is None else 2)
    if window is None:  # the index's own memory
        assert lists.full_block_idx_BHTW is problem.index.tiles_BHTW


def test_one_kernel_serves_chunks_wherever_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine compiles it in a chunk that ends the longest prompt, and a first one begins at a tile."""
    options: list[dict[str, Any]] = []
    launches = type("Launches", (), {"__getitem__": lambda self, grid: lambda *args, **given: options.append(given)})()
    monkeypatch.setattr("sparsekv.kernels.prefill.flash.call.lists_kernel", launches)
    for past in (0, 256, 77):
        problem = draw(Case("x", past=(past,), lengths=(past + 700,), tile=SQUARE, share=0.3))
        lower(problem.index, problem.chunk)
    assert options == options[:1] * 3


def test_a_dense_head_in_a_window_needs_no_list_of_every_tile() -> None:
    assert widest(Chunk((0,), (1 << 20,)), SQUARE, 1024) == 10
    assert widest(Chunk((0,), (1 << 20,)), SQUARE, None) == 8192
    assert widest(Chunk((0,), (300,)), SQUARE, 1024) == 3


def test_an_index_without_lists_gives_empty_ones_of_a_width_that_can_be_passed() -> None:
    problem = draw(Case("x", lengths=(300,), tile=SQUARE, share=0.0))
    assert problem.index.tiles_BHTW.shape[3] == 0
    lists = lower(problem.index, problem.chunk)
    assert lists.full_block_idx_BHTW.shape[3] == lists.mask_block_idx_BHTE.shape[3] == 1
    assert not lists.full_block_cnt_BHT.any()
    assert not lists.mask_block_cnt_BHT.any()


def test_a_uniform_batch_is_one_launch_and_a_ragged_one_is_cut_where_it_changes() -> None:
    assert list(spans(Chunk.uniform(4, 7, 90))) == [Span(slice(0, 4), 7, 90)]
    chunk = Chunk((0, 0, 0, 5), (9, 9, 8, 8))
    assert list(spans(chunk)) == [Span(slice(0, 2), 0, 9), Span(slice(2, 3), 0, 8), Span(slice(3, 4), 5, 8)]


@pytest.mark.parametrize(
    ("heads", "group", "runs"),
    [
        ((), 4, []),
        (range(8), 4, [(0, 8, 0, 2)]),
        ((4, 5, 6, 7), 4, [(4, 8, 1, 2)]),
        ((1, 2, 7), 4, [(1, 2, 0, 1), (2, 3, 0, 1), (7, 8, 1, 2)]),
        ((3, 4, 5, 6, 7, 8), 4, [(4, 8, 1, 2), (3, 4, 0, 1), (8, 9, 2, 3)]),
        ((0, 2), 1, [(0, 1, 0, 1), (2, 3, 2, 3)]),
        ((0, 1, 2), 2, [(0, 2, 0, 1), (2, 3, 1, 2)]),
    ],
)
def test_dense_heads_are_cut_into_launches_that_keep_the_grouping(heads, group: int, runs) -> None:
    assert list(dense_ranges(list(heads), group)) == [HeadRange(slice(a, b), slice(c, d)) for a, b, c, d in runs]


@given(st.sets(st.integers(0, 23)), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_dense_head_is_in_one_launch_beside_its_own_kv_head(heads: set[int], group: int) -> None:
    seen = []
    for run in dense_ranges(sorted(heads), group):
        count, kv_count = run.heads.stop - run.heads.start, run.kv_heads.stop - run.kv_heads.start
        assert count % kv_count == 0
        for place in range(count):
            head = run.heads.start + place
            assert run.kv_heads.start + place // (count // kv_count) == head // group
            seen.append(head)
    assert sorted(seen) == sorted(heads)
