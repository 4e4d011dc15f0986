"""What patterns, segments and cache rules spend, and the tiles that they spend it on.

A budget is `{tokens: n}` or `{fraction: x}`, never a bare number. A fraction is of the context length at the time of
use: past + chunk in prefill, all cached tokens in decode.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

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
    """A budget of `count` tokens."""
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
        """Key tiles of so many tokens."""
        return -(-length // self.key)

    def row_tiles(self, length: int, density: float) -> int:
        """K such that rows of at most K tiles compute that share of the causal tiles: early rows have fewer."""
        tiles = self.key_tiles(length)
        return min(tiles, max(self.mandatory, round(tiles * (1 - math.sqrt(1 - density)))))
