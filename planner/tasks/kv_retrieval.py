"""Key-value retrieval: nothing but pairs (the key-value task of Lost in the Middle, arXiv 2307.03172, section 3)."""

from dataclasses import dataclass

from sparsekv.planner.tasks.builder import Unit, build
from sparsekv.planner.tasks.draws import Draws, Pieces, longest_value
from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.types import Document, Kit, Request

_DIGITS = 5
_PROBE = 16


@dataclass(frozen=True, slots=True)
class KvRetrieval:
    """A list of `- key: value` lines that fills the whole context; the question names one key."""

    name: str = "kv_retrieval"

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return longest_value(_DIGITS)

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """See `Task`. With `statements` given, the document is as short as that many pairs.

        With `answer_room`, the missing part of a line at the end becomes a line or two of text at the beginning.
        """
        units = _pairs(draws, request.statements) if request.statements else _enough_pairs(kit, request.length, draws)
        return build(kit, units, request, draws, scattered=False)


def pair_line(key: Pieces, value: str) -> Pieces:
    """The line that gives a key its value."""
    return ("-", *key, ":", value, "\n")


def _pairs(draws: Draws, count: int) -> list[Unit]:
    return [_unit(key, value) for key, value in zip(draws.keys(count), draws.values(count, _DIGITS), strict=True)]


def _unit(key: Pieces, value: str) -> Unit:
    return Unit((pair_line(key, value),), ("Which value in the list above belongs to", *key, "?", *key, ":"), (value,))


def _enough_pairs(kit: Kit, length: int, draws: Draws) -> list[Unit]:
    """At least as many pairs as the length holds: `build` leaves out the rest."""
    units: list[Unit] = []
    tokens = 0
    while not units or tokens < length:
        count = _PROBE if not units else (length - tokens) * len(units) // tokens + 1
        more = _pairs(draws, count)
        tokens += sum(len(line) for line in kit.encoder.encode_all([unit.lines[0] for unit in more]))
        units += more
    return units
