"""Two-stage retrieval: find a key in one statement, then that key's value (2StageRetr of OmniKV, ICLR 2025)."""

from dataclasses import dataclass

from sparsekv.planner.tasks.builder import Unit, build
from sparsekv.planner.tasks.draws import Draws, Pieces, longest_key, longest_value
from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.kv_retrieval import pair_line
from sparsekv.planner.tasks.types import Document, Kit, Request

_DIGITS = 5


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
        """See `Task`."""
        return longest_key(encoder) + len(encoder.encode([":"])) + longest_value(_DIGITS)

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """See `Task`."""
        count = request.statements or 2 + request.length // self.tokens_per_statement
        owners, keys = draws.keys(count), draws.keys(count * self.pairs_per_statement)
        values = draws.values(len(keys), _DIGITS)
        units = [_linked(draws, *each) for each in zip(owners, keys[:count], values[:count], strict=True)]
        units += [Unit((pair_line(*pair),)) for pair in zip(keys[count:], values[count:], strict=True)]
        return build(kit, units, request, draws)


def _linked(draws: Draws, owner: Pieces, key: Pieces, value: str) -> Unit:
    statement: Pieces = ("The key of", *owner, " is", *key, ".\n")
    pair = pair_line(key, value)
    return Unit(
        lines=(statement, pair) if draws.rng.random() < 0.5 else (pair, statement),
        question=(
            "Give the key of",
            *owner,
            " and the value of that key,",
            " written as key: value.",
            " The key of",
            *owner,
            " is",
        ),
        answer=(*key, ":", value),
    )
