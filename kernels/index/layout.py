"""What every index builder is given, and what it returns.

Shapes: B batch, H query heads, h the heads that one builder serves, G KV heads, T query tiles (row tiles), W listed
key tiles, C single columns, N words of 32 columns, S tokens, D head size.

All that decides a shape is known to the host: budgets, lengths, tile sizes. Nothing here reads a tensor back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.device_cache import kept_on_device, on_device
from sparsekv.kernels.tiles import NO_TILE, Chunk
from sparsekv.plans.patterns import Budget, TileShape


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
class Layout:
    """What the host knows of one layer's queries and keys; all that decides a shape follows from it."""

    chunk: Chunk
    tile: TileShape
    window: int | None
    batch: int
    heads: int  # H
    kv_heads: int  # G
    queries: int  # rows of the queries, padding included
    head_dim: int
    dtype: torch.dtype
    device: torch.device  # where the index is built

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def row_tiles(self) -> int:
        """T."""
        return self.chunk.query_tiles(self.tile, self.queries)

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
        """The row tiles of the call; not to be written to."""
        return _locate(self.device, self)


@dataclass(frozen=True, slots=True)
class LineScores:
    """How much attention each line received, float32, summing over a head to its sampled queries."""

    vertical_BhS: torch.Tensor  # index j: the column of key j
    slash_BhS: torch.Tensor  # index o: the diagonal i - j = o


@dataclass(frozen=True, slots=True, init=False, eq=False)
class IndexCall(Layout):
    """One layer's queries and keys, and where they lie."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    scale: float
    lines: Mapping[int, LineScores] | None  # of all heads, by last_q, where they are known already
    by_triton: bool  # whether Triton builds what it can
    layout: Layout  # the call without its tensors: what follows from it may be kept

    def __init__(
        self,
        q_BHSD: torch.Tensor,
        k_BGKD: torch.Tensor,
        chunk: Chunk,
        tile: TileShape,
        scale: float,
        window: int | None,
        lines: Mapping[int, LineScores] | None = None,
        by_triton: bool = False,
    ) -> None:
        batch, heads, queries, head_dim = q_BHSD.shape
        place = (chunk, tile, window, batch, heads, k_BGKD.shape[1], queries, head_dim, q_BHSD.dtype, q_BHSD.device)
        Layout.__init__(self, *place)
        put = object.__setattr__
        put(self, "q_BHSD", q_BHSD)
        put(self, "k_BGKD", k_BGKD)
        put(self, "scale", scale)
        put(self, "lines", lines)
        put(self, "by_triton", by_triton)
        put(self, "layout", Layout(*place))

    # Layouts are equal where their numbers are; calls would be so whatever their tensors, and share what is kept.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def locate(self) -> RowTiles:
        """See Layout."""
        return self.layout.locate()


# Up to 40 bytes a row tile: 320 KiB at a million tokens.
@kept_on_device(most=4)
def _locate(device: torch.device, layout: Layout) -> RowTiles:
    query, key, window = layout.tile.query, layout.tile.key, layout.window
    past_B1, length_B1 = on_device([layout.chunk.past, layout.chunk.lengths], device).unsqueeze(-1)
    first_BT = past_B1 + torch.arange(layout.row_tiles, device=device) * query
    last_BT = torch.minimum(first_BT + query, length_B1) - 1
    last_BT = last_BT.masked_fill(first_BT >= length_B1, -1)
    seen_BT = torch.zeros_like(first_BT)
    if window is not None:
        seen_BT = floor_div(first_BT - window + 1, key).clamp_(min=0)
    return RowTiles(
        first_BT=first_BT,
        last_BT=last_BT,
        base_BT=floor_div(first_BT, key),
        end_BT=floor_div(last_BT, key),
        seen_BT=seen_BT,
    )


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


def empty_tiles(call: Layout, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [B, h, T, W] and counts [B, h, T] for a builder to fill."""
    shape = (call.batch, heads, call.row_tiles)
    tiles_BhTW = torch.full((*shape, width), NO_TILE, dtype=torch.int32, device=call.device)
    return tiles_BhTW, torch.zeros(shape, dtype=torch.int32, device=call.device)


def without_columns(call: Layout, tiles_BhTW: torch.Tensor, counts_BhT: torch.Tensor) -> HeadIndex:
    """The index of heads that compute tiles only."""
    none_BhC = torch.empty((*tiles_BhTW.shape[:2], 0), dtype=torch.int32, device=call.device)
    none_BhTN = torch.empty((*counts_BhT.shape, 0), dtype=torch.int32, device=call.device)
    return HeadIndex(tiles_BhTW, counts_BhT, none_BhC, none_BhTN)


def spread(index: HeadIndex, places: Sequence[int]) -> HeadIndex:
    """An index of as many heads as `places`, each as the head at its place in this index, which is not handed on."""
    device, count = index.counts_BhT.device, len(places)

    def take(x_BhX: torch.Tensor) -> torch.Tensor:
        if x_BhX.shape[1] == 1 < count:
            return x_BhX.expand(-1, count, *x_BhX.shape[2:])
        return x_BhX.index_select(1, on_device(places, device))

    return HeadIndex(take(index.tiles_BhTW), take(index.counts_BhT), take(index.columns_BhC), take(index.live_BhTN))


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
