"""Random keys and values. Keys are distinct for as long as one `Draws` lives."""

from collections.abc import Iterable

import numpy as np

from sparsekv.planner.tasks.types import TaskError
from sparsekv.planner.tasks.words import FIRST_WORDS, SECOND_WORDS

KEYS = len(FIRST_WORDS) * len(SECOND_WORDS)

Pieces = tuple[str, ...]


class Draws:
    """A random generator that never hands out the same key twice.

    Documents that share a row share one `Draws`, so that no key has two values within a row.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._used: set[int] = set()

    def keys(self, count: int, joiner: str = "-") -> list[Pieces]:
        """Distinct two-word keys as pieces to encode: `(" amber", "-falcon")`.

        Raises:
            TaskError: more keys than the word lists can give.
        """
        if len(self._used) + count > KEYS * 3 // 4:
            raise TaskError(f"{count} more keys asked for, {len(self._used)} of {KEYS} are taken; use a shorter length")
        chosen: list[int] = []
        while len(chosen) < count:
            for number in self.rng.integers(0, KEYS, count - len(chosen)).tolist():
                if number not in self._used:
                    self._used.add(number)
                    chosen.append(number)
        return [_key(number, joiner) for number in chosen]

    def values(self, count: int, digits: int) -> list[str]:
        """Decimal numbers of exactly `digits` digits, each with a leading space."""
        return [f" {number}" for number in self.rng.integers(10 ** (digits - 1), 10**digits, count).tolist()]


def _key(number: int, joiner: str) -> Pieces:
    first, second = divmod(number, len(SECOND_WORDS))
    return f" {FIRST_WORDS[first]}", joiner + SECOND_WORDS[second]


def text_of(pieces: Iterable[str]) -> str:
    """The text that pieces spell."""
    return "".join(pieces)
