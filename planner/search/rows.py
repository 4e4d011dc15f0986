"""A sample of query tiles, so that candidates can be scored without computing every row.

Each sampled query tile becomes a batch row of its own: its queries, all keys, and its part of the index. Kernels see
nothing unusual.

Shapes: X sampled tiles, H query heads, G KV heads, M rows of a tile, S rows of the prompt, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True, slots=True)
class RowSample:
    """Which query tiles of a prompt of `length` tokens are computed: every `stride`-th, and those from `tail_start` on.

    Attributes:
        numbers: the tiles, ascending.
        spread: how many of them belong to the even spread; they come first.
    """

    length: int
    tail_start: int
    tile: TileShape
    numbers: tuple[int, ...]
    spread: int

    @classmethod
    def of(cls, length: int, tail_start: int, tile: TileShape, stride: int) -> RowSample:
        """The sample of a prompt; with a stride of 1 it is every tile."""
        count = -(-length // tile.query)
        spread = tuple(range(min(stride, count) - 1, count, stride))
        tail = tuple(number for number in range(tail_start // tile.query, count) if number not in spread)
        return cls(length, tail_start, tile, spread + tail, len(spread))

    @property
    def chunk(self) -> Chunk:
        """Where the rows of each tile lie."""
        firsts = [number * self.tile.query for number in self.numbers]
        return Chunk(tuple(firsts), tuple(min(first + self.tile.query, self.length) for first in firsts))

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """The queries of the sampled tiles, of a batch of one: [X, H, M, D], zeros beyond the prompt."""
        padding = -self.length % self.tile.query
        padded_HSD = torch.nn.functional.pad(q_BHSD[0], (0, 0, 0, padding)) if padding else q_BHSD[0]
        tiled_HTMD = padded_HSD.reshape(padded_HSD.shape[0], -1, self.tile.query, padded_HSD.shape[2])
        return tiled_HTMD[:, list(self.numbers)].transpose(0, 1).contiguous()

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """All keys (or values) for each sampled tile, without copying them: [X, G, S, D]."""
        return k_BGSD.expand(len(self.numbers), -1, -1, -1)

    def index(self, index: TileIndex) -> TileIndex:
        """The part of an index that belongs to the sampled tiles."""
        numbers = list(self.numbers)
        return TileIndex(
            tile=index.tile,
            tiles_BHTW=index.tiles_BHTW[0, :, numbers].transpose(0, 1)[:, :, None].contiguous(),
            counts_BHT=index.counts_BHT[0, :, numbers].T[:, :, None].contiguous(),
            columns_BHC=index.columns_BHC.expand(len(numbers), -1, -1).contiguous(),
            live_BHTN=index.live_BHTN[0, :, numbers].transpose(0, 1)[:, :, None].contiguous(),
            dense_H=index.dense_H,
        )

    def spread_mask(self, device: torch.device) -> torch.Tensor:
        """[X, M]: rows that stand for all rows of the prompt."""
        in_spread_X = torch.arange(len(self.numbers), device=device) < self.spread
        return in_spread_X[:, None] & (self._positions(device) < self.length)

    def tail_mask(self, device: torch.device) -> torch.Tensor:
        """[X, M]: rows of the question and the answer."""
        position_XM = self._positions(device)
        return (position_XM >= self.tail_start) & (position_XM < self.length)

    def _positions(self, device: torch.device) -> torch.Tensor:
        numbers_X = torch.tensor(self.numbers, device=device)
        return numbers_X[:, None] * self.tile.query + torch.arange(self.tile.query, device=device)
