"""Needles in a haystack (RULER, arXiv 2404.06654, section 3: `niah_single` and `niah_multikey`)."""

from dataclasses import dataclass

from sparsekv.planner.tasks.builder import Unit, build
from sparsekv.planner.tasks.draws import Draws, Pieces, longest_value
from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.types import Document, Kit, Request

_DIGITS = 7


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
        """See `Task`."""
        return longest_value(_DIGITS)

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """See `Task`."""
        standard = self.needles + (request.length // self.tokens_per_needle if self.tokens_per_needle else 0)
        count = request.statements or standard
        pairs = zip(draws.keys(count), draws.values(count, _DIGITS), strict=True)
        return build(kit, [_needle(key, value) for key, value in pairs], request, draws)


def _needle(key: Pieces, value: str) -> Unit:
    return Unit(
        lines=(("The special number for", *key, " is", value, ".\n"),),
        question=(
            "What is the special number for",
            *key,
            " in the text above?",
            " The special number for",
            *key,
            " is",
        ),
        answer=(value,),
    )
