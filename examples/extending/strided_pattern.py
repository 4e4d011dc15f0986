"""A pattern of docs/extending.md: its class, which goes into plans/patterns.py. What it imports is there already."""

from typing import Annotated, Literal, Self

from pydantic import Field

from sparsekv.plans.patterns import PatternFamily, SizeRange, TileShape


class Strided(PatternFamily):
    """Every `stride`-th key tile, counted from the first (Sparse Transformers, section 4.2). Static."""

    pattern: Literal["strided"] = "strided"
    stride: Annotated[int, Field(strict=True, ge=1, le=1 << 20)]

    def tile_tokens(self, length: int) -> int:
        """Of tiles of 128, the largest there are."""
        return length // self.stride + 4 * 128

    @classmethod
    def ranges(cls, tile: TileShape, length: int) -> tuple[SizeRange[Self], ...]:
        """From the mandatory tiles alone to all tiles."""
        return (SizeRange("strided", "strided", lambda most: 64, lambda size, _: cls(stride=2 ** ((63 - size) // 4))),)

    @classmethod
    def timed(cls, length: int) -> Self:
        """A quarter of the tiles."""
        return cls(stride=4)
