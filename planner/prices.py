"""Prices of attention on one device: tables of measured times, and what a layer's work costs by them.

A table holds microseconds at the points of two axes and rises along both. Between points times are read off straight
lines: over the logarithms along the second axis (lengths), over the values across the first (shares, heads). Outside
its points a table is clamped: below the first one a time stays, beyond the last one the price of a unit of work does,
so that all times of a phase keep their ratios there. Nothing is fitted.

All times of prefill are of one layer whose heads are alike. A head has its part of the layer that is like it, and a
layer costs its heads, and the index launches of their families.

Shapes: A points across, N lengths along.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from sparsekv.planner.options import Family
from sparsekv.plans.schema import BackendName
from sparsekv.plans.types import Count, Length, NonNegative, Part, Text, rounded

_MOST_POINTS = 256  # of an axis
_SHIPPED = "prices_h200.json"

# No device comes near the bounds, which keep every sum finite.
Microseconds = Annotated[float, Field(strict=True, ge=1e-6, le=1e12, allow_inf_nan=False), AfterValidator(rounded)]
Floats = npt.NDArray[np.float64]


class HeadShape(Part):
    """The attention of one layer."""

    heads: Count
    kv_heads: Count
    head_dim: Count


class Table(Part):
    """Times at the points of two axes, which rise along both.

    Attributes:
        across: shares of what dense attention computes or reads, heads, or new tokens; ascending.
        along: tokens, or the parameters of a matrix; ascending.
        us: a row for each point across.
    """

    across: Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=_MOST_POINTS)] = (1.0,)
    along: Annotated[tuple[Length, ...], Field(min_length=1, max_length=_MOST_POINTS)]
    us: tuple[tuple[Microseconds, ...], ...]

    @classmethod
    def measured(cls, across: Sequence[float], along: Sequence[int], us: Floats | Sequence[Sequence[float]]) -> Table:
        """The table of these times, each at least those of less work: a measured time that falls is noise."""
        rising = np.maximum.accumulate(np.maximum.accumulate(np.asarray(us, np.float64), 0), 1)
        return cls(across=tuple(map(float, across)), along=tuple(along), us=tuple(map(tuple, rising.tolist())))

    def scaled(self, factor: float) -> Table:
        return Table(
            across=self.across, along=self.along, us=tuple(tuple(us * factor for us in row) for row in self.us)
        )

    def column(self, along_N: Floats | Sequence[float], growth: float = 1.0) -> Floats:
        """[A, N]: the times at these points along.

        Args:
            growth: the power of the length that work grows with, beyond the last point.
        """
        points, wanted_N = np.array(self.along, np.float64), np.asarray(along_N, np.float64)
        inside_N = np.log(np.clip(wanted_N, points[0], points[-1]))
        found_AN = np.exp([np.interp(inside_N, np.log(points), row_N) for row_N in np.log(self.us)])
        return np.asarray(found_AN * np.maximum(1.0, wanted_N / points[-1]) ** growth)

    def read(self, column_A: Floats, across: Floats | float) -> Floats:
        """The time at points across, from the times of `column` or sums of them."""
        beyond = np.maximum(1.0, np.asarray(across) / self.across[-1])
        return np.asarray(np.interp(across, self.across, column_A) * beyond)

    def at(self, along: float, across: float = 1.0, growth: float = 1.0) -> float:
        return float(self.read(self.column([along], growth)[:, 0], across))


class StepPrices(Part):
    """Attention of a layer in one decode step.

    Attributes:
        dense: by cached tokens.
        sparse: by the share of the cached tokens that is attended to, and by these.
        chooses: a filter layer that attends to everything and chooses tokens, by cached tokens.
        chooses_alone: choosing tokens in a filter layer that attends to its own choice.
    """

    dense: Table
    sparse: Table
    chooses: Table
    chooses_alone: Table


class Prices(Part):
    """Prices of one device and head shape, of whole prompts. They rank candidates and predict.

    Attributes:
        dense: the fastest dense kernel, by length.
        tiles: sparse attention over whole tiles, by their share of the causal tiles; all of them is dense heads in a
            sparse launch.
        columns: sparse attention over few tiles, by the share of single columns beside them.
        index: per family, building the index of so many heads, of the others dense.
        step: of decode, with one row.
    """

    device: Text
    backend: BackendName
    shape: HeadShape
    dense: Table
    tiles: Table
    columns: Table
    index: dict[Family, Table]
    step: StepPrices

    def dense_us(self, length: int) -> float:
        """A dense layer over a whole prompt."""
        return self.dense.at(length, growth=2.0)

    def heads_us(self, tiles: Floats, columns: Floats, length: int) -> Floats:
        """Each head of a sparse launch over a whole prompt, its index left out.

        Args:
            tiles, columns: shares of the causal tiles; a dense head computes all.
        """
        times_A, columns_A = (table.column([length], 2.0)[:, 0] for table in (self.tiles, self.columns))
        beside = self.columns.read(columns_A, columns) - columns_A[0]
        return np.asarray((self.tiles.read(times_A, tiles) + beside) / self.shape.heads)

    def index_us(self, family: Family, length: int) -> tuple[float, float]:
        """Building the index of a family over a whole prompt: the launch, and each head. A rule from outside that was
        not timed here counts as block_sparse, which pools queries and keys as many of them do."""
        table = self.index.get(family) or self.index["block_sparse"]
        times_A = table.column([length], 2.0)[:, 0]
        head = (times_A[-1] - times_A[0]) / max(1.0, table.across[-1] - table.across[0])
        return max(0.0, float(times_A[0] - head * table.across[0])), float(head)

    def stood_in(self, shape: HeadShape) -> Prices:
        """These prices for other heads, by the ratio of their work; of another device than the plan is for."""
        own = self.shape
        prefill = shape.heads * shape.head_dim / (own.heads * own.head_dim)
        decode = shape.kv_heads * shape.head_dim / (own.kv_heads * own.head_dim)
        return self.model_copy(
            update={
                **_scaled(self, prefill, "dense", "tiles", "columns"),
                "step": self.step.model_copy(update=_scaled(self.step, decode, *StepPrices.model_fields)),
                "shape": shape,
            }
        )


def _scaled(prices: Prices | StepPrices, factor: float, *names: str) -> dict[str, Table]:
    tables: dict[str, Table] = {name: getattr(prices, name) for name in names}
    return {name: table.scaled(factor) for name, table in tables.items()}


def shipped_prices(shape: HeadShape) -> Prices:
    """The prices that stand in where there is no GPU: of the measured heads that are most like these."""
    data = json.loads(resources.files("sparsekv.planner").joinpath("data", _SHIPPED).read_text())
    tables = [Prices.model_validate(one) for one in data]

    def apart(prices: Prices) -> float:
        own = prices.shape
        return sum(
            abs(math.log(getattr(own, name) / getattr(shape, name))) for name in ("heads", "kv_heads", "head_dim")
        )

    return min(tables, key=apart).stood_in(shape)
