"""A head's pattern as shares of a square: what the page draws of it on the matrix of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import AShape, Dense, Pattern, TileShape, VerticalSlash


@dataclass(frozen=True, slots=True)
class Sketch:
    """Shares of the side of the matrix: keys from the first on, keys up to each query, and what is chosen in a prompt.

    `columns`, `diagonals` and `tiles` say how much is chosen of each; where it lies is known in a prompt alone.
    """

    sink: float
    recent: float
    columns: float = 0.0
    diagonals: float = 0.0
    tiles: float = 0.0


def sketch_of(pattern: Pattern, shape: AttentionGroup, length: int, tile: TileShape) -> Sketch:
    """The most that a head may compute at a length; a layer of linear attention computes nothing of the matrix."""

    def share(tokens: int) -> float:
        return min(1.0, tokens / length)

    if shape.kind == "linear":
        return Sketch(0.0, 0.0)
    if isinstance(pattern, Dense):
        return Sketch(0.0, share(shape.window or length))
    if isinstance(pattern, AShape):
        return Sketch(share(pattern.sink.resolve(length)), share(pattern.window.resolve(length)))
    first, nearest = share(tile.key), share(tile.query)
    room = max(0.0, share(pattern.tile_tokens(length)) - first - nearest)
    if isinstance(pattern, VerticalSlash):
        # A diagonal crosses two tiles of a row tile: few of them leave room.
        diagonals = min(room, share(2 * tile.key * pattern.slash.resolve(length)))
        return Sketch(first, nearest, share(pattern.most_columns(length)), diagonals)
    return Sketch(first, nearest, tiles=room)
