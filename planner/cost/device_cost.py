"""What attention costs on one device: fitted lines, and predictions from them. Pure numbers, no device needed.

All times are microseconds of one layer with the head shape that was measured. A line is a non-negative combination of
features, fitted to a few timed launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsekv.planner.options import Family
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import BackendName, DtypeName
from sparsekv.plans.types import Count, FieldError, Length, NonNegative, Part, Text, rounded

# Of each line, as `DeviceCost` has them.
_PRICES = {
    "prefill_dense": 2,
    "prefill_sparse": 4,
    "index": 3,
    "decode_dense": 2,
    "decode_sparse": 2,
    "decode_choose": 2,
    "decode_choose_alone": 2,
    "decode_host": 3,
}


# Microseconds of a launch, a tile or a token. No device comes near the bound, which keeps every sum finite.
Price = Annotated[float, Field(strict=True, ge=0.0, le=1e8, allow_inf_nan=False), AfterValidator(rounded)]


class HeadShape(Part):
    """The attention of one layer."""

    heads: Count
    kv_heads: Count
    head_dim: Count


class Line(Part):
    """A sum of features, each with a price of zero or more."""

    prices: tuple[Price, ...]

    def at(self, *features: float) -> float:
        """The value for these features."""
        return sum(price * feature for price, feature in zip(self.prices, features, strict=True))

    def us(self, *work: float) -> float:
        """The microseconds of one launch and the work in it, as the first feature of every price list is the launch."""
        return self.at(1.0, *work)


class Timing(Part):
    """One launch that was timed, for people who want to see what a line was fitted to."""

    what: Text
    length: Length
    features: tuple[NonNegative, ...]
    us: NonNegative


class DeviceCost(Part):
    """Prices of one device. The first price of every line is what a launch costs, however little it computes.

    Attributes:
        prefill_dense: of (1, causal tiles over all heads), the fastest dense kernel.
        prefill_sparse: of (1, query tiles over all heads, computed tiles over all heads, single columns in tiles).
            A query tile has its queries to read and its output to write however few tiles it computes.
        index: per pattern, of (1, heads x tokens, heads x tokens squared): building the index of those heads.
        decode_dense: of (1, tokens attended), one step.
        decode_sparse: the same, over chosen tokens.
        decode_choose: of (1, tokens scored): choosing tokens in a filter layer.
        decode_choose_alone: of (1, tokens scored): the same in a filter layer that attends to its own choice, where no
            attention comes before it; None where it was not measured.
        decode_host: of (1, tokens attended, tokens of these read from host memory): a step of an offloaded layer
            over chosen tokens, in single launches: more than in a captured step, where the host does not wait for what
            was chosen. None where it was not asked for.
    """

    kind: Literal["sparsekv.cost"] = "sparsekv.cost"
    schema_version: Literal[2] = 2
    device: Text
    dtype: DtypeName
    backend: BackendName
    shape: HeadShape
    tile: TileShape
    versions: dict[Text, Text] = Field(default_factory=dict)
    prefill_dense: Line
    prefill_sparse: Line
    index: dict[Family, Line]
    decode_dense: Line
    decode_sparse: Line
    decode_choose: Line
    decode_choose_alone: Line | None = None
    decode_host: Line | None = None
    timings: tuple[Timing, ...] = ()

    @model_validator(mode="after")
    def _priced(self) -> DeviceCost:
        for name, count in _PRICES.items():
            line = getattr(self, name)
            for one in line.values() if isinstance(line, dict) else [line]:
                if one is not None and len(one.prices) != count:
                    raise FieldError(f"expected {count} prices of {name}, found {len(one.prices)}", name)
        return self

    def prefill_sparse_us(self, tiles: float, columns: float, heads: Mapping[Family, int], length: int) -> float:
        """A sparse layer, index building included.

        Args:
            tiles: whole tiles computed, over all heads, dense ones included.
            columns: single columns computed, in tiles, over all heads.
            heads: how many heads follow each data-dependent or static pattern.
        """
        index = sum(self.index_us(name, count, length) for name, count in heads.items() if count)
        rows = self.shape.heads * -(-length // self.tile.query)
        return index + self.prefill_sparse.us(rows, tiles, columns)

    def index_us(self, name: Family, heads: int, length: int) -> float:
        """Building the index of `heads` heads of a pattern that was measured."""
        return self.index[name].us(heads * length, float(heads) * length * length)
