"""Estimated shares of tiles by brute force, from their definitions: plain loops and numpy float64, no builder.

One head, one row tile at a time. P is the whole matrix of scaled products of one head: rows are the queries of the
chunk, columns all keys.
"""

from __future__ import annotations

import math

import numpy as np

STRIDE = 16


def visible_tiles(first: int, last: int, key: int, window: int | None) -> list[int]:
    """Key tiles of which some row first .. last sees some key."""
    nearest = 0 if window is None else max(0, first - window + 1)
    return list(range(nearest // key, last // key + 1))


def antidiagonal_scores(products, past, first, last, length, key, window=None) -> dict[int, float]:
    """Share of the row tile's attention on each tile, from the antidiagonals of 16 x 16 squares of the products."""
    scores = dict.fromkeys(visible_tiles(first, last, key, window), 0.0)
    counted = 0
    for start in range(first, last + 1, STRIDE):
        square_rows = [min(start + step, last) - past for step in range(STRIDE)]
        means = {}
        for group in range(length // STRIDE):
            begin, end = group * STRIDE, group * STRIDE + STRIDE - 1
            if begin <= start and (window is None or start - end < window):
                square = products[square_rows][:, begin : end + 1]
                odd = (start - first) // STRIDE % 2  # the antidiagonal one further in, and the corner it leaves
                means[group] = np.fliplr(np.roll(square, odd, axis=1)).trace() / STRIDE
        rows = min(last - start + 1, STRIDE)
        if not means:
            continue
        top = max(means.values())
        total = sum(math.exp(mean - top) for mean in means.values())
        counted += rows
        for group, mean in means.items():
            scores[group * STRIDE // key] += rows * math.exp(mean - top) / total
    return {tile: score / max(counted, 1) for tile, score in scores.items()}


def pooled_scores(q, k, scale, past, first, last, key, window=None) -> dict[int, float]:
    """Softmax over the tiles of mean query times mean key, each weighted by the keys that the average row sees."""
    length = k.shape[0]
    query = q[first - past : last + 1 - past].mean(0)
    weights = {}
    for tile in visible_tiles(first, last, key, window):
        keys = range(tile * key, min((tile + 1) * key, length))
        i, j = np.arange(first, last + 1)[:, None], np.array(keys)[None]
        pairs = int(((j <= i) & ((i - j < window) if window is not None else True)).sum())
        mean = k[keys.start : keys.stop].mean(0)
        weights[tile] = float(query @ mean) * scale + math.log(pairs / (last - first + 1))
    top = max(weights.values())
    total = sum(math.exp(weight - top) for weight in weights.values())
    return {tile: math.exp(weight - top) / total for tile, weight in weights.items()}
