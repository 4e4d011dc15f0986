"""Says what attention costs on one device: fitted lines, and predictions from them. Pure numbers, no device needed.

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
from sparsekv.plans.types import Count, FieldError, Index, Length, NonNegative, Part, Text, rounded

# Of each line, as `DeviceCost` has them.
_PRICES = {
    "prefill_dense": 2,
    "prefill_sparse": 5,
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

Microseconds = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False), AfterValidator(rounded)]


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

    def scaled(self, factor: float) -> Line:
        """The line with each price multiplied."""
        return Line(prices=tuple(price * factor for price in self.prices))

    def us(self, *work: float) -> float:
        """The microseconds of one launch and the work in it, as the first feature of every price list is the launch."""
        return self.at(1.0, *work)


class Timing(Part):
    """One launch that was timed, for people who want to see what a line was fitted to."""

    what: Text
    length: Length
    features: tuple[NonNegative, ...]
    us: NonNegative


class Fit(Part):
    """Says how well a line fits, in shares of the time of a launch.

    Attributes:
        timings: how many it was fitted to.
        residual: of these, the root of the mean square.
        left_out: the same of each timing from the line through all others.
        worst_left_out: the largest of these.
    """

    timings: Count
    residual: NonNegative
    left_out: NonNegative
    worst_left_out: NonNegative


class BucketTiming(Part):
    """The attention of some layers of a plan at one length, timed on a prompt of the model, beside dense.

    Attributes:
        bucket: digest of the patterns of all layers, and of the model's weights.
        layers: that were timed: over all of them, in the last chunk of the prompt, are
        dense_us, sparse_us: the fastest dense kernel of the host; index building and sparse attention;
        dense_line_us, sparse_line_us: what the lines come to for the same.
        density: computed tiles over causal tiles, as the prompt had them.
    """

    length: Length
    bucket: Text
    layers: tuple[Index, ...]
    dense_us: Microseconds
    sparse_us: Microseconds
    dense_line_us: Microseconds
    sparse_line_us: Microseconds
    density: NonNegative

    @property
    def gain(self) -> float:
        """Returns how many times as fast as dense."""
        return self.dense_us / self.sparse_us


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks that a prompt is prefilled in.

    Attributes:
        count: how many.
        first: tokens of the first, which has no past; 0 where none of them is.
        keys: that the chunks attend to, its own and those before it, over all chunks.
        longest: keys of the last one.
        pairs: rows times keys, over all chunks.
    """

    count: int
    first: int
    keys: int
    pairs: int
    longest: int

    @classmethod
    def of(cls, length: int, most: int | None) -> Chunks:
        """The chunks of a prompt of `length` tokens with at most `most` in each; None is a single chunk."""
        if most is None or length <= most:
            return cls(1, length, length, length * length, length)
        whole, rest = divmod(length, most)
        keys = most * whole * (whole + 1) // 2
        return cls(whole + (rest > 0), most, keys + length * (rest > 0), keys * most + length * rest, length)

    @classmethod
    def last(cls, length: int, most: int | None) -> Chunks:
        """The chunk with the prompt's last `most` tokens, as it is timed."""
        if most is None or length <= most:
            return cls.of(length, None)
        return cls(1, 0, length, most * length, length)

    @property
    def mean(self) -> float:
        """Returns what a chunk attends to in the mean, as a share of what the last one does."""
        return self.keys / (self.count * self.longest)

    @property
    def with_past(self) -> int:
        """Returns how many have one."""
        return self.count - (self.first > 0)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Holds what the heads of a layer compute in a sparse launch.

    Attributes:
        tiles, columns: whole tiles of the sparse heads, and their single columns in tiles.
        dense_tiles: causal tiles of the dense heads.
        longest: tiles and columns of the query tile that computes most, in the last chunk.
        families: how many heads follow each pattern; empty where all are dense, by the dense kernel.
    """

    tiles: float
    columns: float
    dense_tiles: float
    longest: float
    families: Mapping[Family, int]

    def idle(self, processors: int, chunks: Chunks | None = None) -> float:
        """Returns how many times as long as a full device one takes that computes a query tile on each processor: where
        there are few, it waits for the longest. Of a prompt in chunks, those of the mean chunk."""
        count, mean = (chunks.count, chunks.mean) if chunks else (1, 1.0)
        total = (self.tiles + self.columns + self.dense_tiles) / count
        return max(1.0, processors * self.longest * mean / total) if total and processors > 1 else 1.0


class DeviceCost(Part):
    """Prices of one device. The first price of every line is what a launch costs, however little it computes.

    Tiles of prefill are counted as a full device computes them: `LayerWork.idle` times as many where it is not full.

    Attributes:
        processors: multiprocessors of a GPU; 1 of a CPU.
        host: the program whose kernels and way to prefill were timed.
        chunk: most tokens of a prompt that it prefills at once; None is all.
        kv_dtype: of cached keys and values, where it is not `dtype`.
        prefill_dense: of (1, causal tiles over all heads), the fastest dense kernel.
        prefill_sparse: of (1, query tiles of sparse heads, their whole tiles, their single columns in tiles, causal
            tiles of dense heads). A query tile has its queries to read and its output to write however few tiles it
            computes; that of a dense head is in the price of its tiles.
        prefill_copy: of (1, tokens): making the keys of a chunk with a past contiguous for sparse attention; None where
            the host has no need to.
        index: per pattern, of (1, heads x keys, heads x rows x keys) of a chunk: building the index of those heads.
        issue_us: what the program needs to issue a launch of prefill, by the name of its timings; a device that is
            faster waits for it. Empty where the program computes by itself.
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
        fits: how well each line fits its timings, by their name.
        buckets: what plans were timed to take, beside what the lines come to.
    """

    kind: Literal["sparsekv.cost"] = "sparsekv.cost"
    schema_version: Literal[3] = 3
    device: Text
    host: HostName = "transformers"
    chunk: Length | None = None
    kv_dtype: Literal["fp8"] | None = None
    dtype: DtypeName
    backend: BackendName
    shape: HeadShape
    tile: TileShape
    processors: Count = 1
    versions: dict[Text, Text] = Field(default_factory=dict)
    prefill_dense: Line
    prefill_sparse: Line
    prefill_copy: Line | None = None
    index: dict[Family, Line]
    issue_us: dict[Text, Price] = Field(default_factory=dict)
    decode_dense: Line
    decode_sparse: Line
    decode_choose: Line
    decode_choose_alone: Line | None = None
    decode_host: Line | None = None
    decode_check: Line | None = None
    products: Line | None = None
    timings: tuple[Timing, ...] = ()
    fits: dict[Text, Fit] = Field(default_factory=dict)
    buckets: tuple[BucketTiming, ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the decode steps that were timed: decode by a plan must pay with each."""
        return BATCHES[self.host]

    @property
    def of_cpu(self) -> bool:
        """Returns whether times are a CPU's. Beside the calls of a query tile a tile of a short prompt takes no time
        there, and other programs take time slices: work may have no price."""
        return self.backend in ("cpu", "reference")

    @property
    def cuts_prompts(self) -> bool:
        """Returns whether the host prefills long prompts in chunks."""
        return self.chunk is not None

    @model_validator(mode="after")
    def _priced(self) -> DeviceCost:
        for name, count in _PRICES.items():
            line = getattr(self, name)
            for one in line.values() if isinstance(line, dict) else [line]:
                if one is not None and len(one.prices) != count:
                    raise FieldError(f"expected {count} prices of {name}, found {len(one.prices)}", name)
        return self

    def timed(self, bucket: str, length: int) -> BucketTiming | None:
        """The timing of a bucket at a length, by the bucket's digest; None where there is none."""
        return next((one for one in self.buckets if (one.bucket, one.length) == (bucket, length)), None)

    def corrected(self, timing: BucketTiming) -> DeviceCost:
        """Prices of prefill at the length of a timing, such that the lines come to what was timed."""
        dense, sparse = timing.dense_us / timing.dense_line_us, timing.sparse_us / timing.sparse_line_us
        return self.model_copy(
            update={
                "prefill_dense": self.prefill_dense.scaled(dense),
                "prefill_sparse": self.prefill_sparse.scaled(sparse),
                "prefill_copy": self.prefill_copy and self.prefill_copy.scaled(sparse),
                "index": {name: line.scaled(sparse) for name, line in self.index.items()},
                "issue_us": {
                    what: us * (dense if what == "dense prefill" else sparse) for what, us in self.issue_us.items()
                },
            }
        )

    def prefill_dense_us(self, tiles: float, length: int, window: int | None = None) -> float:
        """A dense layer over a whole prompt.

        Args:
            tiles: causal tiles, over all heads.
            window: the layer's own.
        """
        seen = length if window is None else min(length, window + self.tile.query)
        return self._dense_us(LayerWork(0.0, 0.0, tiles, self.tile.key_tiles(seen), {}), Chunks.of(length, self.chunk))

    def prefill_sparse_us(self, work: LayerWork, length: int) -> float:
        """A sparse layer over a whole prompt, index building included. All chunks count as sparse; a host runs those
        that end at a length where the plan is dense by its dense kernel.
        """
        return self._sparse_us(work, length, Chunks.of(length, self.chunk))

    def last_chunk_us(self, work: LayerWork, length: int) -> float:
        """The same of the last chunk alone, as it is timed; by the dense kernel where no head is sparse."""
        chunk, rows = Chunks.last(length, self.chunk), min(length, self.chunk or length)
        return self._sparse_us(work, rows, chunk) if work.families else self._dense_us(work, chunk)

    def _dense_us(self, work: LayerWork, chunks: Chunks) -> float:
        tiles = work.dense_tiles * work.idle(self.processors, chunks)
        return max(chunks.count * self.issue_us.get("dense prefill", 0.0), self.prefill_dense.at(chunks.count, tiles))

    def _sparse_us(self, work: LayerWork, rows: int, chunks: Chunks) -> float:
        families = {name: count for name, count in work.families.items() if count}
        index = sum(self._index_us(name, count, chunks) for name, count in families.items())
        copies, copied = chunks.with_past, chunks.keys - chunks.first
        if self.kv_dtype is not None:  # the first chunk's are read back, too
            copies, copied = chunks.count, chunks.keys
        copy = self.prefill_copy.at(copies, copied) if self.prefill_copy else 0.0
        query_tiles = sum(families.values()) * -(-rows // self.tile.query)
        counted = (work.idle(self.processors, chunks) * x for x in (work.tiles, work.columns, work.dense_tiles))
        attend = self.prefill_sparse.at(chunks.count, query_tiles, *counted)
        launches = ("sparse prefill", *(f"index {name}" for name in families))
        issue = chunks.count * sum(self.issue_us.get(name, 0.0) for name in launches)
        return max(issue + copies * self.issue_us.get("copy", 0.0), index + copy + attend)

    def index_us(self, name: Family, heads: int, length: int) -> float:
        """Building the index of `heads` heads of a pattern that was measured, over a whole prompt."""
        return self._index_us(name, heads, Chunks.of(length, self.chunk))

    def index_launch_us(self, name: Family, length: int) -> float:
        """Returns what of it does not depend on how many heads there are."""
        return self.index_us(name, 0, length)

    def _index_us(self, name: Family, heads: int, chunks: Chunks) -> float:
        return self.index[name].at(chunks.count, heads * chunks.keys, float(heads) * chunks.pairs)
