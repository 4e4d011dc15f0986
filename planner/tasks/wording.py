"""Sentences, questions and keys of each split. Calibration, verification and evaluation share none of them.

Calibration reads as the training text of the reference model does. The other two are paraphrases of the same form:
entries are `key: value`, assignments `VAR name = value`, so that a model trained on one wording answers the others.
`{key}` and the like in a frame stand for pieces with their leading space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from types import MappingProxyType

from sparsekv.planner.tasks.text import Split

_DATA = Path(__file__).parent / "data"

# Common, concrete words, so that most are one token in most vocabularies. The lists mix words that a vocabulary of a
# few thousand entries holds whole with words that it has to spell out, so that a model trained on these keys also
# learns to match keys of several tokens.
FIRST_WORDS, SECOND_WORDS = (tuple((_DATA / f"{name}_words.txt").read_text().split()) for name in ("first", "second"))

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


_TRAINING = Wording(
    second_words=SECOND_WORDS,
    needle=Asked(
        "The special number for{key} is{value}.\n",
        "What is the special number for{key} in the text above?",
        " The special number for{key} is",
    ),
    values=Asked(
        "One special number for{key} is{value}.\n",
        "What are the special numbers for{key}, in the order of the text, separated by commas?",
        " The special numbers for{key} are",
    ),
    keys=Asked(
        "The special number for{key} is{value}.\n",
        "What are the special numbers for{key}, in that order, separated by commas?",
        " The special numbers for{key} are",
    ),
    pair=Asked("-{key}:{value}\n", "Which value in the list above belongs to{key}?", "{key}:"),
    linked=Asked(
        "The key of{owner} is{key}.\n",
        "Give the key of{owner} and the value of that key, written as key: value.",
        " The key of{owner} is",
    ),
    traced=Asked("VAR{key} ={value}\n", "Trace the variable{key} back to its number.", " VAR{key} ="),
    chained=Asked(
        "VAR{key} ={value}\n",
        "Which variables have the value{value}, in the order of the text, separated by commas?",
        " The variables with the value{value} are",
    ),
    common=Asked(
        "Words:{words}\n",
        "Which{count} words are the most common above? List them as they first appear, separated by commas.",
        " The{count} most common words are",
    ),
    frequent=Asked(
        "Coded text:{words}\n",
        "Which three coded words are the most frequent above? List them by frequency, separated by commas.",
        " The three most frequent words are",
    ),
    quoted="As quoted above:\n",
    repeated="# Repeated from above:\n",
)
_VERIFICATION = Wording(
    second_words=SECOND_WORDS[1::3],
    needle=Asked(
        "The secret number for{key} is{value}.\n",
        "What is the secret number for{key} in the pages above?",
        " The secret number for{key} is",
    ),
    values=Asked(
        "One secret number for{key} is{value}.\n",
        "What are the secret numbers for{key}, in the order of the pages, separated by commas?",
        " The secret numbers for{key} are",
    ),
    keys=Asked(
        "The secret number for{key} is{value}.\n",
        "What are the secret numbers for{key}, in just that order, separated by commas?",
        " The secret numbers for{key} are",
    ),
    pair=Asked("*{key}:{value}\n", "Which number in the table above belongs to{key}?", "{key}:"),
    linked=Asked(
        "The key for{owner} is{key}.\n",
        "Give the key for{owner} and the number of that key, written as key: number.",
        " The key for{owner} is",
    ),
    traced=Asked("VAR{key} ={value};\n", "Follow the variable{key} down to its number.", " VAR{key} ="),
    chained=Asked(
        "VAR{key} ={value};\n",
        "Which names have the value{value}, in the order of the pages, separated by commas?",
        " The names with the value{value} are",
    ),
    common=Asked(
        "Terms:{words}\n",
        "Which{count} terms are the most common above? List them as they first occur, separated by commas.",
        " The{count} most common terms are",
    ),
    frequent=Asked(
        "Ciphered text:{words}\n",
        "Which three ciphers are the most frequent above? List them by frequency, separated by commas.",
        " The three most frequent ciphers are",
    ),
    quoted="As written above:\n",
    repeated="# Copied from above:\n",
)
_EVALUATION = Wording(
    second_words=SECOND_WORDS[2::3],
    needle=Asked(
        "The magic number for{key} is{value}.\n",
        "What is the magic number for{key} in the passages above?",
        " The magic number for{key} is",
    ),
    values=Asked(
        "One magic number for{key} is{value}.\n",
        "What are the magic numbers for{key}, in the order of the passages, separated by commas?",
        " The magic numbers for{key} are",
    ),
    keys=Asked(
        "The magic number for{key} is{value}.\n",
        "What are the magic numbers for{key}, in the given order, separated by commas?",
        " The magic numbers for{key} are",
    ),
    pair=Asked("+{key}:{value}\n", "Which entry in the register above belongs to{key}?", "{key}:"),
    linked=Asked(
        "The name of{owner} is{key}.\n",
        "Give the name of{owner} and the entry of that name, written as name: entry.",
        " The name of{owner} is",
    ),
    traced=Asked("VAR{key} ={value}.\n", "Track the variable{key} back to where its number is given.", " VAR{key} ="),
    chained=Asked(
        "VAR{key} ={value}.\n",
        "Which symbols have the value{value}, in the order of the passages, separated by commas?",
        " The symbols with the value{value} are",
    ),
    common=Asked(
        "Items:{words}\n",
        "Which{count} items are the most common above? List them as they first turn up, separated by commas.",
        " The{count} most common items are",
    ),
    frequent=Asked(
        "Scrambled text:{words}\n",
        "Which three scrambled words are the most frequent above? List them by frequency, separated by commas.",
        " The three most frequent scrambled words are",
    ),
    quoted="As stated above:\n",
    repeated="# Taken from above:\n",
)
WORDINGS: Mapping[Split, Wording] = MappingProxyType(
    {
        Split.TRAINING: _TRAINING,
        Split.CALIBRATION: replace(_TRAINING, second_words=SECOND_WORDS[::3]),
        Split.VERIFICATION: _VERIFICATION,
        Split.EVALUATION: _EVALUATION,
    }
)
