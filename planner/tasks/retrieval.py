"""Tasks that ask for what was planted: needles, also turn by turn, key-value pairs, two stages, variable tracking.

Sources: `niah_*` and `variable_tracking` follow RULER (arXiv 2404.06654, section 3), `kv_retrieval` the key-value task
of Lost in the Middle (arXiv 2307.03172, section 3), `two_stage` the 2StageRetr of OmniKV (ICLR 2025).

Where several words are the answer, the question asks for an order and for commas: fed the answer, a model that answers
as asked picks every token of it, which is how answers are scored here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, starmap

import numpy as np

from sparsekv.planner.tasks.documents import (
    Document,
    DocumentRequest,
    Draws,
    Kit,
    Unit,
    build,
    longest_key,
    longest_value,
)
from sparsekv.planner.tasks.text import Filler, PieceEncoder, TaskError
from sparsekv.planner.tasks.wording import WORDINGS, Asked, Pieces, Wording, filled

_NEEDLE_DIGITS = 7
_NEEDLES = 4  # values of a key, or keys that are asked for
_DIGITS = 5  # of every other value
_PROBE = 16  # pairs, to see how long one is
_SPARE = 128  # tokens of text beside those of turns, which begin with a line; a long sample has 256


@dataclass(frozen=True, slots=True)
class Niah:
    """Numbers for keys, planted in filler text; the question names one key.

    Attributes:
        needles: how many needles there are at every length.
        tokens_per_needle: one more needle for every so many tokens; 0 for none.
    """

    name: str
    needles: int
    tokens_per_needle: int

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_value(_NEEDLE_DIGITS)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        standard = self.needles + (request.length // self.tokens_per_needle if self.tokens_per_needle else 0)
        count = request.statements or standard
        return build(kit, _pairs(kit.wording.needle, draws, _NEEDLE_DIGITS, count), request, draws)


def _pairs(asked: Asked, draws: Draws, digits: int, count: int) -> list[Unit]:
    return [stated(asked, *pair) for pair in zip(draws.keys(count), draws.values(count, digits), strict=True)]


def stated(asked: Asked, key: Pieces, value: str) -> Unit:
    """The line that gives a key its value, and the question for it."""
    return Unit.asking(asked, [filled(asked.line, key=key, value=(value,))], (value,), key=key)


@dataclass(frozen=True, slots=True)
class NiahMultivalue:
    """Numbers for one key, planted in filler text; the answer is all of them, in the order of the text."""

    name: str = "niah_multivalue"
    values: int = _NEEDLES

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_list(encoder, self.values, longest_value(_NEEDLE_DIGITS))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. `statements` counts keys, of which all but the one asked for distract; RULER has one."""
        keys = draws.keys(request.statements or 1)
        units = [_several_values(kit.wording.values, key, draws.values(self.values, _NEEDLE_DIGITS)) for key in keys]
        return build(kit, units, request, draws)


def _several_values(asked: Asked, key: Pieces, values: list[str]) -> Unit:
    lines = (filled(asked.line, key=key, value=(value,)) for value in values)
    return Unit.asking(asked, lines, listed([(value,) for value in values]), key=key)


@dataclass(frozen=True, slots=True)
class NiahMultiquery:
    """Four keys with a number each, planted in filler text; the answer is their numbers, in the question's order."""

    name: str = "niah_multiquery"

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_list(encoder, _NEEDLES, longest_value(_NEEDLE_DIGITS))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. `statements` counts groups of four keys; RULER has one."""
        groups = [draws.keys(_NEEDLES) for _ in range(request.statements or 1)]
        return build(kit, [_several_keys(kit.wording.keys, keys, draws) for keys in groups], request, draws)


def _several_keys(asked: Asked, keys: list[Pieces], draws: Draws) -> Unit:
    pairs = list(zip(keys, draws.values(len(keys), _NEEDLE_DIGITS), strict=True))
    ordered = [pairs[i] for i in draws.rng.permutation(len(pairs)).tolist()]
    names = listed([key for key, _ in ordered])
    lines = (filled(asked.line, key=key, value=(value,)) for key, value in pairs)
    return Unit.asking(asked, lines, listed([(value,) for _, value in ordered]), key=names)


@dataclass(frozen=True, slots=True)
class SecondQuestion:
    """Numbers for keys, planted in filler text; the question names one key, and behind its answer another one.

    What was not kept when the first answer began is not there for the second. Nothing but the second answer counts.
    """

    name: str = "second_question"
    needles: int = 4

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_value(_NEEDLE_DIGITS)

    def questions(self, length: int) -> int:
        return 2

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. There are two questions, whatever the request says."""
        needles = _pairs(kit.wording.needle, draws, _NEEDLE_DIGITS, request.statements or self.needles)
        found = build(kit, needles, replace(request, queries=2), draws)
        if len(found.queries) < 2:
            raise TaskError(
                f"expected room for two statements and their questions, found {request.length} tokens; use a longer "
                "length"
            )
        return replace(found, cuts=(len(found.context_ids),))


@dataclass(frozen=True, slots=True)
class Turns:
    """A session: numbers for keys, planted in text that comes in turns, each of which asks for one planted so far.

    The first prompt has half of the text or more, each later one a size of `sizes`, the longest or the shortest of them
    last. Text goes on from turn to turn. Nothing but the last answer counts; it stands in the first prompt half of the
    time, else in any turn.
    """

    name: str = "turns"
    sizes: tuple[int, ...] = (256, 512, 1024, 2048, 4096)

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_value(_NEEDLE_DIGITS)

    def questions(self, length: int) -> int:
        """The first one, and of each turn that half of the length has room for; of one at least."""
        return 1 + max(1, sum(tokens <= length // 2 for tokens in accumulate(self.sizes)))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. Each of the request's questions has a turn."""
        later = [min(size, request.length // 2) for size in self.sizes[: request.queries - 1]]
        sizes = [request.length - sum(later), *later[:: draws.rng.choice((1, -1))]]
        rooms = [None] * len(later) + [request.answer_room]
        requests = (DocumentRequest(size, answer_room=room) for size, room in zip(sizes, rooms, strict=True))
        units = _asked_in_turn(kit, len(sizes), draws)
        texts = _passages(Filler(*kit.filler.excerpt(request.length + _SPARE, draws.rng)), sizes)
        turns = [
            build(replace(kit, filler=text), [unit], request, draws)
            for text, unit, request in zip(texts, units, requests, strict=True)
        ]
        ends = accumulate(len(turn.context_ids) for turn in turns[:-1])
        return Document(
            np.concatenate([turn.context_ids for turn in turns]),
            np.concatenate([turn.context_is_text for turn in turns]),
            tuple(query for turn in turns for query in turn.queries),
            tuple(ends),
        )


def _asked_in_turn(kit: Kit, turns: int, draws: Draws) -> Iterator[Unit]:
    """The needles of each turn, one but for the first, with a question for one planted so far; none is asked twice."""
    needles = _pairs(kit.wording.needle, draws, _NEEDLE_DIGITS, 2 * turns - 1)
    planted = [needles[:turns], *([needle] for needle in needles[turns:])]
    group = planted[draws.rng.integers(turns) if draws.rng.random() < 0.5 else 0]
    last = group[draws.rng.integers(len(group))]
    left: list[Unit] = []
    for turn, new in enumerate(planted):
        left += [needle for needle in new if needle is not last]
        asked = left.pop(draws.rng.integers(len(left))) if turn < turns - 1 else last
        yield replace(asked, lines=tuple(line for needle in new for line in needle.lines))


def _passages(text: Filler, sizes: Sequence[int]) -> Iterator[Filler]:
    """The text of each turn in whole lines, one behind the other: of the later ones a line more at most."""
    starts, last = [], len(text.line_ends)
    for size in reversed(sizes[1:]):
        starts.append(last)
        last = int(np.searchsorted(text.line_ends, text.line_ends[last - 1] - size, side="right"))
    return starmap(text.lines, pairwise((0, last, *reversed(starts))))


@dataclass(frozen=True, slots=True)
class KvRetrieval:
    """A list of keys with their values that fills the whole context; the question names one key."""

    name: str = "kv_retrieval"

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_value(_DIGITS)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. With `statements` given, the document is as short as that many pairs.

        With `answer_room`, the missing part of a line at the end becomes a line or two of text at the beginning.
        """
        pairs = partial(_pairs, kit.wording.pair, draws, _DIGITS)
        units = pairs(request.statements) if request.statements else enough(kit, request.length, pairs)
        return build(kit, units, request, draws, scattered=False)


def enough(kit: Kit, length: int, made: Callable[[int], list[Unit]]) -> list[Unit]:
    """At least as many units of one line as the length holds: `build` leaves out the rest."""
    units: list[Unit] = []
    tokens = 0
    while not units or tokens < length:
        count = _PROBE if not units else (length - tokens) * len(units) // tokens + 1
        more = made(count)
        tokens += sum(len(line) for line in kit.encoder.encode_all([unit.lines[0] for unit in more]))
        units += more
    return units


@dataclass(frozen=True, slots=True)
class TwoStage:
    """Statements that name a key, and key-value pairs, both scattered over filler text.

    The answer writes the intermediate key and then its value.

    Attributes:
        tokens_per_statement: one statement for every so many tokens.
        pairs_per_statement: how many key-value pairs there are for every statement; all but one distract.
    """

    name: str = "two_stage"
    tokens_per_statement: int = 1024
    pairs_per_statement: int = 8

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_key(encoder) + longest_frame(encoder, lambda wording: wording.pair.cue) + longest_value(_DIGITS)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        count = request.statements or 2 + request.length // self.tokens_per_statement
        owners, keys = draws.keys(count), draws.keys(count * self.pairs_per_statement)
        values = draws.values(len(keys), _DIGITS)
        units = [_linked(kit, draws, *each) for each in zip(owners, keys[:count], values[:count], strict=True)]
        others = zip(keys[count:], values[count:], strict=True)
        units += [Unit(stated(kit.wording.pair, *pair).lines) for pair in others]
        return build(kit, units, request, draws)


def _linked(kit: Kit, draws: Draws, owner: Pieces, key: Pieces, value: str) -> Unit:
    linked, pair = kit.wording.linked, stated(kit.wording.pair, key, value)
    statement = filled(linked.line, owner=owner, key=key)
    lines = (statement, *pair.lines) if draws.rng.random() < 0.5 else (*pair.lines, statement)
    return Unit.asking(linked, lines, (*pair.cue, value), owner=owner)


@dataclass(frozen=True, slots=True)
class VariableTracking:
    """Chains of assignments scattered over filler text, in the order of execution.

    The question names the last variable of a chain; the answer writes the chain out down to the number.

    Attributes:
        hops: assignments from variable to variable in a chain.
        chains: how many chains there are at every length.
        tokens_per_chain: one more chain for every so many tokens.
    """

    name: str = "variable_tracking"
    hops: int = 2
    chains: int = 4
    tokens_per_chain: int = 4096

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        step = longest_frame(encoder, lambda wording: wording.traced.cue) + longest_key(encoder, "_")
        return self.hops * step + longest_value(_DIGITS)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        count = request.statements or self.chains + request.length // self.tokens_per_chain
        names = self.hops + 1
        variables = draws.keys(count * names, joiner="_")
        chains = [variables[i * names : (i + 1) * names] for i in range(count)]
        values = draws.values(count, _DIGITS)
        units = [_chain(kit, chain, value) for chain, value in zip(chains, values, strict=True)]
        return build(kit, units, request, draws)


def _chain(kit: Kit, variables: list[Pieces], value: str) -> Unit:
    traced = kit.wording.traced
    *steps, last = variables
    answer = tuple(piece for step in reversed(steps) for piece in filled(traced.cue, key=step))
    return Unit.asking(traced, assignments(traced.line, variables, value), (*answer, value), key=last)


def assignments(line: str, variables: list[Pieces], value: str) -> tuple[Pieces, ...]:
    """Lines that give the first variable the number, and every other one the variable before it."""
    values = [(value,), *((" VAR", *variable) for variable in variables[:-1])]
    return tuple(filled(line, key=key, value=given) for key, given in zip(variables, values, strict=True))


def longest_frame(encoder: PieceEncoder, frame_of: Callable[[Wording], str]) -> int:
    """Tokens of a frame without its fields, in the wording in which it is longest."""
    return max(len(encoder.encode(filled(frame_of(wording)))) for wording in WORDINGS.values())


def listed(words: Sequence[Pieces]) -> Pieces:
    """Words with commas between, as an answer."""
    first, *others = words
    return (*first, *(piece for word in others for piece in (",", *word)))


def longest_list(encoder: PieceEncoder, words: int, longest: int) -> int:
    """Tokens of so many words, and of the commas between."""
    return words * longest + (words - 1) * len(encoder.encode([","]))
