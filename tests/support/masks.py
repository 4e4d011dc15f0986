"""What every pattern computes, by brute force from the definitions: plain Python and numpy float64, no builder.

One head at a time, one row tile at a time. Everything is a set of key tiles and a set of single columns.

Shapes: n queries of the chunk, m keys, D head size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, Pattern, TileShape, VerticalSlash

# A whole row tile far from both ends, to speak of the tiles that a row has counted back from its own place.
FAR = 1 << 20


class AmbiguousScoresError(Exception):
    """Two scores at the edge of a choice are so close that rounding decides: another sample is needed."""


@dataclass(frozen=True)
class Row:
    """What one row tile computes."""

    first: int
    last: int
    tiles: frozenset[int]
    columns: frozenset[int]  # computed singly


@dataclass(frozen=True)
class Head:
    """One head of one batch row, its queries being tokens past .. length - 1."""

    q: np.ndarray
    k: np.ndarray
    past: int
    tile: TileShape
    scale: float
    window: int | None
    cap: float = 0.0

    @property
    def length(self) -> int:
        return self.k.shape[0]

    @property
    def row_starts(self) -> range:
        return range(self.past, self.length, self.tile.query)

    def last_row(self, first: int) -> int:
        return min(first + self.tile.query, self.length) - 1

    def sees(self, i: int, j: int) -> bool:
        return j <= i and (self.window is None or i - j < self.window)


def brute_rows(pattern: Pattern, head: Head) -> list[Row]:
    """The row tiles of a head that are not padding."""
    if isinstance(pattern, Dense):
        return [_row(head, first, range(head.last_row(first) // head.tile.key + 1)) for first in head.row_starts]
    if isinstance(pattern, AShape):
        return _seen(head, [_row(head, first, _a_shape(pattern, head, first)) for first in head.row_starts])
    if isinstance(pattern, BlockSparse):
        return _seen(head, [_row(head, first, _block_sparse(pattern, head, first)) for first in head.row_starts])
    assert isinstance(pattern, VerticalSlash)
    return _seen(head, _vertical_slash(pattern, head))


def brute_heads(
    patterns: Sequence[Pattern],
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    chunk: Chunk,
    tile: TileShape,
    *,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
) -> list[list[list[Row]]]:
    """Row tiles of every head of every batch row: [B][H][row tiles]."""
    group = q_BHSD.shape[1] // k_BGKD.shape[1]
    found = []
    for b, (past, length) in enumerate(zip(chunk.past, chunk.lengths, strict=True)):
        q = q_BHSD[b, :, : length - past].double().cpu().numpy()
        k = k_BGKD[b, :, :length].double().cpu().numpy()
        heads = [Head(q[h], k[h // group], past, tile, scale, window, cap) for h in range(len(patterns))]
        found.append([brute_rows(pattern, head) for pattern, head in zip(patterns, heads, strict=True)])
    return found


def brute_mask(rows: list[list[list[Row]]], chunk: Chunk, tile: TileShape, queries: int, window: int | None = None):
    """bool [B, H, S, K] of these row tiles."""
    mask = torch.zeros(len(rows), len(rows[0]), queries, chunk.longest, dtype=torch.bool)
    for b, heads in enumerate(rows):
        for h, head_rows in enumerate(heads):
            for row in head_rows:
                i = np.arange(row.first, row.last + 1)[:, None]
                j = np.arange(chunk.lengths[b])[None]
                chosen = np.isin(j // tile.key, list(row.tiles)) | np.isin(j, list(row.columns))
                visible = (j <= i) & ((i - j < window) if window is not None else True)
                place = slice(row.first - chunk.past[b], row.last + 1 - chunk.past[b])
                mask[b, h, place, : chunk.lengths[b]] = torch.from_numpy(chosen & visible)
    return mask


def brute_computed_tiles(rows: list[list[list[Row]]], tile: TileShape) -> list[list[float]]:
    """Tiles and single columns, in tiles, of every head of every batch row."""
    return [[sum(len(r.tiles) + len(r.columns) / tile.key for r in head) for head in heads] for heads in rows]


def _row(head: Head, first: int, tiles, columns=frozenset()) -> Row:
    return Row(first, head.last_row(first), frozenset(tiles), frozenset(columns))


def _mandatory(head: Head, first: int) -> set[int]:
    key = head.tile.key
    diagonal = {i // key for i in range(first, head.last_row(first) + 1)}
    return diagonal | {max(0, min(diagonal) - 1), 0}


def _whole_row_needs(head: Head) -> int:
    """Mandatory tiles of a whole row tile far from the start."""
    key, first = head.tile.key, FAR + head.past % head.tile.key
    return len({i // key for i in range(first, first + head.tile.query)} | {first // key - 1, 0})


def _a_shape(pattern: AShape, head: Head, first: int) -> set[int]:
    sink, window = pattern.sink.resolve(head.length), pattern.window.resolve(head.length)
    i = np.arange(first, head.last_row(first) + 1)[:, None]
    j = np.arange(head.length)[None]
    touched = (j <= i) & ((j < sink) | (i - j < window))
    return set((np.nonzero(touched.any(0))[0] // head.tile.key).tolist()) | _mandatory(head, first)


def _block_sparse(pattern: BlockSparse, head: Head, first: int) -> set[int]:
    key = head.tile.key
    query = head.q[first - head.past : head.last_row(first) + 1 - head.past].mean(0)
    seen = [t for t in range(head.last_row(first) // key + 1) if _tile_seen(head, first, t)]
    keys = [head.k[t * key : min((t + 1) * key, head.length)].mean(0) for t in seen]
    forced = _mandatory(head, first) & set(seen)
    score = {t: float(query @ mean) * head.scale for t, mean in zip(seen, keys, strict=True) if t not in forced}
    keep = max(math.ceil(pattern.keep.resolve(head.length) / key), _whole_row_needs(head))
    return forced | set(best(score, min(keep, len(seen)) - len(forced)))


def _vertical_slash(pattern: VerticalSlash, head: Head) -> list[Row]:
    columns, slashes = _lines(pattern, head)
    kept = set(best(columns, pattern.vertical.resolve(head.length)))
    back = _tiles_back(pattern, head, best(slashes, pattern.slash.resolve(head.length)), slashes)
    rows = []
    for first in head.row_starts:
        last, base = head.last_row(first), first // head.tile.key
        tiles = {base - d for d in back if 0 <= base - d <= last // head.tile.key} | {0}
        single = {j for j in kept if j <= last and j // head.tile.key not in tiles}
        rows.append(_row(head, first, tiles, single))
    return rows


def _lines(pattern: VerticalSlash, head: Head) -> tuple[dict[int, float], dict[int, float]]:
    """Score of every column and of every diagonal."""
    columns, slashes = np.zeros(head.length), np.zeros(head.length)
    for i in range(max(head.past, head.length - pattern.last_q), head.length):
        seen = np.array([j for j in range(i + 1) if head.sees(i, j)])
        logits = head.k[seen] @ head.q[i - head.past] * head.scale
        logits = head.cap * np.tanh(logits / head.cap) if head.cap else logits
        weights = np.exp(logits - logits.max())
        columns[seen] += weights / weights.sum()
        slashes[i - seen] += weights / weights.sum()
    return dict(enumerate(columns.tolist())), dict(enumerate(slashes.tolist()))


def _tiles_back(pattern: VerticalSlash, head: Head, ranked: list[int], scores: dict[int, float]) -> set[int]:
    """Tiles of a whole row, counted back from the tile of its first row, until some row would exceed max_tiles."""
    key, first = head.tile.key, FAR + head.past % head.tile.key
    ends = [(start // key, head.last_row(start) // key) for start in head.row_starts]
    kept = _crossed(head, first, 0) | {1}
    bound = max(math.ceil(pattern.max_tiles.resolve(head.length) / key), _whole_row_needs(head))
    for rank, offset in enumerate(ranked):
        crossed = kept | _crossed(head, first, offset)
        if any(len({base - d for d in crossed if 0 <= base - d <= end} | {0}) > bound for base, end in ends):
            _check_apart([scores[o] for o in ranked[max(0, rank - 1) : rank + 2]])
            break
        kept = crossed
    return kept


def _crossed(head: Head, first: int, offset: int) -> set[int]:
    """Distances of the tiles that the keys i - offset of a whole row tile lie in."""
    nearest, farthest = first + head.tile.query - 1 - offset, first - offset
    return {first // head.tile.key - tile for tile in range(farthest // head.tile.key, nearest // head.tile.key + 1)}


def best(scores: dict[int, float], count: int) -> list[int]:
    """The `count` highest, best first, the lower index first among equals."""
    ranked = sorted(scores, key=lambda index: (-scores[index], index))
    if 0 < count < len(ranked):
        _check_apart([scores[ranked[count - 1]], scores[ranked[count]]])
    return ranked[: max(0, count)]


def _check_apart(descending: list[float]) -> None:
    for high, low in itertools.pairwise(descending):
        if high != 0.0 and high - low < 2e-5 * max(abs(high), abs(low)) + 1e-7:
            raise AmbiguousScoresError


def _seen(head: Head, rows: list[Row]) -> list[Row]:
    """Without what lies wholly outside the layer's own window."""
    if head.window is None:
        return rows
    return [
        _row(
            head,
            row.first,
            {t for t in row.tiles if _tile_seen(head, row.first, t)},
            {j for j in row.columns if any(head.sees(i, j) for i in range(row.first, row.last + 1))},
        )
        for row in rows
    ]


def _tile_seen(head: Head, first: int, tile: int) -> bool:
    keys = range(tile * head.tile.key, min((tile + 1) * head.tile.key, head.length))
    return any(head.sees(i, j) for i in range(first, head.last_row(first) + 1) for j in keys)
