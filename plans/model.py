"""The model a plan was made for: what each layer is, and the two digests by which it is recognised."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from sparsekv.plans.layers import LayerSet, format_ids
from sparsekv.plans.parts import Count, Digest, FieldError, JsonObject, Length, Part, Text


class AttentionGroup(Part):
    """Layers of one shape and kind. `window` is the layer's own sliding window in tokens, current one included."""

    layers: LayerSet
    kind: Literal["full", "sliding", "linear"]
    heads: Count
    kv_heads: Count
    head_dim: Count
    window: Length | None = None

    @model_validator(mode="after")
    def _consistent(self) -> AttentionGroup:
        if self.heads % self.kv_heads:
            raise FieldError(f"expected heads to be a multiple of kv_heads, found {self.heads} and {self.kv_heads}")
        if (self.kind == "sliding") != (self.window is not None):
            found = "none" if self.window is None else self.window
            raise FieldError(f"expected a window for sliding layers and for no others, found {found} on {self.kind}")
        return self


class Fingerprint(Part):
    """Digests of what the model is (`architecture`) and of sampled weights; `weights` is absent where unknown."""

    architecture: Digest
    weights: Digest | None = None


class ModelInfo(Part):
    """One checkpoint as a plan sees it. `id` is a hub id or a folder's name, never a path."""

    id: Text
    revision: Text | None = None
    model_type: Text
    context_length: Length
    rope: JsonObject = Field(default_factory=dict)
    attention: tuple[AttentionGroup, ...]
    fingerprint: Fingerprint

    @model_validator(mode="after")
    def _each_layer_once(self) -> ModelInfo:
        named = [layer for group in self.attention for layer in group.layers]
        twice = [layer for layer, times in Counter(named).items() if times > 1]
        if twice:
            raise FieldError(f"expected each layer in one group, found layers {format_ids(twice)} in two", "attention")
        missing = set(range(max(named, default=0) + 1)).difference(named)
        if missing:
            raise FieldError(f"expected every layer from 0 on, found no group for {format_ids(missing)}", "attention")
        return self

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return sum(len(group.layers) for group in self.attention)

    def group_of(self, layer: int) -> AttentionGroup:
        """What layer number `layer` is.

        Raises:
            IndexError: the model has no such layer.
        """
        for group in self.attention:
            if layer in group.layers:
                return group
        raise IndexError(f"layer {layer} of a model of {self.layers} layers")
