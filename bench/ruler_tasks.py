"""The tasks of RULER (arXiv 2404.06654, section 3) that ask for variables and words, by RULER's names.

Sizes are RULER's where a docstring does not say otherwise; the wording is our own, and no solved example stands in
front. Where several words are the answer, the question asks for an order and for commas. RULER's string match takes any
order and gives a share of the score for a share of the words, so that accuracy by exact match is at most RULER's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import pi
from string import ascii_lowercase, ascii_uppercase

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks.documents import Document, DocumentRequest, Draws, Kit, Unit, build, longest_key
from sparsekv.planner.tasks.retrieval import assignments, listed, longest_list
from sparsekv.planner.tasks.text import PieceEncoder, TaskError
from sparsekv.planner.tasks.wording import Pieces, filled

_DIGITS = 5
_NAME = 5  # letters of a variable
_CODED = 6  # letters of a coded word
_REPEATS, _FEW_REPEATS = (30, 3), (6, 1)  # of common and of uncommon words
_ENTRY = 3  # tokens of an entry in a list of words at least: of a number and a key
_NOISE = " ..."
_ASKED = 3  # coded words
_DISTINCT = 53  # words with Zipf counts from which on the counts of ranks 2 to 5 differ
_WORDS_PER_TOKEN = 50

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vt:
    """A chain of assignments scattered over filler text; the answer is all its variables, in the order of the text.

    `variable_tracking` asks to trace a variable back instead.

    Attributes:
        hops: assignments from variable to variable.
    """

    name: str = "vt"
    hops: int = 4

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_list(encoder, self.hops + 1, 1 + _NAME)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. There is one chain, whatever the request says."""
        variables: list[Pieces] = [(name,) for name in _coded(draws, self.hops + 1, _NAME, ascii_uppercase)]
        low, high = 10 ** (_DIGITS - 1), 10**_DIGITS
        value = f" {low + int(draws.rng.choice(high - low, 1, replace=False)[0])}"
        lines = assignments(kit.wording.chained.line, variables, value)
        unit = Unit.asking(kit.wording.chained, lines, listed(variables), value=(value,))
        return build(kit, [unit], request, draws)


@dataclass(frozen=True, slots=True)
class Cwe:
    """Common words extraction: a numbered list in which few words stand often and many seldom.

    The answer is the common words, in the order in which they first appear. Words are keys of two words, since few
    tokenizers and no short list have enough single ones. A common word stands 30 times in the list and an uncommon one
    3 times; in documents shorter than `long`, and where that takes more than the length, 6 times and once. Uncommon
    words fill the list; their number grows with the length.

    Attributes:
        common: how many words are common.
        tokens_per_common: at short lengths, where RULER does not go, one common word for so many tokens.
        long: tokens from which on words repeat as often as in RULER's full size.
    """

    name: str = "cwe"
    common: int = 10
    tokens_per_common: int = 192
    long: int = 4096

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_list(encoder, self._common(length), longest_key(encoder))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. There is one question, whatever the request says; `statements` counts common words."""
        count = request.statements or self._common(request.length)
        common = draws.keys(count)
        frame = kit.wording.common
        asked = Unit.asking(frame, [filled(frame.line)], listed(common), count=(f" {count}",))
        room = _room(kit, request, asked)
        is_long = request.length >= self.long
        words = [*common, *draws.keys(max(1, room // (_ENTRY * (_REPEATS[1] if is_long else 1))))]
        repeats = _fitting(kit.encoder, words, count, room, request.length, is_long)
        order = draws.rng.permutation(np.repeat(np.arange(len(repeats)), repeats)).tolist()
        entries = tuple(piece for i, word in enumerate(order, 1) for piece in (f" {i}.", *words[word]))
        answer = listed([words[word] for word in dict.fromkeys(order) if word < count])
        unit = replace(asked, lines=(filled(frame.line, words=entries),), answer=answer)
        return build(kit, [unit], request, draws, scattered=False)

    def _common(self, length: int) -> int:
        return max(1, min(self.common, length // self.tokens_per_common))


def _fitting(
    encoder: PieceEncoder, words: Sequence[Pieces], common: int, room: int, length: int, is_long: bool
) -> Counts:
    """Counts of each word in a list of at most `room` tokens; the last words are left out."""
    sizes = np.asarray([len(ids) for ids in encoder.encode_all(words)])
    for often, seldom in (_REPEATS, _FEW_REPEATS)[not is_long :]:
        taken = often * sizes[:common].sum() + seldom * np.cumsum(sizes[common:])
        entries = often * common + seldom * np.arange(1, len(taken) + 1)
        possible = max(1, int(np.searchsorted(taken + entries, room, side="right")))  # a number is a token or more
        numbers = [(f" {i}.",) for i in range(1, entries[possible - 1] + 1)]
        ends = np.cumsum([len(ids) for ids in encoder.encode_all(numbers)])
        taken = taken[:possible] + ends[entries[:possible] - 1]
        fitting = int(np.searchsorted(taken, room, side="right"))
        if fitting:
            return np.repeat([often, seldom], [common, fitting])
    raise _too_short(length + int(taken[0]) - room, "a list of words", length)


@dataclass(frozen=True, slots=True)
class Fwe:
    """Frequent words extraction: coded words whose frequencies follow Zipf's law with an exponent of 2, and dots.

    The dots take the first rank; the answer is the three words of the next ranks, from the most frequent on. There is a
    word for every 50 tokens; those whose count comes to less than one are left out.
    """

    name: str = "fwe"

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_list(encoder, _ASKED, 1 + _CODED)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. There is one question, whatever the request says of questions and statements."""
        coded = _coded(draws, max(_ASKED + 1, request.length // _WORDS_PER_TOKEN), _CODED, ascii_lowercase)
        words = [_NOISE, *coded]
        frame = kit.wording.frequent
        asked = Unit.asking(frame, [filled(frame.line)], listed([(word,) for word in coded[:_ASKED]]))
        total = _most_words(kit.encoder, words, _room(kit, request, asked), request.length)
        order = draws.rng.permutation(np.repeat(np.arange(len(words)), _zipf(total, len(words)))).tolist()
        unit = replace(asked, lines=(filled(frame.line, words=tuple(words[i] for i in order)),))
        return build(kit, [unit], request, draws, scattered=False)


def _zipf(total: int, ranks: int) -> Counts:
    """The count of each rank among so many words, rounded down."""
    return (total * 6 / pi**2 / np.arange(1, ranks + 1) ** 2).astype(np.int64)


def _most_words(encoder: PieceEncoder, words: Sequence[str], room: int, length: int) -> int:
    sizes = np.asarray([len(ids) for ids in encoder.encode_all([(word,) for word in words])])

    def taken(total: int) -> int:
        return int(_zipf(total, len(words)) @ sizes)

    if taken(_DISTINCT) > room:
        raise _too_short(length + taken(_DISTINCT) - room, "words that differ in frequency", length)
    return bisect_right(range(2 * room), room, key=taken) - 1


def _room(kit: Kit, request: DocumentRequest, unit: Unit) -> int:
    """Tokens that are left for what `unit.lines` are the frame of."""
    frame = sum(map(len, kit.encoder.encode_all([*unit.lines, unit.question, unit.cue])))
    answer = len(kit.encoder.encode(unit.answer)) if request.answer_room is None else request.answer_room
    return request.length - frame - answer


def _too_short(least: int, what: str, length: int) -> TaskError:
    return TaskError(
        f"expected at least {least} tokens to hold {what} and a question, found {length}; use a longer length"
    )


def _coded(draws: Draws, count: int, letters: int, alphabet: str) -> list[str]:
    """Distinct words of random letters, each with a leading space."""
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = draws.rng.integers(0, len(alphabet), (count - len(found), letters)).tolist()
        found |= {" " + "".join(alphabet[i] for i in word): None for word in drawn}
    return list(found)
