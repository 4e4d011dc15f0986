"""Sparsity patterns of one attention head, and the budgets that patterns, segments and cache rules spend.

A pattern only says which key tiles and single columns a query tile computes. The mask of a head is
(selected tiles, plus single columns) and causal and the layer's own window. Token parameters select tiles, rounded
outward. Every pattern also computes the diagonal tile, the one before it, and the first key tile, within its budgets.

To add a pattern: add its class here and to `Pattern`, its index builder in `kernels/index/`, its row in
`kernels/index/build.py`, and its candidates in `planner/profile/search_space.py`.

A budget is `{tokens: n}` or `{fraction: x}`, never a bare number. A fraction is of the context length at the time of
use: past + chunk in prefill, all cached tokens in decode.

Sources: a_shape, vertical_slash, block_sparse: MInference 1.0, section 3; adaptive: XAttention and FlexPrefill.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

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


class Dense(Part):
    """Every causal tile."""

    pattern: Literal["dense"] = "dense"
    data_dependent: ClassVar[bool] = False


class AShape(Part):
    """Tiles touched by j < sink or i - j < window: StreamingLLM's mask. Static, no index building."""

    pattern: Literal["a_shape"] = "a_shape"
    sink: Budget
    window: Budget
    data_dependent: ClassVar[bool] = False


MOST_SAMPLED = 1024  # queries of a vertical-slash head


class VerticalSlash(Part):
    """The heaviest columns and diagonals, estimated from the last `last_q` queries.

    `vertical` and `slash` are how many columns and diagonals are computed; `max_tiles` bounds the tokens of the tiles
    in any one row (mandatory tiles included), the least scoring diagonals being dropped first.
    """

    pattern: Literal["vertical_slash"] = "vertical_slash"
    vertical: Budget
    slash: Budget
    last_q: Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLED)] = 64
    max_tiles: Budget
    data_dependent: ClassVar[bool] = True


class BlockSparse(Part):
    """The top tiles of each row by mean-pooled queries and keys; `keep` is tokens of tiles a row."""

    pattern: Literal["block_sparse"] = "block_sparse"
    keep: Budget
    data_dependent: ClassVar[bool] = True


class Adaptive(Part):
    """The smallest set of tiles a row whose estimated score reaches `mass` of the row's total."""

    pattern: Literal["adaptive"] = "adaptive"
    score: Literal["antidiagonal", "pooled"] = "antidiagonal"
    mass: Share
    max_tiles: Budget
    data_dependent: ClassVar[bool] = True


Pattern = Annotated[
    Dense | AShape | VerticalSlash | BlockSparse | Adaptive,
    Field(discriminator="pattern"),
]


def of_context(pattern: Pattern, length: int) -> Pattern:
    """A pattern of columns and diagonals with budgets as shares of the context, the same tokens at `length` of them.

    Where a host cuts prompts, a chunk chooses among the lines of its own context. The number that is right at the end
    of a prompt would be a larger share of an early chunk: by shares, the chunks of a prompt have about the density of
    the whole. Other patterns are kept: sinks and windows do not grow with the context.
    """
    if not isinstance(pattern, VerticalSlash):
        return pattern
    counts = {name: getattr(pattern, name).tokens or 0 for name in _BUDGETS}
    # Budgets round up: half a token less gives the number itself, also once a file has rounded the share.
    shares = {name: fraction((count - 0.5) / length) for name, count in counts.items() if 0 < count <= length}
    return pattern.model_copy(update=shares)


def in_tokens(pattern: Pattern, length: int) -> Pattern:
    """What `of_context` was given: the same pattern with its shares as tokens of a context of `length`."""
    if not isinstance(pattern, VerticalSlash):
        return pattern
    budgets: dict[str, Budget] = {name: getattr(pattern, name) for name in _BUDGETS}
    return pattern.model_copy(
        update={name: tokens(one.resolve(length)) for name, one in budgets.items() if one.fraction is not None}
    )


_BUDGETS = ("vertical", "slash", "max_tiles")  # of columns and diagonals
