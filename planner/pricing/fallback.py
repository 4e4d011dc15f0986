"""Which heads, families and layers of one length go dense because sparse would not pay there.

Three times the same question, from the inside out. A head: do its tiles and its part of the index cost less than a
dense head of the same launch? A family in a layer: do its heads together save what its index launch costs? A layer: is
sparse attention with all its indices faster than the dense kernel?

Shapes: L profiled layers, C candidates, H heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost_data import DeviceCost
from sparsekv.planner.options import Family
from sparsekv.planner.pricing.crossover import pays
from sparsekv.planner.pricing.predict import causal_tiles, heads_by_pattern, layer_times
from sparsekv.planner.pricing.tables import DENSE, Choice, Floats, ScoreTables
from sparsekv.plans.patterns import TileShape

Mask = npt.NDArray[np.bool_]


class Fallback:
    """What sparse saves over dense at one length, on one device."""

    def __init__(self, cost: DeviceCost, tables: ScoreTables, tile: TileShape) -> None:
        self._cost, self._tables, self._tile = cost, tables, tile
        self._saved_LCH = self._saved()

    def paying_candidates(self) -> Mask:
        """[L, C, H]: those that cost less than a dense head of the same launch."""
        return np.asarray(self._saved_LCH > 0.0)

    def losing_family(self, choice_H: Choice, row: int) -> Family | None:
        """The family of a layer whose heads save least against its index launch, if that is a loss.

        Args:
            choice_H: what the heads of the layer follow.
            row: which profiled layer.
        """
        candidates = self._tables.entry.candidates
        gain = {name: -self._cost.index_launch_us(name) for name in heads_by_pattern(self._tables, choice_H)}
        for head in np.flatnonzero(choice_H >= 0).tolist():
            place = int(choice_H[head])
            gain[candidates[place].family] += float(self._saved_LCH[row, place, head])
        losing = [(us, name) for name, us in gain.items() if us <= 0.0]
        return min(losing)[1] if losing else None

    def without_losing_layers(self, choice: Choice) -> Choice:
        """The choice, with layers dense as a whole where sparse attention and index building would not pay."""
        times = layer_times(self._cost, self._tables, choice, self._tile)
        losing_L = np.array([not pays(*pair) for pair in zip(times.sparse_us, times.dense_us, strict=True)])
        return np.where(losing_L[:, None] & (choice >= 0), DENSE, choice)

    def _saved(self) -> Floats:
        tables, entry = self._tables, self._tables.entry
        causal = causal_tiles(entry.length, self._tile)
        _, _, tile_us, column_us = self._cost.prefill_sparse.prices
        index_C = np.array([self._cost.index_head_us(one.family, entry.length) for one in entry.candidates])
        spent_LCH = (tables.tiles_LCH * tile_us + tables.columns_LCH * column_us) * causal + index_C[None, :, None]
        return np.asarray(causal * tile_us - spent_LCH)
