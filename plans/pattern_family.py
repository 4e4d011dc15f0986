"""Says what patterns spend, and all that the program asks a pattern: bounds, what to search, what to time.

A budget is `{tokens: n}` or `{fraction: x}`, never a bare number. A fraction is of the context length at the time of
use: past + chunk in prefill, all cached tokens in decode.

A pattern (patterns.py) answers what is not so for it; nothing else asks which family it has.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from sparsekv.plans.types import ExactInt, Part, Share

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
        """Returns how many sizes there are up to the first that reaches `most`."""
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
        """Returns what `of_context` was called on: the same pattern with its shares as tokens of a context of
        `length`."""
        budgets: dict[str, Budget] = {name: getattr(self, name) for name in self.growing}
        shares = {name: one for name, one in budgets.items() if one.fraction is not None}
        return self.model_copy(update={name: tokens(one.resolve(length)) for name, one in shares.items()})

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        """Returns what the planner tries; a family without is executed, never searched."""
        return ()

    @classmethod
    def published(cls, tile: TileShape) -> tuple[SizeRange[Self], ...]:
        """Returns what the search of MInference 1.0 tries, with the numbers of the paper."""
        return ()

    @classmethod
    def timed(cls, length: int) -> tuple[Self, ...]:
        """A few that the cost of a device is measured with: sparse and less so. Needed by a family with `ranges`."""
        return ()
