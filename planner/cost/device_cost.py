"""What attention costs on one device: fitted lines, and predictions from them. Pure numbers, no device needed.

All times are microseconds of one layer with the head shape that was measured. A line is a non-negative combination of
features, fitted to a few timed launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsekv.planner.options import Family
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import BackendName, DtypeName, HostName
from sparsekv.plans.types import Count, FieldError, Length, NonNegative, Part, Text, rounded

# Of each line, as `DeviceCost` has them.
_PRICES = {
    "prefill_dense": 2,
    "prefill_sparse": 4,
    "prefill_copy": 2,
    "index": 3,
    "decode_dense": 2,
    "decode_sparse": 2,
    "decode_choose": 2,
    "decode_choose_alone": 2,
    "decode_host": 3,
    "decode_check": 3,
    "products": 3,
}


BATCHES: Mapping[HostName, tuple[int, ...]] = {"transformers": (1,), "vllm": (1, 8)}

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


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks that a prompt is prefilled in.

    Attributes:
        count: how many.
        first: tokens of the first, which has no past.
        keys: that the chunks attend to, its own and those before it, over all chunks.
        pairs: rows times keys, over all chunks.
    """

    count: int
    first: int
    keys: int
    pairs: int

    @classmethod
    def of(cls, length: int, most: int | None) -> Chunks:
        """The chunks of a prompt of `length` tokens with at most `most` in each; None is a single chunk."""
        if most is None or length <= most:
            return cls(1, length, length, length * length)
        whole, rest = divmod(length, most)
        keys = most * whole * (whole + 1) // 2
        return cls(whole + (rest > 0), most, keys + length * (rest > 0), keys * most + length * rest)


class DeviceCost(Part):
    """Prices of one device. The first price of every line is what a launch costs, however little it computes.

    Attributes:
        host: the program whose kernels and way to prefill were timed.
        chunk: most tokens of a prompt that it prefills at once; None is all.
        prefill_dense: of (1, causal tiles over all heads), the fastest dense kernel.
        prefill_sparse: of (1, query tiles over all heads, computed tiles over all heads, single columns in tiles).
            A query tile has its queries to read and its output to write however few tiles it computes.
        prefill_copy: of (1, tokens): making the keys of a chunk with a past contiguous for sparse attention; None where
            the host has no need to.
        index: per pattern, of (1, heads x keys, heads x rows x keys) of a chunk: building the index of those heads.
        decode_dense: of (1, tokens attended by all rows), one step.
        decode_sparse: the same, over chosen tokens.
        decode_choose: of (1, tokens scored): choosing tokens in a filter layer.
        decode_choose_alone: of (1, tokens scored): the same in a filter layer that attends to its own choice, where no
            attention comes before it; None where it was not measured.
        decode_host: of (1, tokens attended, tokens of these read from host memory): a step of an offloaded layer
            over chosen tokens, on a GPU a captured one, as planner/cost/measure.py times it. None where it was not
            asked for.
        decode_check: of (1, tokens attended, tokens attended by all new tokens): a dense pass of several new tokens of
            a row. None where the host has no exact output.
        products: of (1, parameters read, parameters multiplied with over all tokens): a product with a matrix of
            weights, and the small kernels beside it. None where it was not measured.
    """

    kind: Literal["sparsekv.cost"] = "sparsekv.cost"
    schema_version: Literal[2] = 2
    device: Text
    host: HostName = "transformers"
    chunk: Length | None = None
    dtype: DtypeName
    backend: BackendName
    shape: HeadShape
    tile: TileShape
    versions: dict[Text, Text] = Field(default_factory=dict)
    prefill_dense: Line
    prefill_sparse: Line
    prefill_copy: Line | None = None
    index: dict[Family, Line]
    decode_dense: Line
    decode_sparse: Line
    decode_choose: Line
    decode_choose_alone: Line | None = None
    decode_host: Line | None = None
    decode_check: Line | None = None
    products: Line | None = None
    timings: tuple[Timing, ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the decode steps that were timed: decode by a plan must pay with each."""
        return BATCHES[self.host]

    @property
    def cuts_prompts(self) -> bool:
        """Whether the host prefills long prompts in chunks."""
        return self.chunk is not None

    @model_validator(mode="after")
    def _priced(self) -> DeviceCost:
        for name, count in _PRICES.items():
            line = getattr(self, name)
            for one in line.values() if isinstance(line, dict) else [line]:
                if one is not None and len(one.prices) != count:
                    raise FieldError(f"expected {count} prices of {name}, found {len(one.prices)}", name)
        return self

    def prefill_dense_us(self, tiles: float, length: int) -> float:
        """A dense layer over a whole prompt.

        Args:
            tiles: causal tiles, over all heads.
        """
        return self.prefill_dense.at(Chunks.of(length, self.chunk).count, tiles)

    def prefill_sparse_us(self, tiles: float, columns: float, heads: Mapping[Family, int], length: int) -> float:
        """A sparse layer over a whole prompt, index building included. All chunks count as sparse; a host runs those
        that end at a length where the plan is dense by its dense kernel.

        Args:
            tiles: whole tiles computed, over all heads, dense ones included.
            columns: single columns computed, in tiles, over all heads.
            heads: how many heads follow each data-dependent or static pattern.
        """
        chunks = Chunks.of(length, self.chunk)
        index = sum(self.index_us(name, count, length) for name, count in heads.items() if count)
        rows = self.shape.heads * -(-length // self.tile.query)
        copy = self.prefill_copy.at(chunks.count - 1, chunks.keys - chunks.first) if self.prefill_copy else 0.0
        return index + copy + self.prefill_sparse.at(chunks.count, rows, tiles, columns)

    def index_us(self, name: Family, heads: int, length: int) -> float:
        """Building the index of `heads` heads of a pattern that was measured, over a whole prompt."""
        chunks = Chunks.of(length, self.chunk)
        return self.index[name].at(chunks.count, heads * chunks.keys, float(heads) * chunks.pairs)

    def index_launch_us(self, name: Family, length: int) -> float:
        """What of it does not depend on how many heads there are."""
        return self.index_us(name, 0, length)
