"""Heads that compute every causal tile: only the counts are filled; kernels need no list for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsekv.kernels.index.call import (
    HeadIndex,
    IndexCall,
    Layout,
    RowTiles,
    empty_tiles,
    spread,
    without_columns,
)
from sparsekv.kernels.kept import kept_on_device
from sparsekv.plans.patterns import Dense


def index_dense(patterns: Sequence[Dense], heads: Sequence[int], call: IndexCall, rows: RowTiles) -> HeadIndex:
    """Counts of every causal tile."""
    return spread(_build(call.device, call.layout), [0] * len(heads))


@kept_on_device(most=4)
def _build(device: torch.device, layout: Layout) -> HeadIndex:
    tiles_B1TW, _ = empty_tiles(layout, 1, 1)  # never read; kernels need not handle a width of 0
    return without_columns(layout, tiles_B1TW, (layout.locate().end_BT + 1).to(torch.int32)[:, None])
