"""What an index builder hands to a kernel: which key tiles and which single columns each query tile computes.

Shapes: B batch, H query heads, T query tiles, W most listed key tiles in a row, C most single columns of a head,
N = ceil(C / 32) words of 32 columns, S queries, D head size.

Query tile t of batch row b covers the rows past[b] + t * tile.query onwards; key tiles are counted from key 0.
The mask a kernel executes is, for row i of query tile t and key j:

    j <= i and j < lengths[b] and i - j < window          (window: the layer's own, or none)
    and (dense[h]  or  j // tile.key in tiles[b, h, t]  or  (j is column c of head h and live[b, h, t] has bit c))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import TileShape

NO_TILE = -1
NO_COLUMN = -1
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where the queries of a call lie, known to the host, so that nothing has to ask the device.

    Row r of batch row b is token past[b] + r; the rows from lengths[b] - past[b] on are padding. Keys from
    lengths[b] on are not looked at, whatever memory holds there.
    """

    past: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("past", "lengths"):  # lists are taken, but a chunk is a key of what is kept between layers
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.past) != len(self.lengths) or not self.past:
            raise ShapeError(f"past and lengths need one entry a batch row, found {self.past} and {self.lengths}")
        if any(p < 0 or n < p for p, n in zip(self.past, self.lengths, strict=True)):
            raise ShapeError(f"need 0 <= past <= lengths in every batch row, found {self.past} and {self.lengths}")

    @classmethod
    def uniform(cls, batch: int, past: int, length: int) -> Chunk:
        """The same place in every batch row."""
        return cls((past,) * batch, (length,) * batch)

    @property
    def longest(self) -> int:
        """Keys of the longest batch row."""
        return max(self.lengths)

    def query_tiles(self, tile: TileShape, queries: int) -> int:
        """T: query tiles that cover `queries` rows."""
        return -(-queries // tile.query)

    def key_tiles(self, tile: TileShape) -> int:
        """Key tiles of the longest batch row."""
        return -(-self.longest // tile.key)

    def causal_tiles(self, tile: TileShape) -> int:
        """Tiles a dense causal kernel computes for one head, summed over the batch rows."""
        return sum(_causal_tiles(p, n, tile) for p, n in zip(self.past, self.lengths, strict=True))


def _causal_tiles(past: int, length: int, tile: TileShape) -> int:
    return sum((min(first + tile.query, length) - 1) // tile.key + 1 for first in range(past, length, tile.query))


@dataclass(frozen=True, slots=True)
class TileIndex:
    """Tiles and single columns of every head of one layer. Padding rows (past the length) hold nothing."""

    tile: TileShape
    tiles_BHTW: torch.Tensor  # int32, ascending, the first counts_BHT valid, the rest NO_TILE; unused by dense heads
    counts_BHT: torch.Tensor  # int32; for dense heads every causal tile of the row
    columns_BHC: torch.Tensor  # int32, ascending, padded with NO_COLUMN; C may be 0
    live_BHTN: torch.Tensor  # int32 words: bit b of word n says that column 32 n + b is computed singly in this row
    dense_H: torch.Tensor  # bool: heads that compute every causal tile
    # The heads of dense_H, known to the host so that launches can be planned without asking the device; None where
    # whoever made the index did not know.
    dense_heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """What every attention function here returns."""

    out_BHSD: torch.Tensor  # dtype of q; padding rows are 0
    lse_BHS: torch.Tensor | None  # float32 natural log-sum-exp of the scaled scores; padding rows are -inf
