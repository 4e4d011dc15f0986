"""Sentences, questions and keys of each split (data/wording.toml). Calibration, verification and evaluation share none.

Calibration reads as the training text of the reference model does. The other two are paraphrases of the same form:
entries are `key: value`, assignments `VAR name = value`, so that a model trained on one wording answers the others.
`{key}` and the like in a frame stand for pieces with their leading space.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any

from sparsekv.planner.tasks.text import Split

_DATA = Path(__file__).parent / "data"

# Common, concrete words, so that most are one token in most vocabularies. The lists mix words that a vocabulary of a
# few thousand entries holds whole with words that it has to spell out, so that a model trained on these keys also
# learns to match keys of several tokens.
FIRST_WORDS, SECOND_WORDS = (tuple((_DATA / f"{name}_words.txt").read_text().split()) for name in ("first", "second"))

_SENTENCES: dict[str, Any] = tomllib.loads((_DATA / "wording.toml").read_text())

Pieces = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A line that states something, the question for it, and the beginning of the answer."""

    line: str
    question: str
    cue: str


@dataclass(frozen=True, slots=True)
class Wording:
    """The sentences of one split.

    Attributes:
        second_words: the second words of its keys.
        needle: a number for a key.
        values: one of several numbers for a key.
        keys: numbers for several keys.
        pair: an entry of a list of keys and values.
        linked: a key for another key.
        traced: an assignment, followed back from the last variable of a chain.
        chained: an assignment, all variables of a chain being asked for.
        common: a list of words of which the most common are asked for.
        frequent: the same for coded words.
        quoted: the line in front of a quotation of prose.
        repeated: the line in front of a quotation of code.
    """

    second_words: tuple[str, ...]
    needle: Asked
    values: Asked
    keys: Asked
    pair: Asked
    linked: Asked
    traced: Asked
    chained: Asked
    common: Asked
    frequent: Asked
    quoted: str
    repeated: str


def filled(frame: str, **fields: Pieces) -> Pieces:
    """A frame as pieces, with those of each field in its place."""
    parsed = ((literal, name) for literal, name, _, _ in Formatter().parse(frame))
    return tuple(piece for literal, name in parsed for piece in (*filter(None, [literal]), *fields.get(name or "", ())))


def _wording(split: Split, second_words: tuple[str, ...]) -> Wording:
    # Calibration reads as the training text does, whose keys are others.
    table = _SENTENCES["training" if split is Split.CALIBRATION else split.value]
    sentences: dict[str, Any] = {
        name: Asked(**value) if isinstance(value, dict) else value for name, value in table.items()
    }
    return Wording(second_words, **sentences)


WORDINGS: Mapping[Split, Wording] = MappingProxyType(
    {
        Split.TRAINING: _wording(Split.TRAINING, SECOND_WORDS),
        Split.CALIBRATION: _wording(Split.CALIBRATION, SECOND_WORDS[::3]),
        Split.VERIFICATION: _wording(Split.VERIFICATION, SECOND_WORDS[1::3]),
        Split.EVALUATION: _wording(Split.EVALUATION, SECOND_WORDS[2::3]),
    }
)
