"""Which rows candidates are scored on: all of a prompt, or a sample of query tiles, for where every row is too dear.

Of a sample, each query tile becomes a batch row of its own: its queries, all keys, and its part of the index. Kernels
see nothing unusual. All rows are left as they are: a thousand batch rows would be as many launches of some backends.

Shapes: X batch rows, H query heads, G KV heads, M rows of each, S rows of the prompt, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import TileShape


class Rows(Protocol):
    """Rows of a prompt, as the batch rows of one call."""

    @property
    def chunk(self) -> Chunk:
        """Where they lie."""
        ...

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """Their queries, of a batch of one: [X, H, M, D], zeros beyond the prompt."""
        ...

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """All keys (or values) for each batch row, without copying them: [X, G, S, D]."""
        ...

    def index(self, index: TileIndex) -> TileIndex:
        """The part of an index that belongs to them."""
        ...

    def spread_mask(self, device: torch.device) -> torch.Tensor:
        """[X, M]: rows that stand for all rows of the prompt."""
        ...

    def tail_mask(self, device: torch.device) -> torch.Tensor:
        """[X, M]: rows of the question and the answer."""
        ...


def rows_of(length: int, tail_start: int, tile: TileShape, stride: int) -> Rows:
    """Every `stride`-th query tile of a prompt of `length` tokens, and those from `tail_start` on; of 1, all rows."""
    return AllRows(length, tail_start) if stride == 1 else TileSample.of(length, tail_start, tile, stride)


@dataclass(frozen=True, slots=True)
class AllRows:
    """The whole prompt, as it is."""

    length: int
    tail_start: int

    @property
    def chunk(self) -> Chunk:
        """See `Rows`."""
        return Chunk.uniform(1, 0, self.length)

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return q_BHSD

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return k_BGSD

    def index(self, index: TileIndex) -> TileIndex:
        """See `Rows`."""
        return index

    def spread_mask(self, device: torch.device) -> torch.Tensor:
        """See `Rows`."""
        return torch.ones(1, self.length, dtype=torch.bool, device=device)

    def tail_mask(self, device: torch.device) -> torch.Tensor:
        """See `Rows`."""
        return torch.arange(self.length, device=device)[None] >= self.tail_start


@dataclass(frozen=True, slots=True)
class TileSample:
    """Some query tiles of a prompt of `length` tokens.

    Attributes:
        numbers: the tiles: first the even spread, then what the tail has besides.
        spread: how many of them belong to the even spread.
    """

    length: int
    tail_start: int
    tile: TileShape
    numbers: tuple[int, ...]
    spread: int

    @classmethod
    def of(cls, length: int, tail_start: int, tile: TileShape, stride: int) -> TileSample:
        """Every `stride`-th tile, and those of the tail."""
        count = -(-length // tile.query)
        spread = tuple(range(min(stride, count) - 1, count, stride))
        tail = tuple(number for number in range(tail_start // tile.query, count) if number not in spread)
        return cls(length, tail_start, tile, spread + tail, len(spread))

    @property
    def chunk(self) -> Chunk:
        """See `Rows`."""
        firsts = [number * self.tile.query for number in self.numbers]
        return Chunk(tuple(firsts), tuple(min(first + self.tile.query, self.length) for first in firsts))

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        padding = -self.length % self.tile.query
        padded_HSD = torch.nn.functional.pad(q_BHSD[0], (0, 0, 0, padding)) if padding else q_BHSD[0]
        tiled_HTMD = padded_HSD.reshape(padded_HSD.shape[0], -1, self.tile.query, padded_HSD.shape[2])
        return tiled_HTMD[:, list(self.numbers)].transpose(0, 1).contiguous()

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return k_BGSD.expand(len(self.numbers), -1, -1, -1)

    def index(self, index: TileIndex) -> TileIndex:
        """See `Rows`."""
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
        """See `Rows`."""
        in_spread_X = torch.arange(len(self.numbers), device=device) < self.spread
        return in_spread_X[:, None] & (self._positions(device) < self.length)

    def tail_mask(self, device: torch.device) -> torch.Tensor:
        """See `Rows`."""
        position_XM = self._positions(device)
        return (position_XM >= self.tail_start) & (position_XM < self.length)

    def _positions(self, device: torch.device) -> torch.Tensor:
        numbers_X = torch.tensor(self.numbers, device=device)
        return numbers_X[:, None] * self.tile.query + torch.arange(self.tile.query, device=device)
