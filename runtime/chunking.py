"""How long inputs are cut so that what a layer makes on the way stays small: the one place of these numbers.

Shapes: B batch, S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunking:
    """Where row-wise work is done in pieces, and how large they are.

    At Llama-3-8B's shape 16,384 rows make at most 2 GB on the way through a layer, and fill the matrix units.

    Attributes:
        above: a call of more rows (batch x tokens) is cut; others run as the model has them.
        rows: most rows of a piece.
        output_bytes: attention output that a layer may hold beside its queries; a larger one overwrites them in
            groups of heads.
    """

    above: int = 16_384
    rows: int = 16_384
    output_bytes: int = 2 << 30

    def applies(self, batch: int, tokens: int) -> bool:
        """Whether a call of this size is cut. Decode steps are not."""
        return tokens > 1 and batch * tokens > self.above

    def pieces(self, batch: int, tokens: int) -> Iterator[slice]:
        """Which tokens each piece holds: all of them, in order, in pieces of about one size."""
        most = max(1, self.rows // batch)
        size = -(-tokens // -(-tokens // most))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))
