"""Random keys and values. Keys are distinct for as long as one `Draws` lives."""

from pathlib import Path

import numpy as np

from sparsekv.planner.tasks.text import PieceEncoder, TaskError

_DATA = Path(__file__).parent / "data"

# Common, concrete words, so that most are one token in most vocabularies. The lists mix words that a vocabulary of a
# few thousand entries holds whole with words that it has to spell out, so that a model trained on these keys also
# learns to match keys of several tokens.
FIRST_WORDS, SECOND_WORDS = (tuple((_DATA / f"{name}_words.txt").read_text().split()) for name in ("first", "second"))
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
            raise TaskError(
                f"expected at most {KEYS * 3 // 4} keys in a document, found {len(self._used) + count}; "
                "use a shorter length"
            )
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


def longest_key(encoder: PieceEncoder, joiner: str = "-") -> int:
    """Tokens of the longest key that `Draws.keys` can give."""
    first = encoder.encode_all([(f" {word}",) for word in FIRST_WORDS])
    second = encoder.encode_all([(joiner + word,) for word in SECOND_WORDS])
    return max(map(len, first)) + max(map(len, second))


def longest_value(digits: int) -> int:
    """Tokens that no value of `Draws.values` exceeds: no tokenizer needs more than one a character."""
    return 1 + digits
