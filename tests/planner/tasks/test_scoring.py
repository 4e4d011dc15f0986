"""When a generated text counts as the answer."""

import pytest

from sparsekv.planner.tasks import matches


@pytest.mark.parametrize(
    "generated",
    [
        "12345",
        " 12345",
        "  12345\n",
        "\n12345",
        "12345.",
        "12345. And more 678",
        "12345\n- other-key: 99999",
        "12345<|endoftext|>",
        "12345 6",
    ],
)
def test_the_answer_counts_with_space_around_it_and_whatever_follows(generated: str) -> None:
    assert matches(generated, " 12345")


@pytest.mark.parametrize(
    "generated", ["", " ", "1234", "123456", "12345678", "The 12345", "-12345", "12 345", "1 2345"]
)
def test_other_numbers_longer_numbers_and_late_answers_do_not_count(generated: str) -> None:
    assert not matches(generated, " 12345")


def test_chains_count_as_a_whole() -> None:
    answer = " VAR total_party = VAR odd_total = 29103"
    assert matches("VAR total_party = VAR odd_total = 29103\n", answer)
    assert not matches("VAR total_party = 29103", answer)
    assert not matches("VAR total_party = VAR odd_total = 291034", answer)
    assert not matches("VAR Total_party = VAR odd_total = 29103", answer)


def test_an_answer_that_ends_in_a_word_may_be_followed_by_digits() -> None:
    assert matches("amber-falcon2", "amber-falcon")
