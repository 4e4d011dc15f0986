"""Exact output: the tokens of a draft and its check."""

import pytest

from sparsekv.plans.brief import tokens_a_cycle


def test_tokens_of_a_cycle_are_those_of_every_outcome() -> None:
    """Drafts count up to the first that does not, and a token follows."""
    share, drafted = 0.9, 4
    expected = sum(share**n * (1 - share) * (n + 1) for n in range(drafted)) + share**drafted * (drafted + 1)
    assert tokens_a_cycle(share, drafted) == pytest.approx(expected)
    assert tokens_a_cycle(1.0, drafted) == drafted + 1
    assert tokens_a_cycle(0.5, 0) == 1
