"""The decode phase of a plan: which layers choose tokens for which others (OmniKV), and whose rows leave the device.

A layer in no segment attends to everything. The layers of a segment attend to the tokens that its filter layer chose
plus every token generated since the prompt.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from sparsekv.plans.buckets import bucket_of, check_ascending
from sparsekv.plans.budget import Budget
from sparsekv.plans.layers import LayerSet, format_ids
from sparsekv.plans.parts import Count, FieldError, Flag, Index, Length, Part, in_order


def _layer_key(key: Any) -> Any:
    """A layer as YAML or JSON may write it. One spelling each: two of one layer would pass for different keys."""
    is_layer = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 5 and str(int(key)) == key
    return int(key) if is_layer else key


HeadMap = Annotated[dict[Annotated[Index, BeforeValidator(_layer_key)], tuple[Index, ...]], AfterValidator(in_order)]
"""For each layer of a segment, and each of its key-value heads: the filter layer's key-value head that chooses."""


class Segment(Part):
    """Layers that attend to what the layer `filter` chose.

    `selector` weighs the last `window` queries: `last` takes the last one only, `uniform` all alike, `exponential`
    halves from one to the next older. `heads: max` makes one choice for all heads, `per_kv_head` one a key-value
    head. `scope: local` lets each tensor-parallel rank choose by its own heads.
    """

    filter: Index
    layers: LayerSet
    budget: Budget
    selector: Literal["last", "uniform", "exponential"] = "last"
    window: Count = 1
    scope: Literal["global", "local"] = "global"
    heads: Literal["max", "per_kv_head"] | HeadMap = "max"

    def __str__(self) -> str:
        return f"{self.filter} -> {format_ids(self.layers)}"

    @model_validator(mode="after")
    def _consistent(self) -> Segment:
        if self.filter >= self.layers[0]:
            raise FieldError(
                f"expected a filter layer before its segment, found {self.filter} for {format_ids(self.layers)}"
            )
        if isinstance(self.heads, dict) and set(self.heads) != set(self.layers):
            raise FieldError(
                f"expected a head map for each layer of {format_ids(self.layers)}, found {format_ids(self.heads)}",
                "heads",
            )
        return self


class DecodeBucket(Part):
    """One range of context lengths: all dense, or segments in ascending order."""

    up_to: Length | None
    dense: Flag = False
    segments: tuple[Segment, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> DecodeBucket:
        if self.dense == bool(self.segments):
            raise FieldError("expected exactly one of `dense: true` and `segments` in a decode bucket")
        for position, (before, after) in enumerate(pairwise(self.segments), start=1):
            if before.filter >= after.filter or before.layers[-1] >= after.layers[0]:
                found = f"{before} before {after}"
                message = f"expected segments in ascending order that share no layer, found {found}"
                raise FieldError(message, "segments", position)
        both = self.sparse_layers.intersection(segment.filter for segment in self.segments)
        if both:
            message = f"expected filter layers outside every segment, found {format_ids(both)} in one"
            raise FieldError(message, "segments")
        return self

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers that attend to chosen tokens only."""
        return frozenset(layer for segment in self.segments for layer in segment.layers)


class Offload(Part):
    """Layers whose keys and values live in host memory, with a `hot` set of rows kept on the device."""

    layers: LayerSet
    hot: Budget


class DecodePlan(Part):
    """What decode attends to. Contexts are counted as all cached tokens."""

    lengths: tuple[DecodeBucket, ...]
    offload: Offload | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DecodePlan:
        check_ascending(self.lengths)
        sparse = frozenset[int]().union(*(bucket.sparse_layers for bucket in self.lengths))
        dense = set(self.offload.layers if self.offload else ()) - sparse
        if dense:
            message = f"expected offloaded layers to be in a segment, found {format_ids(dense)} always dense"
            raise FieldError(message, "offload", "layers")
        return self

    def bucket(self, length: int) -> DecodeBucket:
        """What holds at a context of `length` cached tokens."""
        return bucket_of(self.lengths, length)
