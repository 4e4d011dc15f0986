"""Which keys each query tile of one head computes, cut into what all of its rows see and the edge that needs a mask.

Shapes: T query tiles of M rows, X those of one block, W listed tiles, C columns, N words of 32 columns, E edge keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsekv.kernels.index.bits import unpack_bits
from sparsekv.kernels.tiles import TileIndex

_HIDDEN = 2**31 - 1  # a token after every row


@dataclass(frozen=True, slots=True)
class Whole:
    """Tiles and columns that every row of a query tile sees."""

    tiles_W: torch.Tensor
    columns_C: torch.Tensor
    run: int | None  # the first tile, where all of them are neighbours


@dataclass(frozen=True, slots=True)
class Edge:
    """Keys that only some rows of their query tile see; padding is seen by none."""

    tokens_XE: torch.Tensor
    seen_XME: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The query tiles of one head of one batch row."""

    query: int  # M
    key: int
    first_T: torch.Tensor  # token of each query tile's first row
    window: int | None
    tiles_TW: torch.Tensor
    listed_TW: torch.Tensor  # bool: entries that count
    edge_TW: torch.Tensor  # bool: of those, the ones on the edge
    columns_C: torch.Tensor
    whole_TC: torch.Tensor  # bool
    edge_TC: torch.Tensor  # bool

    @property
    def most_keys(self) -> int:
        """Keys of the fullest query tile."""
        return int((self.listed_TW.sum(1) * self.key + self.whole_TC.sum(1)).max())

    @property
    def edge_keys(self) -> int:
        """Edge keys of the query tile that has most of them."""
        return int((self.edge_TW.sum(1) * self.key + self.edge_TC.sum(1)).max())

    def whole(self, part: slice) -> Iterator[Whole]:
        """The whole part of each query tile of a block."""
        inner_XW, columns_XC = self.listed_TW[part] & ~self.edge_TW[part], self.whole_TC[part]
        tiles = self.tiles_TW[part][inner_XW].split(inner_XW.sum(1).tolist())
        columns = self.columns_C.expand_as(columns_XC)[columns_XC].split(columns_XC.sum(1).tolist())
        for tiles_W, columns_C in zip(tiles, columns, strict=True):
            yield Whole(tiles_W, columns_C, _run(tiles_W))

    def edge(self, part: slice) -> Edge | None:
        """The edges of a block of query tiles; None when they have none."""
        offset = torch.arange(self.key, dtype=torch.int32)
        tiles_XE1 = _compact(self.tiles_TW[part], self.edge_TW[part]).unsqueeze(-1)
        of_tiles_XE = torch.where(tiles_XE1 < 0, _HIDDEN, tiles_XE1 * self.key + offset).flatten(1)
        of_columns_XE = _compact(self.columns_C.expand_as(self.edge_TC[part]), self.edge_TC[part])
        tokens_XE = torch.cat((of_tiles_XE, torch.where(of_columns_XE < 0, _HIDDEN, of_columns_XE)), 1)
        if not tokens_XE.shape[1]:
            return None
        i_XM1 = (self.first_T[part, None] + torch.arange(self.query, dtype=torch.int32)).unsqueeze(-1)
        seen_XME = tokens_XE[:, None] <= i_XM1
        if self.window is not None:
            seen_XME &= tokens_XE[:, None] > i_XM1 - self.window
        return Edge(tokens_XE, seen_XME)


def head_rows(index: TileIndex, b: int, h: int, past: int, length: int, window: int | None) -> HeadRows:
    """The rows of query head h in batch row b, whose queries are the tokens past to length."""
    query, key = index.tile.query, index.tile.key
    first_T = torch.arange(past, length, query, dtype=torch.int32)
    last_T = (first_T + query).clamp(max=length) - 1
    tiles_TW, counts_T = _lists(index, b, h, last_T)
    listed_TW = torch.arange(tiles_TW.shape[1]) < counts_T[:, None]
    start_TW = tiles_TW * key
    inner_TW = start_TW + key - 1 <= first_T[:, None]
    live_TC, columns_C = _columns(index, b, h, len(first_T))
    inside_TC = columns_C <= first_T[:, None]
    if window is not None:
        inner_TW &= last_T[:, None] - start_TW < window
        inside_TC &= last_T[:, None] - columns_C < window
    return HeadRows(
        query=query,
        key=key,
        first_T=first_T,
        window=window,
        tiles_TW=tiles_TW,
        listed_TW=listed_TW,
        edge_TW=listed_TW & ~inner_TW,
        columns_C=columns_C,
        whole_TC=live_TC & inside_TC,
        edge_TC=live_TC & ~inside_TC,
    )


def _lists(index: TileIndex, b: int, h: int, last_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and how many of each row count; a dense head has all up to its row's last."""
    if not index.dense_H[h]:
        return index.tiles_BHTW[b, h, : len(last_T)], index.counts_BHT[b, h, : len(last_T)]
    counts_T = last_T // index.tile.key + 1
    return torch.arange(int(counts_T[-1]), dtype=torch.int32).expand(len(last_T), -1), counts_T


def _columns(index: TileIndex, b: int, h: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns are live in each query tile, and the columns."""
    columns_C = index.columns_BHC[b, h]
    if index.dense_H[h]:
        columns_C = columns_C[:0]
    live_TC = unpack_bits(index.live_BHTN[b, h, :rows], columns_C.shape[0])
    return live_TC & (columns_C >= 0), columns_C


def _run(tiles_W: torch.Tensor) -> int | None:
    if not len(tiles_W):
        return None
    first, last = int(tiles_W[0]), int(tiles_W[-1])
    return first if last - first == len(tiles_W) - 1 else None


def _compact(values_XN: torch.Tensor, keep_XN: torch.Tensor) -> torch.Tensor:
    """The kept values of each row side by side: [X, most kept], padded with -1."""
    most = int(keep_XN.sum(1).max()) if keep_XN.numel() else 0
    packed_XK = values_XN.new_full((len(keep_XN), most), -1)
    row, place = keep_XN.nonzero(as_tuple=True)
    packed_XK[row, keep_XN.cumsum(1)[row, place] - 1] = values_XN[row, place]
    return packed_XK
