"""Lengths, ids, and sizes as tokens or shares of the context, by which chunks of a prompt are as dense as the whole."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, computed_tiles
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import AShape, Pattern, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.types import MAX_LENGTH, format_ids, format_length, parse_ids, parse_length


@given(st.integers(1, 1 << 21), st.floats(1e-6, 1.0))
def test_a_fraction_never_resolves_outside_the_context(length: int, share: float) -> None:
    assert 1 <= fraction(share).resolve(length) <= length


@pytest.mark.parametrize(
    ("share", "length", "expected"), [(0.1, 1000, 100), (0.1, 1001, 101), (1.0, 7, 7), (0.3, 10, 3)]
)
def test_fractions_round_up_without_binary_surprises(share: float, length: int, expected: int) -> None:
    assert fraction(share).resolve(length) == expected


def test_tokens_are_cut_to_the_context() -> None:
    assert (tokens(5).resolve(10), tokens(50).resolve(10), tokens(0).resolve(10)) == (5, 10, 0)


@given(length=st.integers(1, 1 << 20), counts=st.tuples(*[st.integers(0, 1 << 16)] * 3))
def test_shares_of_the_context_are_the_same_tokens_at_the_planned_length(length: int, counts: tuple[int, ...]) -> None:
    vertical, slash, most = (tokens(min(count, length)) for count in counts)
    pattern = VerticalSlash(vertical=vertical, slash=slash, max_tiles=most)
    shares = pattern.of_context(length)
    assert shares.in_tokens(length) == pattern
    for name in ("vertical", "slash", "max_tiles"):
        assert getattr(shares, name).resolve(length) == getattr(pattern, name).resolve(length)
        assert getattr(shares, name).resolve(length // 2) <= getattr(pattern, name).resolve(length) // 2 + 1
    window = AShape(sink=tokens(64), window=tokens(256))
    assert window.of_context(length) is window


def test_chunks_of_a_prompt_have_the_density_of_the_whole_by_shares_where_diagonals_scatter() -> None:
    length, lines = 4096, VerticalSlash(vertical=tokens(96), slash=tokens(600), max_tiles=tokens(1024))
    shares = lines.of_context(length)
    whole, cut = density(lines, [0, length]), range(0, length + 1, 1024)
    assert density(shares, [0, length]) == whole
    assert density(lines, cut) > 1.3 * whole
    assert whole < density(shares, cut) < 1.15 * whole


def density(pattern: Pattern, ends: Sequence[int]) -> float:
    """Computed tiles over causal tiles of a prompt that is cut at these tokens."""
    generator, tile = torch.Generator().manual_seed(0), TileShape(query=64, key=64)
    q_BHSD, k_BHSD = torch.randn(2, 1, 1, ends[-1], 32, generator=generator)
    computed = causal = 0.0
    for first, end in pairwise(ends):
        chunk, q_BHTD = Chunk.uniform(1, first, end), q_BHSD[:, :, first:end]
        index = build_index((pattern,), q_BHTD, k_BHSD[:, :, :end], chunk, tile, scale=1.0, window=None)
        computed += computed_tiles(index).sum().item()
        causal += chunk.causal_tiles(tile)
    return computed / causal


# --- lengths and ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "length"),
    [("32k", 32768), ("1m", 1048576), ("1M", 1048576), (" 8K ", 8192), ("100", 100), ("128000", 128000)],
)
def test_lengths_mean_powers_of_two(text: str, length: int) -> None:
    assert parse_length(text) == length


@pytest.mark.parametrize(
    "text",
    ["", "0", "0k", "-1", "1.5k", "k", "32kb", "1e3", "32 k", "9999999999999m", "٣k", "1_000", "nan", "1" * 5000],
    ids=lambda value: ascii(value)[:20],
)
def test_a_length_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_length(text)


@given(st.integers(1, MAX_LENGTH))
def test_lengths_read_back(length: int) -> None:
    assert parse_length(format_length(length)) == length


@given(st.sets(st.integers(0, 1023), min_size=1))
def test_sets_of_ids_read_back(ids: set[int]) -> None:
    assert parse_ids(format_ids(ids)) == tuple(sorted(ids))
