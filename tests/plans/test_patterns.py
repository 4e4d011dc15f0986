import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.plans.patterns import fraction, tokens


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
