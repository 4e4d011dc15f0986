"""Whether what a plan names exists in its model: layers, heads, key-value heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparsekv.plans.decode import DecodePlan, Segment
from sparsekv.plans.layers import format_ids, ids_of
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.parts import FieldError, Where
from sparsekv.plans.prefill import PrefillBucket, PrefillPlan, Reuse
from sparsekv.plans.records import Retention

Shapes = dict[int, AttentionGroup]


def check_fit(
    model: ModelInfo, prefill: PrefillPlan | None, decode: DecodePlan | None, kv_cache: Sequence[Retention]
) -> None:
    """Every layer and head that the phases name is one the model has.

    Raises:
        FieldError: one is not, or two retention rules name a layer.
    """
    shapes = {layer: group for group in model.attention for layer in group.layers}
    for position, bucket in enumerate(prefill.lengths if prefill else ()):
        _check_prefill(bucket, shapes, ("prefill", "lengths", position))
    for position, step in enumerate(decode.lengths if decode else ()):
        for number, segment in enumerate(step.segments):
            _check_segment(segment, shapes, ("decode", "lengths", position, "segments", number))
    if decode and decode.offload:
        _softmax_layers(decode.offload.layers, shapes, ("decode", "offload", "layers"))
    _check_retention(kv_cache, shapes)


def _check_prefill(bucket: PrefillBucket, shapes: Shapes, path: tuple[Where, ...]) -> None:
    for group in bucket.heads:
        _softmax_layers((group.layer,), shapes, (*path, "heads", _names(group.layer, group.heads[-1]), "layer"))
        heads = shapes[group.layer].heads
        if group.heads[-1] >= heads:
            message = f"expected heads 0 to {heads - 1} of layer {group.layer}, found {format_ids(group.heads)}"
            raise FieldError(message, *path, "heads", _names(group.layer, group.heads[-1]), "heads")
    for number, reuse in enumerate(bucket.reuse):
        _check_reuse(reuse, shapes, (*path, "reuse", number))


def _names(layer: int, head: int) -> Callable[[dict[str, Any]], bool]:
    # By content: in memory the groups of a layer are merged and sorted, in the file they may stand anywhere.
    return lambda item: item["layer"] == layer and head in ids_of(item["heads"])


def _check_reuse(reuse: Reuse, shapes: Shapes, path: tuple[Where, ...]) -> None:
    _softmax_layers(reuse.layers, shapes, (*path, "layers"))
    _softmax_layers((reuse.source,), shapes, (*path, "source"))
    source = shapes[reuse.source].heads
    for layer in reuse.layers:
        own = shapes[layer].heads
        heads, entries = (range(own), source) if reuse.heads == "same" else (reuse.heads, own)
        _check_map(heads, entries, source, f"heads of layer {reuse.source}", (*path, "heads"))


def _check_segment(segment: Segment, shapes: Shapes, path: tuple[Where, ...]) -> None:
    _softmax_layers((segment.filter,), shapes, (*path, "filter"))
    _softmax_layers(segment.layers, shapes, (*path, "layers"))
    source = shapes[segment.filter].kv_heads
    for layer in segment.layers:
        if segment.heads == "max":
            continue
        own = shapes[layer].kv_heads
        heads, entries = (range(own), source) if segment.heads == "per_kv_head" else (segment.heads[layer], own)
        name = f"key-value heads of layer {segment.filter}"
        _check_map(heads, entries, source, name, (*path, "heads"))


def _check_map(heads: Sequence[int], entries: int, source: int, name: str, path: tuple[Where, ...]) -> None:
    if len(heads) != entries or max(heads) >= source:
        message = f"expected {entries} entries, each one of the {source} {name}, found {list(heads)}"
        raise FieldError(message, *path)


def _check_retention(rules: Sequence[Retention], shapes: Shapes) -> None:
    seen: set[int] = set()
    for number, rule in enumerate(rules):
        _softmax_layers(rule.layers, shapes, ("kv_cache", number, "layers"))
        if seen.intersection(rule.layers):
            message = f"expected one rule a layer, found a second for {format_ids(seen.intersection(rule.layers))}"
            raise FieldError(message, "kv_cache", number, "layers")
        seen.update(rule.layers)


def _softmax_layers(layers: Iterable[int], shapes: Shapes, path: tuple[Where, ...]) -> None:
    for layer in layers:
        if layer not in shapes:
            raise FieldError(f"expected layers 0 to {len(shapes) - 1} of the model, found {layer}", *path)
        if shapes[layer].kind == "linear":
            raise FieldError(f"expected layers with softmax attention, found {layer}, which is linear", *path)
