"""Heads that compute every causal tile: only the counts are filled; kernels need no list for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.index.call import HeadIndex, IndexCall, RowTiles, empty_tiles, without_columns
from sparsekv.plans.patterns import Dense


def index_dense(patterns: Sequence[Dense], heads: Sequence[int], call: IndexCall, rows: RowTiles) -> HeadIndex:
    """Counts of every causal tile."""
    tiles_BhTW, _ = empty_tiles(call, len(heads), 1)  # never read; kernels need not handle a width of 0
    counts_BhT = (rows.end_BT + 1).to(torch.int32)[:, None].expand(-1, len(heads), -1)
    return without_columns(call, tiles_BhTW, counts_BhT)
