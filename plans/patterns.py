"""Sparsity patterns of one attention head, and all that the program asks a pattern about itself.

A pattern only says which key tiles and single columns a query tile computes. The mask of a head is
(selected tiles, plus single columns) and causal and the layer's own window. Token parameters select tiles, rounded
outward. Every pattern also computes the diagonal tile, the one before it, and the first key tile, within its budgets.

To add a pattern: its class and its name in `Pattern` here, its index builder in `kernels/index/`, the builder's row in
`kernels/index/build.py`, and its test. Files, options, the search, cost and memory ask the class.

Source: MInference 1.0, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field

from sparsekv.plans.pattern_family import (
    Budget,
    Grid,
    PatternFamily,
    SizeRange,
    TileShape,
    fraction,
    tokens,
)

__all__ = [
    "GONE",
    "MOST_SAMPLED",
    "PATTERNS",
    "AShape",
    "BlockSparse",
    "Budget",
    "Dense",
    "Pattern",
    "PatternRange",
    "TileShape",
    "VerticalSlash",
    "fraction",
    "last_q_for",
    "tokens",
]


class Dense(PatternFamily):
    """Every causal tile."""

    pattern: Literal["dense"] = "dense"

    def tile_tokens(self, length: int) -> int:
        return length


class AShape(PatternFamily):
    """Tiles touched by j < sink or i - j < window: StreamingLLM's mask. Static, no index building."""

    pattern: Literal["a_shape"] = "a_shape"
    sink: Budget
    window: Budget

    def tile_tokens(self, length: int) -> int:
        """Returns the tokens of one row of the row tile."""
        return self.sink.resolve(length) + self.window.resolve(length)

    @classmethod
    def widening(cls, sink: int, window: int, step: int | None = None) -> SizeRange[Self]:
        """A fixed sink and a growing window."""
        grid = Grid(window, step)
        return SizeRange(
            "a_shape",
            f"a_shape({sink}, {window})",
            grid.count,
            lambda size, _: cls(sink=tokens(sink), window=tokens(grid.value(size))),
        )

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        return (cls.widening(tile.key, 4096),)

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        """One sink and window, to which the cost of all others is brought."""
        return (cls.widening(1024, 4096, _PUBLISHED_STEP),)

    @classmethod
    def timed(cls, length: int) -> tuple[Self, ...]:
        return tuple(cls(sink=tokens(128), window=tokens(length // part)) for part in (16, 4))


MOST_SAMPLED = 1024  # queries of a vertical-slash head
_PUBLISHED_LAST_Q = 64
_PUBLISHED_STEP = 50
# More sampled queries find more of what a head looks for; from some length on, they cost more than they find.
_LAST_Q = 256
_LAST_Q_UP_TO = 1 << 16


def last_q_for(length: int) -> int:
    """Returns how many of the last queries our own vertical-slash patterns sample."""
    return _LAST_Q if length <= _LAST_Q_UP_TO else _PUBLISHED_LAST_Q


class VerticalSlash(PatternFamily):
    """The heaviest columns and diagonals, estimated from the last `last_q` queries.

    `vertical` and `slash` are how many columns and diagonals are computed; `max_tiles` bounds the tokens of the tiles
    in any one row (mandatory tiles included), the least scoring diagonals being dropped first.
    """

    pattern: Literal["vertical_slash"] = "vertical_slash"
    vertical: Budget
    slash: Budget
    last_q: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLED)] = 64
    max_tiles: Budget
    growing: ClassVar[tuple[str, ...]] = ("vertical", "slash", "max_tiles")
    by_default: ClassVar[bool] = True  # no other one improved on it in any model measured (EXPERIMENTS.md)

    def tile_tokens(self, length: int) -> int:
        return self.max_tiles.resolve(length)

    def most_columns(self, length: int) -> int:
        return self.vertical.resolve(length)

    @classmethod
    def in_ratio(
        cls, vertical: int, slash: int, step: int | None = None, last_q: int = _PUBLISHED_LAST_Q
    ) -> SizeRange[Self]:
        """Columns and diagonals in a fixed ratio; the larger of the two moves by `step`."""
        most = max(vertical, slash)
        grid = Grid(most, step)

        def scaled(part: int, size: int) -> Budget:
            return tokens(round(part * (grid.value(size) / most)))

        return SizeRange(
            "vertical_slash",
            f"vertical_slash({vertical}, {slash})",
            grid.count,
            lambda size, bound: cls(
                vertical=scaled(vertical, size), slash=scaled(slash, size), last_q=last_q, max_tiles=tokens(bound)
            ),
            last_q,
        )

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        ratios = ((30, 2048), (1000, 1000), (2000, 500), (3000, 200), (4096, 0))
        return tuple(cls.in_ratio(*ratio, last_q=last_q_for(length)) for ratio in ratios)

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        ratios = ((30, 2048), (100, 1800), (500, 1500), (3000, 200))
        return tuple(cls.in_ratio(*ratio, _PUBLISHED_STEP) for ratio in ratios)

    @classmethod
    def timed(cls, length: int) -> tuple[Self, ...]:
        """Many of one kind of line and few of the other, so that tiles and columns vary apart from one another."""
        few, many, last_q = max(256, length // 16), max(512, length // 5), last_q_for(length)
        return tuple(
            cls(vertical=tokens(vertical), slash=tokens(slash), last_q=last_q, max_tiles=tokens(few))
            for vertical, slash in ((few, many), (many, few))
        )


class BlockSparse(PatternFamily):
    """The top tiles of each row by mean-pooled queries and keys; `keep` is tokens of tiles a row."""

    pattern: Literal["block_sparse"] = "block_sparse"
    keep: Budget

    def tile_tokens(self, length: int) -> int:
        return self.keep.resolve(length)

    @classmethod
    def least_tiles(cls, first: int, last: int, tile: TileShape) -> int:
        """The last row tile, which may be cut short, gets as many tiles as a whole one."""
        return min(last // tile.key + 1, tile.mandatory)

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        """Top tiles of each row, one tile more a size."""
        return (
            SizeRange(
                "block_sparse",
                "block_sparse",
                tile.key_tiles,
                lambda size, _: cls(keep=tokens((size + 1) * tile.key)),
            ),
        )

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        return cls.ranges(tile, 0)

    @classmethod
    def timed(cls, length: int) -> tuple[Self, ...]:
        return tuple(cls(keep=tokens(max(least, length // part))) for least, part in ((256, 16), (512, 4)))


Pattern = Annotated[
    Dense | AShape | VerticalSlash | BlockSparse,
    Field(discriminator="pattern"),
]
PATTERNS: Mapping[str, type[Pattern]] = {
    kind.model_fields["pattern"].default: kind for kind in get_args(get_args(Pattern)[0])
}
GONE = {"adaptive": "0.2.0"}
"""Patterns of earlier versions, each with the last one that ran it."""
PatternRange = SizeRange[Pattern]


def mandatory_density(length: int, tile: TileShape, family: str) -> float:
    """The least share of the causal tiles of a prompt of `length` tokens that a head of a family computes.

    Every pattern computes the diagonal tile, the one before it, and the first key tile (design, section 4). At 1K
    tokens that is most of the triangle, at 128K next to nothing.
    """
    rows = [(first, min(first + tile.query, length) - 1) for first in range(0, length, tile.query)]
    least = sum(PATTERNS[family].least_tiles(first, last, tile) for first, last in rows)
    return least / sum(last // tile.key + 1 for _, last in rows)
