"""What every index builder is given, and what it returns.

Shapes: B batch, H query heads, h the heads that one builder serves, G KV heads, T query tiles (row tiles), W listed
key tiles, C single columns, N words of 32 columns, S tokens, D head size.

All that decides a shape is known to the host: budgets, lengths, tile sizes. Nothing here reads a tensor back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.index.line_scores import LineScores
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.kernels.topk import on_device
from sparsekv.plans.budget import Budget
from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Where each row tile lies, int64 [B, T] on the device. Padding row tiles end at -1 and so hold nothing."""

    first_BT: torch.Tensor  # token of the first row
    last_BT: torch.Tensor  # token of the last row that is not padding
    base_BT: torch.Tensor  # key tile of the first row
    end_BT: torch.Tensor  # key tile of the last row
    seen_BT: torch.Tensor  # first key tile that the layer's window shows to any row; 0 without a window

    def part(self, rows: slice) -> RowTiles:
        """Only these row tiles."""
        return RowTiles(
            self.first_BT[:, rows],
            self.last_BT[:, rows],
            self.base_BT[:, rows],
            self.end_BT[:, rows],
            self.seen_BT[:, rows],
        )


@dataclass(frozen=True, slots=True)
class IndexCall:
    """One layer's queries and keys, and where they lie."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    scale: float
    window: int | None
    lines: Mapping[int, LineScores] | None = None  # of all heads, by last_q, where they are known already
    by_triton: bool = False  # whether Triton builds what it can

    @property
    def device(self) -> torch.device:
        """Where the index is built."""
        return self.q_BHSD.device

    @property
    def batch(self) -> int:
        """Batch rows."""
        return self.q_BHSD.shape[0]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_BHSD.shape[1] // self.k_BGKD.shape[1]

    @property
    def row_tiles(self) -> int:
        """T."""
        return self.chunk.query_tiles(self.tile, self.q_BHSD.shape[2])

    @property
    def key_tiles(self) -> int:
        """Key tiles of the longest batch row."""
        return self.chunk.key_tiles(self.tile)

    @property
    def rows(self) -> tuple[int, ...]:
        """Query rows of each batch row that are not padding."""
        return tuple(n - p for p, n in zip(self.chunk.past, self.chunk.lengths, strict=True))

    @property
    def phases(self) -> tuple[int, ...]:
        """How far into a key tile the row tiles of each batch row begin; the same for all, as query % key is 0."""
        return tuple(past % self.tile.key for past in self.chunk.past)

    def resolve(self, budgets: Sequence[Budget]) -> list[list[int]]:
        """Tokens of each budget in each batch row: [B][h]."""
        return [[budget.resolve(length) for budget in budgets] for length in self.chunk.lengths]

    def tile_bounds(self, budgets: Sequence[Budget]) -> list[list[int]]:
        """The most key tiles of a row under each budget, never fewer than the mandatory ones: [B][h]."""
        return [
            [max(ceil_div(most, self.tile.key), self.mandatory_tiles(phase)) for most in row]
            for row, phase in zip(self.resolve(budgets), self.phases, strict=True)
        ]

    def diagonal_tiles(self, phase: int) -> int:
        """Key tiles that the diagonal of a whole row tile overlaps."""
        return (phase + self.tile.query - 1) // self.tile.key + 1

    def mandatory_tiles(self, phase: int) -> int:
        """The most key tiles that every pattern computes in a row: the diagonal, the one before, the first."""
        return self.diagonal_tiles(phase) + 2

    def most_tiles(self, bound: int) -> int:
        """W for at most `bound` tiles a row, not more than a row can see."""
        bound = min(bound, self.key_tiles)
        if self.window is None:
            return bound
        seen = (self.diagonal_tiles(p) - (p - self.window + 1) // self.tile.key for p in self.phases)
        return min(bound, max(seen))

    def locate(self) -> RowTiles:
        """The row tiles of the call."""
        past_B1, length_B1 = on_device([self.chunk.past, self.chunk.lengths], self.device).unsqueeze(-1)
        first_BT = past_B1 + torch.arange(self.row_tiles, device=self.device) * self.tile.query
        last_BT = torch.minimum(first_BT + self.tile.query, length_B1) - 1
        last_BT = last_BT.masked_fill(first_BT >= length_B1, -1)
        return RowTiles(
            first_BT=first_BT,
            last_BT=last_BT,
            base_BT=floor_div(first_BT, self.tile.key),
            end_BT=floor_div(last_BT, self.tile.key),
            seen_BT=self._first_seen(first_BT),
        )

    def _first_seen(self, first_BT: torch.Tensor) -> torch.Tensor:
        if self.window is None:
            return torch.zeros_like(first_BT)
        return floor_div(first_BT - self.window + 1, self.tile.key).clamp_(min=0)


@dataclass(frozen=True, slots=True)
class IndexWidths:
    """How wide an index is; follows from budgets and lengths."""

    tiles: int  # W
    columns: int  # C


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """The index of the heads of one kind; see TileIndex for what the fields mean."""

    tiles_BhTW: torch.Tensor
    counts_BhT: torch.Tensor
    columns_BhC: torch.Tensor
    live_BhTN: torch.Tensor


def empty_tiles(call: IndexCall, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [B, h, T, W] and counts [B, h, T] for a builder to fill."""
    shape = (call.batch, heads, call.row_tiles)
    tiles_BhTW = torch.full((*shape, width), NO_TILE, dtype=torch.int32, device=call.device)
    return tiles_BhTW, torch.zeros(shape, dtype=torch.int32, device=call.device)


def without_columns(call: IndexCall, tiles_BhTW: torch.Tensor, counts_BhT: torch.Tensor) -> HeadIndex:
    """The index of heads that compute tiles only."""
    none_BhC = torch.empty((*tiles_BhTW.shape[:2], 0), dtype=torch.int32, device=call.device)
    none_BhTN = torch.empty((*counts_BhT.shape, 0), dtype=torch.int32, device=call.device)
    return HeadIndex(tiles_BhTW, counts_BhT, none_BhC, none_BhTN)


def ceil_div(tokens: int, size: int) -> int:
    """Tiles that hold this many tokens."""
    return -(-tokens // size)


def floor_div(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """The tile of each token, also of tokens before the first."""
    return tokens.div(size, rounding_mode="floor")


def take_heads(x_BHX: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """These heads of dimension 1: a view where they are adjacent, a copy elsewhere."""
    first, count = heads[0], len(heads)
    if list(heads) == list(range(first, first + count)):
        return x_BHX.narrow(1, first, count)
    return x_BHX.index_select(1, on_device(list(heads), x_BHX.device))
