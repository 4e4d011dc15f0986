"""Sparsity patterns of one attention head: what each spends, and all that the program asks a pattern about itself.

A pattern only says which key tiles and single columns a query tile computes. The mask of a head is
(selected tiles, plus single columns) and causal and the layer's own window. Token parameters select tiles, rounded
outward. Every pattern also computes the diagonal tile, the one before it, and the first key tile, within its budgets.

A budget is `{tokens: n}` or `{fraction: x}`, never a bare number. A fraction is of the context length at the time of
use: past + chunk in prefill, all cached tokens in decode.

To add a pattern: its class and its name in `Pattern` here, its index builder in `kernels/index/`, the builder's row in
`kernels/index/build.py`, and its test. Files, options, the search, cost and memory ask the class.

Source: MInference 1.0, section 3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar, get_args

from pydantic import ConfigDict, Field, model_validator

from sparsekv.plans.types import ExactInt, Part, Share

METHOD_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
MethodName = Annotated[str, Field(strict=True, pattern=METHOD_NAME)]
Tokens = Annotated[int, Field(strict=True, ge=0, le=1 << 40)]


class Budget(Part):
    """Either a number of tokens or a fraction of the context; exactly one is set."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    tokens: Tokens | None = None
    fraction: Share | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Budget:
        if (self.tokens is None) == (self.fraction is None):
            raise ValueError("expected {tokens: n} or {fraction: x}, exactly one of the two")
        return self

    def resolve(self, length: int) -> int:
        """Tokens this budget allows in a context of `length` tokens, rounded up, at most `length`."""
        if self.tokens is not None:
            return min(self.tokens, length)
        assert self.fraction is not None
        # A fraction written as 0.1 must not become one token more than a tenth through binary rounding.
        return min(length, math.ceil(self.fraction * length - 1e-9))

    def __str__(self) -> str:
        return f"{self.tokens}" if self.tokens is not None else f"{self.fraction:.4g} of the context"


def tokens(count: int) -> Budget:
    return Budget(tokens=count)


def fraction(share: float) -> Budget:
    """A budget of a share (0 to 1] of the context."""
    return Budget(fraction=share)


TileSide = Annotated[Literal[64, 128], ExactInt]


class TileShape(Part):
    """Rows and columns of the smallest unit that a kernel computes."""

    query: TileSide = 128
    key: TileSide = 128

    @property
    def mandatory(self) -> int:
        """Tiles that every pattern computes in a whole row tile: those of the diagonal, the one before, the first."""
        return (self.query - 1) // self.key + 3

    def key_tiles(self, length: int) -> int:
        return -(-length // self.key)


P_co = TypeVar("P_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes that the largest part of a pattern may take, ascending.

    With a step they run through `start`, so that a search that need not move lands on the published value. Without
    one they grow by a sixteenth of an octave: as fine at 50 diagonals as at 5000.
    """

    start: int
    step: int | None

    def count(self, most: int) -> int:
        """The count of sizes up to the first that reaches `most`."""
        if self.step is None:
            return min(len(_OCTAVES), bisect_left(_OCTAVES, most) + 1)
        return max(0, most - self.start % self.step) // self.step + 2

    def value(self, size: int) -> int:
        """The size of that number, from 0 on."""
        return _OCTAVES[size] if self.step is None else self.start % self.step + size * self.step


_OCTAVES = (0, *sorted({round(2.0 ** (n / 16)) for n in range(16 * 30)}))


@dataclass(frozen=True, slots=True)
class SizeRange(Generic[P_co]):
    """Patterns of one family ordered by size; a larger size never computes less.

    Attributes:
        name: what profiles call it.
        sizes: how many sizes make a difference at a length: 0 to sizes - 1.
        pattern: the pattern of a size, with at most so many tokens of tiles in a row where the family can bound it.
        last_q: queries that its index samples; None: it samples none.
    """

    family: str
    name: str
    sizes: Callable[[int], int]
    pattern: Callable[[int, int], P_co]
    last_q: int | None = None


class PatternFamily(Part):
    """The questions that every pattern answers. A family overrides the answers that differ.

    Attributes:
        growing: budgets that grow with the context; sinks and windows do not.
        by_default: whether it is searched when nobody names families; all with `ranges` are when named.
    """

    growing: ClassVar[tuple[str, ...]] = ()
    by_default: ClassVar[bool] = False

    def tile_tokens(self, length: int) -> int:
        """Most tokens of the tiles of a row, before they are rounded outward."""
        raise NotImplementedError

    def most_columns(self, length: int) -> int:
        return 0

    @classmethod
    def least_tiles(cls, first: int, last: int, tile: TileShape) -> int:
        """Least tiles of the row tile of these tokens: the mandatory ones that it has."""
        base, seen = first // tile.key, last // tile.key + 1
        return seen - max(base - 1, 0) + int(base > 1)

    def of_context(self, length: int) -> Self:
        """The same pattern with its growing budgets as shares of the context, the same tokens at `length` of them (of
        up to 64K tokens: a file has six digits of a share).

        Where a host cuts prompts, a chunk chooses among the lines of its own context. The number that is right at the
        end of a prompt would be a larger share of an early chunk: by shares, the chunks of a prompt have about the
        density of the whole.
        """
        counts = {name: getattr(self, name).tokens or 0 for name in self.growing}
        # Budgets round up: half a token less gives the number itself, also once a file has rounded the share.
        shares = {name: fraction((count - 0.5) / length) for name, count in counts.items() if 0 < count <= length}
        return self.model_copy(update=shares) if shares else self

    def in_tokens(self, length: int) -> Self:
        """The inverse of `of_context`: the same pattern with its shares as tokens of a context of `length`."""
        budgets: dict[str, Budget] = {name: getattr(self, name) for name in self.growing}
        shares = {name: one for name, one in budgets.items() if one.fraction is not None}
        return self.model_copy(update={name: tokens(one.resolve(length)) for name, one in shares.items()})

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        """The sizes that the planner tries; a family without is executed, never searched."""
        return ()

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        """The sizes that the search of MInference 1.0 tries, with the numbers of the paper."""
        return ()

    @classmethod
    def timed(cls, length: int) -> Self:
        """The pattern whose index the prices of a device are measured with, of a family with `ranges`."""
        raise NotImplementedError


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
    def timed(cls, length: int) -> Self:
        return cls(sink=tokens(128), window=tokens(length // 4))


MOST_SAMPLED = 1024  # queries of a vertical-slash head
_PUBLISHED_LAST_Q = 64
_PUBLISHED_STEP = 50
# More sampled queries find more of what a head looks for; from some length on, they cost more than they find.
_LAST_Q = 256
_LAST_Q_UP_TO = 1 << 16


def last_q_for(length: int) -> int:
    """The number of last queries that our own vertical-slash patterns sample."""
    return _LAST_Q if length <= _LAST_Q_UP_TO else _PUBLISHED_LAST_Q


class VerticalSlash(PatternFamily):
    """The heaviest columns and diagonals, estimated from the last `last_q` queries (of a chunk behind a longer past, at
    most a 32nd, or 64).

    `vertical` and `slash` are how many columns and diagonals are computed; `max_tiles` bounds the tokens of the tiles
    in any one row (mandatory tiles included), the least scoring diagonals being dropped first.
    """

    pattern: Literal["vertical_slash"] = "vertical_slash"
    vertical: Budget
    slash: Budget
    last_q: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLED)] = 64
    max_tiles: Budget
    growing: ClassVar[tuple[str, ...]] = ("vertical", "slash", "max_tiles")
    by_default: ClassVar[bool] = True  # no other one improved on it in any model measured

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
    def timed(cls, length: int) -> Self:
        few, many = tokens(max(256, length // 16)), tokens(max(512, length // 5))
        return cls(vertical=many, slash=few, last_q=last_q_for(length), max_tiles=few)


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
                "block_sparse", "block_sparse", tile.key_tiles, lambda size, _: cls(keep=tokens((size + 1) * tile.key))
            ),
        )

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        return cls.ranges(tile, 0)

    @classmethod
    def timed(cls, length: int) -> Self:
        return cls(keep=tokens(max(512, length // 4)))


class Registered(PatternFamily):
    """Tiles by a prefill rule from outside, under the name that it is registered by (kernels/methods.py).

    `budget` is a share of the causal tiles for a rule that scores tiles, or the rule's own parameter.
    """

    pattern: Literal["registered"] = "registered"
    name: MethodName
    budget: Budget
    growing: ClassVar[tuple[str, ...]] = ("budget",)

    def tile_tokens(self, length: int) -> int:
        """A row may have all tiles."""
        return length

    def most_columns(self, length: int) -> int:
        return length


Pattern = Annotated[
    Dense | AShape | VerticalSlash | BlockSparse | Registered,
    Field(discriminator="pattern"),
]
PATTERNS: Mapping[str, type[Pattern]] = {
    kind.model_fields["pattern"].default: kind for kind in get_args(get_args(Pattern)[0])
}
GONE = {"adaptive": "0.2.0"}
"""Patterns of earlier versions, each with the last one that ran it."""
PatternRange = SizeRange[Pattern]


def mandatory_density(length: int, tile: TileShape, family: str, past: int = 0) -> float:
    """The least share of the causal tiles of a prompt of `length` tokens, of its rows behind `past`, that a head of a
    family computes.

    Every pattern computes the diagonal tile, the one before it, and the first key tile (design, section 4). At 1K
    tokens that is most of the triangle, at 128K next to nothing.
    """
    rows = [(first, min(first + tile.query, length) - 1) for first in range(past, length, tile.query)]
    kind = PATTERNS.get(family, Registered)
    least = sum(kind.least_tiles(first, last, tile) for first, last in rows)
    return least / sum(last // tile.key + 1 for _, last in rows)
