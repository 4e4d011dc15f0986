import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import MAX_LENGTH, format_ids, format_length, parse_ids, parse_length


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
