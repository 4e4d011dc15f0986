"""Retrieval tasks in formats that calibration never uses, for models on which a planner is measured.

They ask for the same abilities as the shipped tasks, in other wordings, with other separators and numbers of digits.
Each follows the `Task` protocol, so training and evaluation take them as they take the shipped ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from reference_model.recipe import TaskShare
from sparsekv.planner.tasks import TASKS
from sparsekv.planner.tasks.documents import (
    Document,
    DocumentRequest,
    Draws,
    Kit,
    Pieces,
    Task,
    Unit,
    build,
    longest_key,
    longest_value,
)
from sparsekv.planner.tasks.text import PieceEncoder

_PROBE = 16  # rows, to see how long one is


def _count(request: DocumentRequest, least: int, tokens_per_statement: int) -> int:
    """Statements of a document: as requested, or a standard number that grows with the length."""
    return request.statements or least + request.length // tokens_per_statement


def _bare(key: Pieces) -> Pieces:
    """The key without its leading space."""
    first, second = key
    return first.strip(), second


@dataclass(frozen=True, slots=True)
class DictLookup:
    """Assignments `CONFIG["amber-falcon"] = 48213`; the question is the expression at a Python prompt."""

    name: str = "dict_lookup"
    digits: int = 5

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return longest_value(self.digits)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`."""
        count = _count(request, 4, 1024)
        pairs = zip(draws.keys(count), draws.values(count, self.digits), strict=True)
        return build(kit, [_entry(_bare(key), value) for key, value in pairs], request, draws)


def _entry(key: Pieces, value: str) -> Unit:
    return Unit(
        lines=(('CONFIG["', *key, '"]', " =", value, "\n"),),
        question=(">>>", ' CONFIG["', *key, '"]', "\n"),
        answer=(value.strip(),),
    )


@dataclass(frozen=True, slots=True)
class FunctionValue:
    """Functions of one line, `def get_amber_falcon(): return 7731`; the question calls one."""

    name: str = "function_value"
    digits: int = 4

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return longest_value(self.digits)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`."""
        count = _count(request, 6, 4096)
        pairs = zip(draws.keys(count, joiner="_"), draws.values(count, self.digits), strict=True)
        return build(kit, [_function(_bare(key), value) for key, value in pairs], request, draws)


def _function(key: Pieces, value: str) -> Unit:
    return Unit(
        lines=(("def", " get_", *key, "():", " return", value, "\n"),),
        question=("assert", " get_", *key, "()", " =="),
        answer=(value,),
    )


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table `| amber | falcon | 38 | 902 |` that fills the whole context; the question begins one row."""

    name: str = "table_row"
    digits: tuple[int, int] = (2, 3)

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return sum(map(longest_value, self.digits)) + len(encoder.encode([" |"]))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. With `statements` given, the document is as short as that many rows."""

        def rows(count: int) -> list[Unit]:
            columns = [draws.values(count, digits) for digits in self.digits]
            return [_row(*each) for each in zip(draws.keys(count, joiner=" "), *columns, strict=True)]

        units = rows(request.statements) if request.statements else _enough(kit, request.length, rows)
        return build(kit, units, request, draws, scattered=False)


def _row(key: Pieces, left: str, right: str) -> Unit:
    first, second = key
    begin = ("|", first, " |", second, " |")
    return Unit(
        lines=((*begin, left, " |", right, " |", "\n"),),
        question=("Repeat the row of", *key, " from the table.", "\n", *begin),
        answer=(left, " |", right),
    )


def _enough(kit: Kit, length: int, rows: Callable[[int], list[Unit]]) -> list[Unit]:
    """At least as many rows as the length holds: `build` leaves out the rest."""
    units: list[Unit] = []
    tokens = 0
    while not units or tokens < length:
        more = rows(_PROBE if not units else (length - tokens) * len(units) // tokens + 1)
        tokens += sum(map(len, kit.encoder.encode_all([unit.lines[0] for unit in more])))
        units += more
    return units


@dataclass(frozen=True, slots=True)
class QuoteLine:
    """Lines of random words; the question gives the first words of one and the answer completes it.

    Attributes:
        shown: pairs of words in the question.
        asked: pairs of words in the answer.
    """

    name: str = "quote_line"
    shown: int = 2
    asked: int = 5

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return self.asked * longest_key(encoder, " ")

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`."""
        count, pairs = _count(request, 3, 2048), self.shown + self.asked
        drawn = draws.keys(count * pairs, joiner=" ")
        lines = [drawn[i * pairs : (i + 1) * pairs] for i in range(count)]
        return build(kit, [self._quote(line) for line in lines], request, draws)

    def _quote(self, line: list[Pieces]) -> Unit:
        words = [word for pair in line for word in pair]
        shown, asked = words[: 2 * self.shown], words[2 * self.shown :]
        return Unit(
            lines=((">", *shown, *asked, "\n"),),
            question=("Complete the quoted line.", "\n", ">", *shown),
            answer=tuple(asked),
        )


@dataclass(frozen=True, slots=True)
class AliasChain:
    """Chains of aliases, from the name in the question down to a number; the answer writes the chain out.

    Attributes:
        hops: names between the name in the question and the number.
        digits: of the number.
    """

    name: str = "alias_chain"
    hops: int = 2
    digits: int = 6

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        arrow = len(encoder.encode([" ->"]))
        return self.hops * (longest_key(encoder, ".") + arrow) + longest_value(self.digits)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`."""
        count, names = _count(request, 2, 4096), self.hops + 1
        drawn = draws.keys(count * names, joiner=".")
        chains = [drawn[i * names : (i + 1) * names] for i in range(count)]
        values = draws.values(count, self.digits)
        return build(kit, [_aliases(*each) for each in zip(chains, values, strict=True)], request, draws)


def _aliases(names: list[Pieces], value: str) -> Unit:
    targets: list[Pieces] = [*names, (value,)]
    first, *middle = names
    return Unit(
        lines=tuple(("alias", *name, " ->", *target, "\n") for name, target in pairwise(targets)),
        question=("Resolve", *first, ":", *first, " ->"),
        answer=(*(piece for name in middle for piece in (*name, " ->")), value),
    )


@dataclass(frozen=True, slots=True)
class FirstOfList:
    """Lists of names, `members of amber-falcon: ...`; the answer is the first name of one list."""

    name: str = "first_of_list"
    members: int = 3

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return longest_key(encoder)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`."""
        count = _count(request, 4, 2048)
        owners, members = draws.keys(count), draws.keys(count * self.members)
        lists = [members[i * self.members : (i + 1) * self.members] for i in range(count)]
        return build(kit, [_members(*each) for each in zip(owners, lists, strict=True)], request, draws)


def _members(owner: Pieces, members: list[Pieces]) -> Unit:
    first, *others = members
    listed = (*first, *(piece for name in others for piece in (",", *name)))
    return Unit(
        lines=(("members of", *owner, ":", *listed, "\n"),),
        question=("The first member of", *owner, " is"),
        answer=first,
    )


_ALL: tuple[Task, ...] = (DictLookup(), FunctionValue(), TableRow(), QuoteLine(), AliasChain(), FirstOfList())

FORMATS: dict[str, Task] = {task.name: task for task in _ALL}

FORMAT_SHARES: dict[str, TaskShare] = {
    "dict_lookup": TaskShare(0.20, 40),
    "function_value": TaskShare(0.15, 60),
    "table_row": TaskShare(0.25, 0),
    "quote_line": TaskShare(0.10, 120),
    "alias_chain": TaskShare(0.20, 100),
    "first_of_list": TaskShare(0.10, 80),
}

# Every task that a model can be trained on, by name.
TRAINED: dict[str, Task] = TASKS | FORMATS
