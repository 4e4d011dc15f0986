"""Says what changed between two plans, as text and as data.

Plans are the same when they say the same: integrity, comments, order and layout of a file are no change. The phases are
compared at every context length, head by head and layer by layer, whatever buckets and groups they are written in;
everything else field by field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from sparsekv.plans.files import content_digest
from sparsekv.plans.phases import bucket_of, reach
from sparsekv.plans.schema import Plan, to_data
from sparsekv.plans.show import span
from sparsekv.plans.types import SHA256_WEIGHTS, Part, canonical_json, format_ids


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs. `old` and `new` are JSON data: None where one plan does not have it."""

    section: str  # such as "Prefill, up to 8,192"
    path: str  # of the field in a plan, lengths, layers and heads in brackets
    text: str  # such as "layers 4-9: budget 2048 -> 4096"
    old: Any
    new: Any


def diff_plans(old: Plan, new: Plan, full: bool = False) -> tuple[Change, ...]:
    """Returns what `new` says otherwise than `old`; empty exactly where the content of both, integrity aside, is the
    same.

    Args:
        full: every pattern of every head and every figure; otherwise many patterns in one range of lengths are
            condensed by kind, and of quality and cost only the main figures are listed.
    """
    plans, before, after = (old, new), to_data(old), to_data(new)
    if content_digest(before) == content_digest(after):
        return ()

    def record(*names: str) -> Iterator[Change]:
        return (change for name in names for change in _record_changes(name, before, after, full))

    def leaf(phase: str, name: str) -> Iterator[Change]:
        sides = (data.get(phase, {}).get(name) for data in (before, after))
        return _leaf_changes(phase.capitalize(), f"{phase}.{name}", *sides)

    def at_lengths(phase: str, grid: Callable[[Plan, int], Grid]) -> Iterator[Change]:
        return _by_length(phase, plans, lambda length: _moved(grid(old, length), grid(new, length), full))

    found = (
        *record("model", "status", "targets"),
        *at_lengths("prefill", _heads),
        *_by_length("prefill", plans, lambda at: _flag(*(_is_extrapolated(plan, at) for plan in plans))),
        *leaf("prefill", "tile"),
        *at_lengths("decode", _segments),
        *leaf("decode", "offload"),
        *(one.at("Cache retention", "kv_cache.") for one in _moved(_retention(old), _retention(new), full)),
        *record("quality", "cost", "provenance", "extensions"),
    )
    same = "the same in effect, written in other groups or in another order"
    return found or (Change("Plan", "", same, None, None),)


# --- layers and heads -------------------------------------------------------------------------------------------------

_MOST_LINES = 12  # of one range of lengths; more are condensed by kind
_WHOLE = -1  # in place of a head: the layer as a whole


@dataclass(frozen=True, slots=True)
class _Setting:
    """Holds what a head or layer does: its kind, and parameters by name."""

    kind: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, kind: str, part: Part, *without: str, **more: Any) -> _Setting:
        own = {name: getattr(part, name) for name in type(part).model_fields if name not in without}
        return cls(kind, tuple((own | more).items()))


_DENSE = _Setting("dense")
Grid = Mapping[tuple[int, int], _Setting]  # what heads or layers do that is not dense
_Pair = tuple[_Setting, _Setting]


@dataclass(frozen=True, slots=True)
class _Line:
    """Holds what changed at some layers and heads, whatever the context length."""

    path: str
    text: str
    old: Any
    new: Any

    def at(self, section: str, path: str) -> Change:
        return Change(section, f"{path}{self.path}", self.text, self.old, self.new)


def _moved(old: Grid, new: Grid, full: bool) -> tuple[_Line, ...]:
    """Returns what differs, grouped: layers and heads with the same change in one line."""
    layers: dict[tuple[int, _Pair], list[int]] = {}  # heads of a layer with the same change
    for cell in sorted({*old, *new}):
        pair = old.get(cell, _DENSE), new.get(cell, _DENSE)
        if pair[0] != pair[1]:
            layers.setdefault((cell[0], pair), []).append(cell[1])
    alike: dict[Any, list[Any]] = {}
    by_kind: dict[Any, list[Any]] = {}
    for (layer, pair), heads in layers.items():
        alike.setdefault((pair, tuple(heads)), []).append((layer, heads, pair))
        by_kind.setdefault((pair[0].kind, pair[1].kind), []).append((layer, heads, pair))
    groups = by_kind if len(alike) > _MOST_LINES and not full else alike
    return tuple(_line(*zip(*members, strict=True)) for members in groups.values())


def _line(layers: Sequence[int], heads: Sequence[list[int]], pairs: Sequence[_Pair]) -> _Line:
    ids = format_ids(set(layers))
    where, told = f"layers[{ids}]", f"layers {ids}"
    if heads[0] != [_WHOLE]:
        same = all(own == heads[0] for own in heads)
        where += f".heads[{format_ids(heads[0])}]" if same else ""
        told += f", heads {format_ids(heads[0])}" if same else f", {sum(map(len, heads))} heads"
    kinds = [side.kind for side in pairs[0]]
    old, new = (_values(side) for side in zip(*pairs, strict=True))
    if kinds[0] != kinds[1]:
        both = [
            {"kind": kind} | {name: _json(own) for name, own in side.items()}
            for kind, side in zip(kinds, (old, new), strict=True)
        ]
        return _Line(where, f"{told}: {_in_brackets(kinds[0], old)} -> {_in_brackets(kinds[1], new)}", *both)
    names = [name for name in old if any(dict(a.parameters)[name] != dict(b.parameters)[name] for a, b in pairs)]
    steps = ", ".join(f"{name} {span(old[name])} -> {span(new[name])}" for name in names)
    return _Line(
        where, f"{told}: {kinds[0]} {steps}", *({name: _json(side[name]) for name in names} for side in (old, new))
    )


def _values(settings: Iterable[_Setting]) -> dict[str, list[Any]]:
    """The distinct values of each parameter."""
    found: dict[str, dict[Any, None]] = {}
    for setting in settings:
        for name, value in setting.parameters:
            found.setdefault(name, {})[value] = None
    return {name: list(own) for name, own in found.items()}


def _in_brackets(kind: str, values: Mapping[str, list[Any]]) -> str:
    told = ", ".join(f"{name} {span(own)}" for name, own in values.items() if own != [None])
    return f"{kind} ({told})" if told else kind


def _json(values: Sequence[Any]) -> Any:
    if len(values) > 1:
        return span(values)
    return to_data(values[0]) if isinstance(values[0], Part) else values[0]


# --- the phases, at every length --------------------------------------------------------------------------------------


def _by_length(name: str, plans: tuple[Plan, Plan], lines: Callable[[int], tuple[_Line, ...]]) -> Iterator[Change]:
    """The changes of `lines(length)` in every range of lengths; neighbouring ranges with the same ones are one."""
    phases = [phase for plan in plans if (phase := getattr(plan, name))]
    bounds = sorted({bucket.up_to for phase in phases for bucket in phase.lengths if bucket.up_to})
    for same, members in groupby(pairwise((0, *bounds, None)), key=lambda ends: lines((ends[0] or 0) + 1)):
        covered = list(members)
        after, up_to = covered[0][0] or 0, covered[-1][1]
        path = f"{name}.lengths[{after + 1}:{up_to or ''}]."
        yield from (line.at(f"{name.capitalize()}, {reach(after, up_to)}", path) for line in same)


def _heads(plan: Plan, length: int) -> Grid:
    bucket = plan.prefill.bucket(length) if plan.prefill else None
    return {
        (group.layer, head): _Setting.of(group.pattern.pattern, group.pattern, "pattern")
        for group in (bucket.heads if bucket else ())
        for head in group.heads
    }


def _is_extrapolated(plan: Plan, length: int) -> bool:
    return plan.prefill is not None and bucket_of(plan.prefill.lengths, length).extrapolated


def _flag(old: bool, new: bool) -> tuple[_Line, ...]:
    return () if old == new else (_Line("extrapolated", f"extrapolated: {_told(old)} -> {_told(new)}", old, new),)


def _segments(plan: Plan, length: int) -> Grid:
    return {
        (layer, _WHOLE): _Setting.of(
            "sparse", one, "layers", "heads", heads=one.heads if isinstance(one.heads, str) else one.heads[layer]
        )
        for one in (plan.decode.bucket(length).segments if plan.decode else ())
        for layer in one.layers
    }


def _retention(plan: Plan) -> Grid:
    rules = [rule for rule in plan.kv_cache or () if rule.is_lossy]
    return {(layer, _WHOLE): _Setting.of("lossy", rule, "layers") for rule in rules for layer in rule.layers}


# --- the rest of a plan -----------------------------------------------------------------------------------------------

_FIGURES = frozenset({"density", "kl", "top1", "exact", "dense", "sparse", "dense_us", "sparse_us"})
_MISSING = object()


def _record_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any], full: bool) -> Iterator[Change]:
    section, sides = name.capitalize(), (old.get(name), new.get(name))
    changes = list(_leaf_changes(section, name, *sides))
    if full or name not in ("quality", "cost") or not changes:
        yield from changes
    elif None in sides:
        yield Change(section, name, f"{name}: {'added' if sides[0] is None else 'dropped'}", *sides)
    else:
        main = [one for one in changes if one.path.rpartition(".")[2] in _FIGURES]
        yield from main or [Change(section, name, "the same figures, other intervals or samples", *sides)]


def _leaf_changes(section: str, path: str, old: Any, new: Any) -> Iterator[Change]:
    """A change for each value that differs, at any depth."""
    before, after = (dict(_leaves(side, path)) if side is not None else {} for side in (old, new))
    for place in dict.fromkeys((*before, *after)):
        pair = before.get(place, _MISSING), after.get(place, _MISSING)
        if _MISSING in pair or canonical_json(pair[0]) != canonical_json(pair[1]):
            data = [None if side is _MISSING else side for side in pair]
            is_share = ".decode." in place and place.endswith(".density")  # as tables call it
            named = _printable(place) + (" (share)" if is_share else "")
            yield Change(section, place, f"{named}: {_told(pair[0])} -> {_told(pair[1])}", *data)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}")
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{item.get('length', number)}]")
    else:
        yield path, value


_IS_DIGEST = re.compile(SHA256_WEIGHTS)
_DIGITS = 12  # of a digest: enough to tell two of them apart


def _told(value: Any) -> str:
    if value is _MISSING:
        return "none"
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    kind, _, digits = value.partition(":")
    return f"{kind}:{digits[:_DIGITS]}" if _IS_DIGEST.fullmatch(value) else _printable(value)


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)
