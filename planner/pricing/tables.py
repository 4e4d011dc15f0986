"""The scores of one length as arrays, and choices out of them.

Shapes: L profiled layers, C candidates, H heads (of the widest layer; absent heads hold nan).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsekv.planner.profile_data import LengthProfile
from sparsekv.plans.patterns import Dense, Pattern

DENSE = -1
ABSENT = -2

Floats = npt.NDArray[np.float64]
Choice = npt.NDArray[np.int64]
"""[L, H]: the candidate of each head, DENSE, or ABSENT where a layer has fewer heads."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTables:
    """One length: every layer, candidate and head. Costs are shares of the causal tiles of a head."""

    entry: LengthProfile
    error_LCH: Floats
    tail_error_LCH: Floats
    tiles_LCH: Floats
    columns_LCH: Floats
    density_LCH: Floats  # tiles and columns
    present_LH: npt.NDArray[np.bool_]  # heads that exist

    @classmethod
    def of(cls, entry: LengthProfile) -> ScoreTables:
        """The tables of a profiled length."""
        names = ("error", "tail_error", "tiles", "columns")
        error, tail, tiles, columns = (_table([getattr(scores, name) for scores in entry.layers]) for name in names)
        return cls(entry, error, tail, tiles, columns, tiles + columns, ~np.isnan(error[:, 0]))

    def take(self, table_LCH: Floats, choice: Choice, dense: float) -> Floats:
        """[L, H]: the entry of each head's candidate; `dense` for dense heads, 0 for absent ones."""
        taken_LH = np.take_along_axis(table_LCH, np.maximum(choice, 0)[:, None], 1)[:, 0]
        return np.where(choice == ABSENT, 0.0, np.where(choice == DENSE, dense, taken_LH))

    def density(self, choice: Choice) -> float:
        """Mean density over all heads."""
        return float(self.take(self.density_LCH, choice, 1.0).sum() / (choice != ABSENT).sum())

    def pattern(self, choice: Choice, layer: int, head: int) -> Pattern:
        """What head `head` of the `layer`-th profiled layer follows."""
        candidate = int(choice[layer, head])
        if candidate == DENSE:
            return Dense()
        return self.entry.patterns[self.entry.layers[layer].patterns[candidate][head]]


def _table(rows: list[tuple[tuple[float, ...], ...]]) -> Floats:
    heads = max(len(row) for table in rows for row in table)
    table_LCH = np.full((len(rows), len(rows[0]), heads), np.nan)
    for layer, table in enumerate(rows):
        for candidate, row in enumerate(table):
            table_LCH[layer, candidate, : len(row)] = row
    return table_LCH
