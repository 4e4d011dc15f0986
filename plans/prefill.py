"""The prefill phase of a plan: which pattern each query head follows, by context length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from sparsekv.plans.buckets import bucket_of, check_ascending
from sparsekv.plans.layers import LayerSet, format_ids
from sparsekv.plans.parts import FieldError, Flag, Index, Length, Part
from sparsekv.plans.patterns import Dense, Pattern, TileShape

_PLACE = ("layer", "heads")


class HeadGroup(Part):
    """Query heads of one layer that share a pattern. In a file the pattern's fields stand beside `layer`."""

    layer: Index
    heads: LayerSet
    pattern: Pattern

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, data: Any) -> Any:
        if not isinstance(data, dict) or isinstance(data.get("pattern"), Part):
            return data
        pattern = {key: value for key, value in data.items() if key not in _PLACE}
        return {"pattern": pattern} | {key: data[key] for key in _PLACE if key in data}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = handler(self)
        pattern: dict[str, Any] = data["pattern"]
        return {"layer": data["layer"], "heads": data["heads"]} | pattern


class Reuse(Part):
    """Layers that take the tiles computed for an earlier layer, `source`.

    `heads[h]` is the head of the source whose tiles head h takes; `same` means head h takes those of head h.
    """

    layers: LayerSet
    source: Index
    heads: Literal["same"] | tuple[Index, ...] = "same"

    @model_validator(mode="after")
    def _source_comes_first(self) -> Reuse:
        if self.source >= self.layers[0]:
            raise FieldError(
                f"expected a source before the layers that reuse it, found {self.source} for {format_ids(self.layers)}"
            )
        return self


class PrefillBucket(Part):
    """One range of context lengths: all dense, or patterns for some heads (the others dense), or as another bucket.

    Groups are held in one order, by layer and first head, equal patterns of a layer together.
    """

    up_to: Length | None
    dense: Flag = False
    extrapolated: Flag = False
    same_as: Length | None = None
    heads: tuple[HeadGroup, ...] = ()
    reuse: tuple[Reuse, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> PrefillBucket:
        if [self.dense, bool(self.heads), self.same_as is not None].count(True) != 1:
            raise FieldError("expected exactly one of `dense: true`, `heads` and `same_as` in a prefill bucket")
        if self.reuse and not self.heads:
            raise FieldError("expected `reuse` only beside `heads`", "reuse")
        _check_overlap(self.heads)
        _check_reuse(self)
        object.__setattr__(self, "heads", _merged(self.heads))
        return self

    def patterns(self, layer: int, heads: int) -> tuple[Pattern, ...]:
        """The pattern of each of the `heads` query heads of a layer; heads that no group names are dense."""
        chosen: list[Pattern] = [Dense()] * heads
        for group in self.heads:
            if group.layer == layer:
                for head in group.heads:
                    chosen[head] = group.pattern
        return tuple(chosen)


class PrefillPlan(Part):
    """What prefill computes. Contexts are counted as past + chunk."""

    tile: TileShape
    lengths: tuple[PrefillBucket, ...]

    @model_validator(mode="after")
    def _consistent(self) -> PrefillPlan:
        check_ascending(self.lengths)
        for position, bucket in enumerate(self.lengths):
            if bucket.same_as is not None and self._named(bucket.same_as) is None:
                names = ", ".join(str(b.up_to) for b in self.lengths if b.up_to and b.same_as is None) or "none"
                message = f"expected the `up_to` of a bucket of its own ({names}), found {bucket.same_as}"
                raise FieldError(message, "lengths", position, "same_as")
        return self

    def _named(self, up_to: int) -> PrefillBucket | None:
        return next((b for b in self.lengths if b.up_to == up_to and b.same_as is None), None)

    def bucket(self, length: int) -> PrefillBucket:
        """What holds at a context of `length` tokens (past + chunk); `same_as` is followed."""
        found = bucket_of(self.lengths, length)
        named = None if found.same_as is None else self._named(found.same_as)
        return found if named is None else named


def _check_overlap(groups: Iterable[HeadGroup]) -> None:
    seen: dict[int, set[int]] = {}
    for position, group in enumerate(groups):
        named = seen.setdefault(group.layer, set())
        if not named.isdisjoint(group.heads):
            twice = format_ids(named.intersection(group.heads))
            message = f"expected each head once, found heads {twice} of layer {group.layer} again"
            raise FieldError(message, "heads", position)
        named.update(group.heads)


def _check_reuse(bucket: PrefillBucket) -> None:
    computed = {group.layer for group in bucket.heads}
    taken: set[int] = set()
    for position, reuse in enumerate(bucket.reuse):
        both = computed.union(taken).intersection(reuse.layers)
        if both:
            message = f"expected layers with no other pattern or reuse, found {format_ids(both)}"
            raise FieldError(message, "reuse", position, "layers")
        if reuse.source not in computed:
            message = f"expected a source layer with patterns of its own, found {reuse.source}"
            raise FieldError(message, "reuse", position, "source")
        taken.update(reuse.layers)


def _merged(groups: Iterable[HeadGroup]) -> tuple[HeadGroup, ...]:
    together: dict[tuple[int, Pattern], list[HeadGroup]] = {}
    for group in groups:
        together.setdefault((group.layer, group.pattern), []).append(group)
    merged = [same[0] if len(same) == 1 else _joined(same) for same in together.values()]
    return tuple(sorted(merged, key=lambda group: (group.layer, group.heads[0])))


def _joined(groups: list[HeadGroup]) -> HeadGroup:
    heads = tuple(sorted(head for group in groups for head in group.heads))
    return HeadGroup(layer=groups[0].layer, heads=heads, pattern=groups[0].pattern)
