"""Variable tracking: follow assignments back to a number (RULER, arXiv 2404.06654, section 3)."""

from dataclasses import dataclass
from itertools import pairwise

from sparsekv.planner.tasks.builder import Unit, build
from sparsekv.planner.tasks.draws import Draws, Pieces, longest_key, longest_value
from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.types import Document, Kit, Request

_DIGITS = 5


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
        """See `Task`."""
        step = len(encoder.encode([" VAR", " ="])) + longest_key(encoder, "_")
        return self.hops * step + longest_value(_DIGITS)

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """See `Task`."""
        count = request.statements or self.chains + request.length // self.tokens_per_chain
        names = self.hops + 1
        variables = draws.keys(count * names, joiner="_")
        chains = [variables[i * names : (i + 1) * names] for i in range(count)]
        values = draws.values(count, _DIGITS)
        units = [_chain(chain, value) for chain, value in zip(chains, values, strict=True)]
        return build(kit, units, request, draws)


def _chain(variables: list[Pieces], value: str) -> Unit:
    """`variables[0]` holds the number, every other one the variable before it."""
    lines = [("VAR", *variables[0], " =", value, "\n")]
    lines += [("VAR", *new, " =", " VAR", *old, "\n") for old, new in pairwise(variables)]
    *steps, last = variables
    answer = tuple(piece for step in reversed(steps) for piece in (" VAR", *step, " ="))
    return Unit(
        lines=tuple(lines),
        question=("Trace the variable", *last, " back to its number.", " VAR", *last, " ="),
        answer=(*answer, value),
    )
