"""What a plan says, condensed for a reader: which layers do the same, and patterns in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sparsekv.plans.budget import Budget
from sparsekv.plans.capability import unsupported
from sparsekv.plans.layers import format_ids
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Pattern
from sparsekv.plans.prefill import PrefillBucket
from sparsekv.plans.schema import Plan, to_data

_LONG = 6


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Heads that share a pattern, or (where there are many) a kind of pattern with parameters in a range."""

    heads: tuple[int, ...]
    kind: str
    parameters: str


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Neighbouring layers that compute the same."""

    layers: tuple[int, ...]
    rows: tuple[HeadRow, ...]


def layer_rows(bucket: PrefillBucket, model: ModelInfo, full: bool = False) -> Iterator[LayerRows]:
    """What each layer of a bucket computes; layers with many patterns are condensed by kind unless `full`."""
    rows = [(layer, _head_rows(bucket, layer, model, full)) for layer in range(model.layers)]
    for same, members in groupby(rows, key=lambda row: row[1]):
        yield LayerRows(tuple(layer for layer, _ in members), same)


def _head_rows(bucket: PrefillBucket, layer: int, model: ModelInfo, full: bool) -> tuple[HeadRow, ...]:
    reuse = next((reuse for reuse in bucket.reuse if layer in reuse.layers), None)
    if reuse is not None:
        heads = "" if reuse.heads == "same" else f" by the head map {list(reuse.heads)}"
        return (HeadRow(tuple(range(model.group_of(layer).heads)), "reuse", f"tiles of layer {reuse.source}{heads}"),)
    by_pattern: dict[Pattern, list[int]] = {}
    for head, pattern in enumerate(bucket.patterns(layer, model.group_of(layer).heads)):
        by_pattern.setdefault(pattern, []).append(head)
    if full or len(by_pattern) <= _LONG:
        return tuple(HeadRow(tuple(heads), p.pattern, parameters([p])) for p, heads in by_pattern.items())
    return tuple(_by_kind(by_pattern))


def _by_kind(by_pattern: dict[Pattern, list[int]]) -> Iterator[HeadRow]:
    for kind in dict.fromkeys(pattern.pattern for pattern in by_pattern):
        same = [pattern for pattern in by_pattern if pattern.pattern == kind]
        yield HeadRow(tuple(sorted(head for p in same for head in by_pattern[p])), kind, parameters(same))


def parameters(patterns: Sequence[Pattern]) -> str:
    """The parameters of patterns of one kind in a line; ranges where they differ."""
    names = [name for name in type(patterns[0]).model_fields if name != "pattern"]
    return ", ".join(f"{name} {_span([getattr(p, name) for p in patterns])}" for name in names)


def _span(values: Sequence[Any]) -> str:
    ordered = sorted(set(values), key=_size)
    low, high = text_of(ordered[0]), text_of(ordered[-1])
    return low if low == high else f"{low} to {high}"


def _size(value: Any) -> tuple[int, Any]:
    if isinstance(value, Budget):
        return (0, value.fraction) if value.tokens is None else (1, value.tokens)
    return (2, value)


def text_of(value: Any) -> str:
    """A parameter as people read it: fractions in percent."""
    if isinstance(value, Budget):
        return str(value.tokens) if value.tokens is not None else f"{100 * (value.fraction or 0):.4g}%"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reach(lengths: Sequence[Any], position: int) -> str:
    """The context lengths of a bucket: "up to 8,192", "8,193 to 32,768", "above 32,768", "every length"."""
    last = lengths[position].up_to
    first = lengths[position - 1].up_to + 1 if position else None
    if first is None:
        return "every length" if last is None else f"up to {last:,}"
    return f"above {first - 1:,}" if last is None else f"{first:,} to {last:,}"


def summary(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data, condensed: what `sparsekv show --json` prints."""
    data = to_data(plan)
    phases = {
        "prefill": [_prefill_facts(bucket, plan.model) for bucket in plan.prefill.lengths] if plan.prefill else None,
        "decode": data.get("decode"),
    }
    copied = ("kv_cache", "quality", "cost", "provenance", "extensions", "integrity")
    return {
        "model": {"id": plan.model.id, "revision": plan.model.revision, "layers": plan.model.layers},
        "schema_version": plan.schema_version,
        "status": plan.status,
        "targets": data.get("targets", []),
        "tile": to_data(plan.prefill.tile) if plan.prefill else None,
        **phases,
        **{name: data.get(name) for name in copied},
        "unsupported": unsupported(plan),
    }


def _prefill_facts(bucket: PrefillBucket, model: ModelInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {"up_to": bucket.up_to, "dense": bucket.dense, "extrapolated": bucket.extrapolated}
    if bucket.same_as is not None:
        return facts | {"same_as": bucket.same_as}
    kinds: Counter[str] = Counter()
    layers = []
    for layer in range(model.layers):
        rows = _head_rows(bucket, layer, model, full=True)
        kinds.update({row.kind: len(row.heads) for row in rows})
        heads = {format_ids(row.heads): f"{row.kind} {row.parameters}".strip() for row in rows}
        layers.append({"layer": layer, "heads": heads})
    return facts | {"heads": dict(sorted(kinds.items())), "layers": layers}
