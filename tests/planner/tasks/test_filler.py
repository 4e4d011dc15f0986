"""Filler text: any number of tokens that end with a line, and statements between its lines."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from task_tokenizers import kit_named

from sparsekv.planner.tasks.text import Filler, plant

LINES = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def made_of(sizes: list[int]) -> Filler:
    """Token i is i, so that every excerpt shows where it comes from."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return Filler(np.arange(ends[-1], dtype=np.int32), ends)


@given(sizes=LINES, count=st.integers(0, 400), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_an_excerpt_has_so_many_tokens_and_runs_on_from_the_start_where_text_ends(sizes, count, seed) -> None:
    filler = made_of(sizes)
    ids, breaks = filler.excerpt(count, np.random.default_rng(seed))
    total = len(filler.ids)
    assert len(ids) == count
    assert ids.dtype == np.int32
    assert ((np.diff(ids) - 1) % total == 0).all()
    if count:
        assert ids[-1] + 1 in filler.line_ends
        expected = [i + 1 for i in range(count) if ids[i] + 1 in filler.line_ends]
        assert breaks.tolist() == expected


@given(sizes=LINES, share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_an_excerpt_that_the_text_can_give_is_one_stretch_of_it(sizes, share, seed) -> None:
    filler = made_of(sizes)
    ids, _ = filler.excerpt(round(share * len(filler.ids)), np.random.default_rng(seed))
    assert (np.diff(ids) == 1).all()


@given(
    sizes=LINES,
    count=st.integers(0, 200),
    lines=st.lists(st.lists(st.integers(-9, -1), min_size=1, max_size=5), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_planting_keeps_the_text_and_the_lines_whole_and_in_order(sizes, count, lines, seed) -> None:
    rng = np.random.default_rng(seed)
    text, breaks = made_of(sizes).excerpt(count, rng)
    wanted = np.sort(rng.integers(0, count + 1, len(lines))).astype(np.int32)
    ids, is_text = plant(text, breaks, lines, wanted)
    assert ids[is_text].tolist() == text.tolist()
    assert ids[~is_text].tolist() == [token for line in lines for token in line]
    starts = np.flatnonzero(~is_text & np.concatenate([[True], is_text[:-1]]))
    assert all(start == 0 or is_text[:start].sum() in breaks for start in starts)


def test_text_is_read_line_by_line() -> None:
    encoder = kit_named("characters").encoder
    filler = Filler.from_text("one\n\n  two\nend", encoder)
    assert filler.line_ends.tolist() == [4, 5, 11, 14]
