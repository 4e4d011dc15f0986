"""Defines what every index builder is given, and what it returns.

Shapes: B batch, H query heads, h the heads that one builder serves, G KV heads, T query tiles (row tiles), W listed
key tiles, C single columns, N words of 32 columns, S tokens, D head size.

All that decides a shape is known to the host: budgets, lengths, tile sizes. Nothing here reads a tensor back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from sparsekv.kernels.device_cache import cached_on_device, on_device
from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.tiles import NO_TILE, Chunk, TileIndex
from sparsekv.plans.patterns import Budget, Pattern, TileShape


@dataclass(frozen=True, slots=True, eq=False)
class FamilyHeads:
    """The heads of a layer whose patterns are of one kind. Compared by identity: a cheap key of caches."""

    kind: type[Pattern]
    heads: tuple[int, ...]  # h, ascending
    patterns: tuple[Any, ...]  # h, all of `kind`
    unique: tuple[Any, ...]  # the different ones among them
    own: tuple[int, ...]  # h: which of `unique` is the head's

    @property
    def named(self) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Compared by value."""
        return self.heads, self.patterns

    @classmethod
    def of(cls, patterns: Sequence[Pattern], heads: Sequence[int]) -> FamilyHeads:
        numbers = {pattern: number for number, pattern in enumerate(dict.fromkeys(patterns))}
        own = tuple(numbers[pattern] for pattern in patterns)
        return cls(type(patterns[0]), tuple(heads), tuple(patterns), tuple(numbers), own)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Where each row tile lies, int64 [B, T] on the device. Padding row tiles end at -1 and so hold nothing."""

    first_BT: torch.Tensor  # token of the first row
    last_BT: torch.Tensor  # token of the last row that is not padding
    base_BT: torch.Tensor  # key tile of the first row
    end_BT: torch.Tensor  # key tile of the last row
    seen_BT: torch.Tensor  # first key tile that the layer's window shows to any row; 0 without a window

    def part(self, rows: slice) -> RowTiles:
        return RowTiles(*(getattr(self, field.name)[:, rows] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The numbers of one layer's queries and keys that the host knows; every shape follows from them."""

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
    def phases(self) -> tuple[int, ...]:
        """Returns how far into a key tile the row tiles of each batch row begin; the same for all, as query % key is
        0."""
        return tuple(past % self.tile.key for past in self.chunk.past)

    def resolve(self, budgets: Sequence[Budget]) -> list[list[int]]:
        """Tokens of each budget in each batch row: [B][h]. Resolves each once, as heads mostly share a pattern."""
        unique = {id(budget): budget for budget in budgets}
        rows = ({key: one.resolve(length) for key, one in unique.items()} for length in self.chunk.lengths)
        return [[row[id(budget)] for budget in budgets] for row in rows]

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

    def slash_tiles(self, most_slashes: int, most_tiles: int) -> int:
        """The most tiles of a row under both bounds of a vertical-slash head: every slash crosses a few."""
        crossed = self.tile.query // self.tile.key + 1
        return min(most_tiles, crossed * most_slashes + max(map(self.mandatory_tiles, self.phases)))

    def most_diagonals(self, bound: int) -> int:
        """The most distances of tiles that a vertical-slash head chooses, of which a row has at most `bound` tiles: a
        ragged row tile lacks the nearest ones."""
        return bound + self.tile.query // self.tile.key

    def locate(self) -> RowTiles:
        """The row tiles of the call; not to be written to."""
        return _located(self.device, self) if self.chunk.is_fixed else _locate(self.device, self)


# Up to 40 bytes a row tile: 320 KiB at a million tokens.
def _locate(device: torch.device, layout: IndexLayout) -> RowTiles:
    query, key, window = layout.tile.query, layout.tile.key, layout.window
    past_B1, length_B1 = (numbers_B.long().unsqueeze(-1) for numbers_B in layout.chunk.on_device(device))
    first_BT = past_B1 + torch.arange(layout.row_tiles, device=device) * query
    last_BT = torch.minimum(first_BT + query, length_B1) - 1
    last_BT = last_BT.masked_fill(first_BT >= length_B1, -1)
    seen_BT = torch.zeros_like(first_BT)
    if window is not None:
        seen_BT = floor_div(first_BT - window + 1, key).clamp_(min=0)
    return RowTiles(first_BT, last_BT, floor_div(first_BT, key), floor_div(last_BT, key), seen_BT)


_located = cached_on_device(most=4)(_locate)


@dataclass(frozen=True, slots=True)
class LineScores:
    """Attention that each line received, float32, summing over a head to its sampled queries."""

    vertical_BhS: torch.Tensor  # index j: the column of key j
    slash_BhS: torch.Tensor  # index o: the diagonal i - j = o


@dataclass(frozen=True, slots=True, eq=False)
class IndexCall:
    """The tensors of one call of `build_index`, and what the host knows of them."""

    layout: IndexLayout
    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    scale: float
    lines: Mapping[int, LineScores] | None  # of all heads, by last_q, where the caller has scored them already
    softmax: Softmax  # its soft cap is of scores of single keys; pooled ones (block sparse) are estimates without it
    layer: int

    @classmethod
    def of(
        cls,
        q_BHSD: torch.Tensor,
        k_BGKD: torch.Tensor,
        chunk: Chunk,
        tile: TileShape,
        scale: float,
        window: int | None,
        lines: Mapping[int, LineScores] | None = None,
        softmax: Softmax = PLAIN,
        layer: int = 0,
    ) -> IndexCall:
        B, H, S, D = q_BHSD.shape
        layout = IndexLayout(chunk, tile, window, B, H, k_BGKD.shape[1], S, D, q_BHSD.dtype, q_BHSD.device)
        return cls(layout, q_BHSD, k_BGKD, scale, lines, softmax, layer)

    def known_lines(self, group: FamilyHeads) -> LineScores | None:
        """The caller's scores for vertical-slash heads; None where it has none for what they sample."""
        sampled = {pattern.last_q for pattern in group.patterns} if self.lines else set()
        known = self.lines.get(sampled.pop()) if self.lines and len(sampled) == 1 else None
        if known is None:
            return None
        return LineScores(take_heads(known.vertical_BhS, group.heads), take_heads(known.slash_BhS, group.heads))


@dataclass(frozen=True, slots=True)
class IndexWidths:
    """The width of an index; follows from budgets and lengths."""

    tiles: int  # W
    columns: int  # C


@dataclass(frozen=True, slots=True)
class PreparedIndex:
    """The index of some heads, to be built straight into the tensors of the whole layer, which are at least as wide."""

    widths: IndexWidths
    fill: Callable[[TileIndex], None]


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """The index of some heads; see TileIndex for what the fields mean."""

    heads: tuple[int, ...]
    tiles_BhTW: torch.Tensor
    counts_BhT: torch.Tensor
    columns_BhC: torch.Tensor
    live_BhTN: torch.Tensor

    @classmethod
    def of_tiles(cls, heads: tuple[int, ...], tiles_BhTW: torch.Tensor, counts_BhT: torch.Tensor) -> HeadIndex:
        new = counts_BhT.new_empty
        return cls(heads, tiles_BhTW, counts_BhT, new((*counts_BhT.shape[:2], 0)), new((*counts_BhT.shape, 0)))

    @property
    def widths(self) -> IndexWidths:
        return IndexWidths(self.tiles_BhTW.shape[3], self.columns_BhC.shape[2])

    def fill(self, into: TileIndex) -> None:
        """Copies it to its heads of the whole layer's index, which is at least as wide."""
        first, last, count = self.heads[0], self.heads[-1], len(self.heads)
        step = self.heads[1] - first if count > 1 else 1
        # Evenly spaced heads copy faster without a list of them.
        even = self.heads == tuple(range(first, last + 1, step))
        own = slice(first, last + 1, step) if even else on_device(self.heads, into.tiles_BHTW.device)
        into.counts_BHT[:, own] = self.counts_BhT
        for whole, piece in (
            (into.tiles_BHTW, self.tiles_BhTW),
            (into.columns_BHC, self.columns_BhC),
            (into.live_BHTN, self.live_BhTN),
        ):
            if piece.shape[-1]:
                whole[:, own, ..., : piece.shape[-1]] = piece


def empty_tiles(layout: IndexLayout, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles [B, h, T, W] and counts [B, h, T] for a builder to fill."""
    shape = (layout.batch, heads, layout.row_tiles)
    tiles_BhTW = torch.full((*shape, width), NO_TILE, dtype=torch.int32, device=layout.device)
    return tiles_BhTW, torch.zeros(shape, dtype=torch.int32, device=layout.device)


def largest(numbers: list[list[int]]) -> int:
    """Over heads and batch rows."""
    return max(map(max, numbers))


def flat(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Row after row."""
    return tuple(number for row in rows for number in row)


def ceil_div(tokens: int, size: int) -> int:
    """Tiles that hold this many tokens."""
    return -(-tokens // size)


def floor_div(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """The tile of each token, also of tokens before the first."""
    return tokens.div(size, rounding_mode="floor")


def spread(x_BuX: torch.Tensor, own: tuple[int, ...]) -> torch.Tensor:
    """Entry own[h] of dimension 1 for every head h: a copy, or an expanded view of the only entry."""
    if x_BuX.shape[1] == 1 < len(own):
        return x_BuX.expand(-1, len(own), *x_BuX.shape[2:])
    return x_BuX.index_select(1, on_device(own, x_BuX.device))


def take_heads(x_BHX: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    """These heads of dimension 1: a view where they are adjacent, a copy elsewhere."""
    first, count = heads[0], len(heads)
    if list(heads) == list(range(first, first + count)):
        return x_BHX.narrow(1, first, count)
    return x_BHX.index_select(1, on_device(list(heads), x_BHX.device))
