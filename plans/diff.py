"""What changed between two plans, in words and as data, the way a reviewer asks for it.

Plans are the same when they say the same: integrity, comments, order and layout of a file are no change. The phases are
compared at every context length, head by head and layer by layer, whatever buckets and groups they are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import Any

from sparsekv.plans.changes import (
    Change,
    entry_changes,
    field_in_words,
    fields_in_words,
    is_same,
    label_of,
    record_change,
    step_in_words,
    value_in_words,
)
from sparsekv.plans.files import content_digest
from sparsekv.plans.patterns import Budget, Pattern
from sparsekv.plans.phases import DecodePlan, PrefillPlan, bucket_of, reach
from sparsekv.plans.schema import Plan, to_data
from sparsekv.plans.types import Part, format_ids, format_length

_MOST_LINES = 12  # of one range of lengths; more are condensed by kind


def diff_plans(old: Plan, new: Plan, full: bool = False) -> tuple[Change, ...]:
    """What `new` says otherwise than `old`; empty exactly where the content of both, integrity aside, is the same.

    Args:
        full: every pattern of every head, otherwise many of them in one range of lengths are condensed by kind; and
            every figure of the quality, otherwise summed up by phase and length.
    """
    before, after = to_data(old), to_data(new)
    if content_digest(before) == content_digest(after):
        return ()
    return tuple(
        change
        for name, compare in _SECTIONS.items()
        if not is_same(before.get(name), after.get(name))
        for change in _or_rewritten(name, before.get(name), after.get(name), compare(old, new, full))
    )


def _or_rewritten(name: str, old: Any, new: Any, changes: Iterator[Change]) -> Iterator[Change]:
    """The changes of a section; where there are none although its data differs, that."""
    first = next(changes, None)
    if first is None:
        text = "the same in effect, written in other groups or in another order"
        yield Change(name.replace("_", " ").capitalize(), name, text, old, new)
    else:
        yield from (first, *changes)


# --- layers and heads -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a head or layer does, as it is compared: its kind, and parameters by name."""

    kind: str
    parameters: tuple[tuple[str, Any], ...] = ()


_NOTHING, _DENSE, _KEEP_ALL = _Setting("none"), _Setting("dense"), _Setting("all")
_DEFAULTS = frozenset({_NOTHING, _DENSE, _KEEP_ALL})
Grid = Mapping[int, Sequence[_Setting]]  # for each layer, what each of its heads does, or what the layer does


@dataclass(frozen=True, slots=True)
class _Moved:
    """One head, or layer, whose setting changed."""

    layer: int
    head: int
    old: _Setting
    new: _Setting

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters to tell: those that changed, all of both where the kind did."""
        old, new = dict(self.old.parameters), dict(self.new.parameters)
        together = tuple(dict.fromkeys((*old, *new)))
        if self.old.kind != self.new.kind:
            return together
        return tuple(name for name in together if old[name] != new[name])

    @property
    def exact(self) -> object:
        """Equal for heads of which the same is told."""
        old, new = dict(self.old.parameters), dict(self.new.parameters)
        return self.kinds, tuple((name, old.get(name), new.get(name)) for name in self.names)

    @property
    def kinds(self) -> tuple[str, str]:
        return self.old.kind, self.new.kind


@dataclass(frozen=True, slots=True)
class _Line:
    """What changed at some layers and heads, whatever the context length."""

    path: str
    text: str
    old: Any
    new: Any

    def at(self, section: str, path: str) -> Change:
        return Change(section, f"{path}{self.path}", self.text, self.old, self.new)


def _grid_lines(old: Grid, new: Grid, full: bool) -> tuple[_Line, ...]:
    """What differs, grouped: layers and heads with the same change in one line."""
    widths = {layer: max(len(old.get(layer, ())), len(new.get(layer, ()))) for layer in sorted({*old, *new})}
    moved = [
        _Moved(layer, head, before, after)
        for layer in widths
        for head, (before, after) in enumerate(zip_longest(old.get(layer, ()), new.get(layer, ()), fillvalue=_NOTHING))
        if before != after and not {before, after} <= _DEFAULTS
    ]
    lines = sorted(_exact_lines(moved, widths), key=lambda pair: pair[0])
    if len(lines) > _MOST_LINES and not full:
        return tuple(_condensed(same, widths) for same in _grouped(moved, lambda one: one.kinds))
    return tuple(line for _, line in lines)


def _exact_lines(moved: Sequence[_Moved], widths: Mapping[int, int]) -> Iterator[tuple[tuple[int, int], _Line]]:
    """The lines, each with its first layer and head."""
    for same in _grouped(moved, lambda one: one.exact):
        heads = {layer: tuple(one.head for one in of) for layer, of in _by_layer(same).items()}
        some = {layer: () if len(of) == widths[layer] else of for layer, of in heads.items()}
        for alike in _grouped(some, some.__getitem__):
            here = some[alike[0]]
            where = _counted("layer", alike) + (f" {_counted('head', here)}" if here else "")
            path = f"layers[{format_ids(alike)}]" + (f".heads[{format_ids(here)}]" if here else "")
            yield (alike[0], heads[alike[0]][0]), _line(where, path, [one for one in same if one.layer in alike])


def _condensed(same: Sequence[_Moved], widths: Mapping[int, int]) -> _Line:
    layers = tuple(_by_layer(same))
    by_head = any(widths[layer] > 1 for layer in layers)
    heads = f", {len(same)} head{'s' if len(same) > 1 else ''}" if by_head else ""
    return _line(f"{_counted('layer', layers)}{heads}", f"layers[{format_ids(layers)}]", same)


def _counted(name: str, ids: Sequence[int]) -> str:
    return f"{name}{'s' if len(ids) > 1 else ''} {format_ids(ids)}"


def _by_layer(moved: Iterable[_Moved]) -> dict[int, list[_Moved]]:
    return {layer: list(of) for layer, of in groupby(moved, key=lambda one: one.layer)}


def _grouped(items: Iterable[Any], key: Callable[[Any], object]) -> list[list[Any]]:
    """The items with equal keys together, in the order of the first of each."""
    groups: dict[object, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _line(where: str, path: str, same: Sequence[_Moved]) -> _Line:
    names = tuple(dict.fromkeys(name for one in same for name in one.names))
    kinds = same[0].kinds
    sides = [_values((one.old for one in same), names), _values((one.new for one in same), names)]
    if kinds[0] == kinds[1]:
        kind = "" if kinds[0] in _UNNAMED else f"{kinds[0]} "
        steps = ", ".join(
            step_in_words(name, _span(name, sides[0][name]), _span(name, sides[1][name])) for name in names
        )
        return _Line(path, f"{where}: {kind}{steps}", *(_json(side) for side in sides))
    told = [f"{kind}{_in_brackets(side)}" for kind, side in zip(kinds, sides, strict=True)]
    data = [{"kind": kind} | _json(side) for kind, side in zip(kinds, sides, strict=True)]
    return _Line(path, f"{where}: {told[0]} -> {told[1]}", *data)


_SPARSE, _LOSSY = "sparse", "best rows"
_UNNAMED = frozenset({_SPARSE, _LOSSY, "full", "sliding", "linear"})  # kinds that a reader knows without being told


def _values(settings: Iterable[_Setting], names: Sequence[str]) -> dict[str, list[Any]]:
    """The distinct values of each parameter that the settings have."""
    known = [dict(setting.parameters) for setting in settings]
    values = {name: list(dict.fromkeys(each[name] for each in known if name in each)) for name in names}
    return {name: each for name, each in values.items() if each and each != [None]}


def _in_brackets(values: Mapping[str, list[Any]]) -> str:
    told = ", ".join(f"{label_of(name)} {_span(name, each)}" for name, each in values.items())
    return f" ({told})" if told else ""


def _span(name: str, values: Sequence[Any]) -> str:
    if len(values) == 1:
        return field_in_words(name, values[0])
    if not all(isinstance(value, Budget | int | float) for value in values):
        return (
            " or ".join(field_in_words(name, value) for value in values)
            if len(values) == 2
            else f"{len(values)} different"
        )
    low, high = (field_in_words(name, value) for value in (min(values, key=_size), max(values, key=_size)))
    return f"{low.removesuffix(' tokens') if high.endswith(' tokens') else low} to {high}"


def _size(value: Budget | float) -> tuple[bool, float]:
    if isinstance(value, Budget):
        return value.tokens is not None, value.tokens or value.fraction or 0
    return False, value


def _json(values: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The one value of each parameter; of several, as only condensed lines have, their span as text."""
    data = {name: each[0] if len(each) == 1 else _span(name, each) for name, each in values.items()}
    return {name: to_data(value) if isinstance(value, Part) else value for name, value in data.items()}


# --- the phases, at every length --------------------------------------------------------------------------------------

Phase = PrefillPlan | DecodePlan


def _by_length(
    name: str, phases: tuple[Phase | None, Phase | None], lines: Callable[[int], tuple[_Line, ...]]
) -> Iterator[Change]:
    """The changes of `lines(length)` in every range of lengths; neighbouring ranges with the same ones are one."""
    bounds = sorted({bucket.up_to for phase in phases if phase for bucket in phase.lengths if bucket.up_to})
    ranges = [(after, up_to, lines((after or 0) + 1)) for after, up_to in pairwise((0, *bounds, None))]
    for same, members in groupby(ranges, key=lambda each: each[2]):
        covered = list(members)
        after, up_to = covered[0][0], covered[-1][1]
        where = f"{name}.lengths[{(after or 0) + 1}:{up_to or ''}]."
        yield from (line.at(f"{name.capitalize()}, {reach(after or 0, up_to)}", where) for line in same)


def _prefill(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    tiles = [to_data(plan.prefill.tile) if plan.prefill else None for plan in (old, new)]
    if old.prefill and new.prefill:
        yield from record_change("Prefill", "prefill.tile", "tile", tiles[0], tiles[1])

    def lines(length: int) -> tuple[_Line, ...]:
        return _grid_lines(_prefill_grid(old, length), _prefill_grid(new, length), full)

    def flags(length: int) -> tuple[_Line, ...]:
        before, after = _extrapolated(old, length), _extrapolated(new, length)
        text = f"extrapolated: {value_in_words(before)} -> {value_in_words(after)}"
        return () if before == after else (_Line("extrapolated", text, before, after),)

    phases = (old.prefill, new.prefill)
    yield from _by_length("prefill", phases, lines)
    yield from _by_length("prefill", phases, flags)


def _extrapolated(plan: Plan, length: int) -> bool:
    return plan.prefill is not None and bucket_of(plan.prefill.lengths, length).extrapolated


def _prefill_grid(plan: Plan, length: int) -> Grid:
    widths = {layer: group.heads for layer, group in plan.model.by_layer.items()}
    if plan.prefill is None:
        return {layer: (_DENSE,) * heads for layer, heads in widths.items()}
    bucket = plan.prefill.bucket(length)
    return {layer: tuple(map(_pattern, bucket.patterns(layer, heads))) for layer, heads in widths.items()}


def _pattern(pattern: Pattern) -> _Setting:
    return _Setting(pattern.pattern, _parameters(pattern, "pattern"))


def _parameters(part: Part, *without: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, getattr(part, name)) for name in type(part).model_fields if name not in without)


def _decode(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    def lines(length: int) -> tuple[_Line, ...]:
        return _grid_lines(_decode_grid(old, length), _decode_grid(new, length), full)

    yield from _by_length("decode", (old.decode, new.decode), lines)
    before, after = (
        to_data(plan.decode.offload) if plan.decode and plan.decode.offload else None for plan in (old, new)
    )
    yield from record_change("Decode", "decode.offload", "offload to host memory", before, after)


def _decode_grid(plan: Plan, length: int) -> Grid:
    grid = {layer: (_DENSE,) for layer in plan.model.by_layer}
    for segment in plan.decode.bucket(length).segments if plan.decode else ():
        for layer in segment.layers:
            heads = segment.heads if isinstance(segment.heads, str) else segment.heads[layer]
            grid[layer] = (_Setting(_SPARSE, (*_parameters(segment, "layers", "heads"), ("heads", heads))),)
    return grid


def _kv_cache(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    lines = _grid_lines(_retention_grid(old), _retention_grid(new), full)
    yield from (line.at("Cache retention", "kv_cache.") for line in lines)


def _retention_grid(plan: Plan) -> Grid:
    grid = {layer: (_KEEP_ALL,) for layer in plan.model.by_layer}
    for rule in plan.kv_cache or ():
        if rule.keep != "all":
            grid |= {layer: (_Setting(_LOSSY, _parameters(rule, "layers")),) for layer in rule.layers}
    return grid


# --- the rest of a plan -----------------------------------------------------------------------------------------------


def _status(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    yield Change("Status", "status", f"status: {old.status} -> {new.status}", old.status, new.status)


def _model(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    before, after = to_data(old.model), to_data(new.model)
    apart = {"rope", "attention", "fingerprint"}
    plain = [{name: value for name, value in data.items() if name not in apart} for data in (before, after)]
    yield from entry_changes("Model", "model", plain[0], plain[1])
    yield from _prefixed("rope ", entry_changes("Model", "model.rope", before.get("rope"), after.get("rope")))
    grids = [{layer: (_shape(group),) for layer, group in plan.model.by_layer.items()} for plan in (old, new)]
    yield from (line.at("Model", "model.attention.") for line in _grid_lines(grids[0], grids[1], full))
    prints = entry_changes("Model", "model.fingerprint", before["fingerprint"], after["fingerprint"])
    yield from _prefixed("fingerprint of the ", prints)


def _shape(group: Part) -> _Setting:
    kind, *rest = _parameters(group, "layers")
    return _Setting(kind[1], tuple(rest))


def _prefixed(words: str, changes: Iterable[Change]) -> Iterator[Change]:
    for change in changes:
        text = change.text if change.text.startswith(words) else words + change.text
        yield Change(change.section, change.path, text, change.old, change.new)


def _targets(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    before, after = list(old.targets), list(new.targets)
    for target in old.targets:
        if target in after:
            after.remove(target)
            before.remove(target)
    for target in before:
        yield Change("Targets", "targets", f"removed: {fields_in_words(to_data(target))}", to_data(target), None)
    for target in after:
        yield Change("Targets", "targets", f"added: {fields_in_words(to_data(target))}", None, to_data(target))


def _quality(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    parts = [to_data(plan.quality) if plan.quality else None for plan in (old, new)]
    if full:
        sides = [dict(_measured("quality", "", part or {})) for part in parts]
        for path, what in dict.fromkeys((*sides[0], *sides[1])):
            yield from record_change("Quality", path, what, *(side.get((path, what)) for side in sides))
    elif parts[0] is None or parts[1] is None:
        yield _one_sided("Quality", "quality", "quality", "measured", *parts)
    else:
        for phase in dict.fromkeys((*parts[0], *parts[1])):
            yield from _phase_quality(phase, parts[0].get(phase), parts[1].get(phase))


def _one_sided(section: str, path: str, what: str, done: str, old: Any, new: Any) -> Change:
    """A whole part that one plan alone has, in one line."""
    return Change(section, path, f"{what}: {'dropped' if new is None else f'{done} now'}", old, new)


def _phase_quality(phase: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> Iterator[Change]:
    """What one phase kept: a line over everything, one a length, and one of all tasks."""
    path = f"quality.{phase}"
    if old is None or new is None:
        yield _one_sided("Quality", path, phase, "measured", old, new)
        return
    sides = [dict(_summed_up(path, phase, part)) for part in (old, new)]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        (figures, before), (others, after) = (side.get(key, ({}, None)) for side in sides)
        if is_same(before, after):
            continue
        names = [name for name in dict.fromkeys((*figures, *others)) if figures.get(name) != others.get(name)]
        steps = (
            f"{value_in_words(name)} {value_in_words(figures.get(name))} -> {value_in_words(others.get(name))}"
            for name in names
        )
        yield Change("Quality", key[0], f"{key[1]}: {', '.join(steps) or _ELSE}", before, after)


_ELSE = "the same figures, other intervals or samples (--full lists them)"


def _summed_up(path: str, what: str, part: dict[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[Any, Any]]]:
    """For a path and what it is: the figures to name, and all data there."""
    yield (path, what), (_figures(part), {n: value for n, value in part.items() if n not in ("by_length", "tasks")})
    for entry in part.get("by_length", ()):
        at = entry["length"]
        yield (f"{path}.by_length[{at}]", f"{what} at {format_length(at)}"), (_figures(entry), entry)
    if tasks := part.get("tasks"):
        yield (f"{path}.tasks", f"{what}, tasks"), ({name: score["sparse"] for name, score in tasks.items()}, tasks)


def _figures(part: dict[str, Any]) -> dict[str, Any]:
    agreement = part.get("agreement", {})
    named = {"density": part["density"], "divergence": agreement.get("kl", part.get("kl"))}
    named |= {"top-1": agreement.get("top1"), "exact": agreement.get("exact")}
    return {name: value for name, value in named.items() if value is not None}


def _measured(path: str, what: str, part: dict[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    inner: dict[str, Any] = {n: part.pop(n) for n in [*part] if n in ("prefill", "decode", "both", "agreement")}
    inner |= {f"by_length[{entry['length']}]": entry for entry in part.pop("by_length", ())}
    inner |= {f"tasks.{task}": score for task, score in part.pop("tasks", {}).items()}
    yield from [((path, what), part)] if part else []
    for name, entry in inner.items():
        yield from _measured(f"{path}.{name}", f"{what}, {name}".removeprefix(", ").replace(", tasks.", ", "), entry)


def _cost(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    if not full and (old.cost is None or new.cost is None):
        parts = [to_data(plan.cost) if plan.cost else None for plan in (old, new)]
        yield _one_sided("Predicted cost", "cost", "cost", "predicted", *parts)
        return
    sides = [to_data(plan.cost) if plan.cost else {} for plan in (old, new)]
    plain = [{name: value for name, value in side.items() if name != "lengths"} for side in sides]
    yield from entry_changes("Predicted cost", "cost", plain[0], plain[1])
    entries = [{entry["length"]: entry for entry in side.get("lengths", ())} for side in sides]
    for length in sorted({*entries[0], *entries[1]}):
        for phase, name in (("prefill", "prefill"), ("decode", "decode step")):
            path, what = f"cost.lengths[{length}].{phase}", f"{name} at {format_length(length)}"
            yield from record_change(
                "Predicted cost", path, what, *(each.get(length, {}).get(phase) for each in entries)
            )


def _provenance(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    before, after = to_data(old.provenance), to_data(new.provenance)
    nested = ("versions", "settings", "mix")
    plain = [{name: value for name, value in data.items() if name not in nested} for data in (before, after)]
    yield from entry_changes("Provenance", "provenance", plain[0], plain[1])
    for name in nested:
        changes = entry_changes("Provenance", f"provenance.{name}", before.get(name), after.get(name))
        yield from _prefixed(f"{name.removesuffix('s')} ", changes)


def _extensions(old: Plan, new: Plan, full: bool) -> Iterator[Change]:
    yield from entry_changes("Extensions", "extensions", old.extensions, new.extensions)


_SECTIONS: Mapping[str, Callable[[Plan, Plan, bool], Iterator[Change]]] = {
    "model": _model,
    "status": _status,
    "targets": _targets,
    "prefill": _prefill,
    "decode": _decode,
    "kv_cache": _kv_cache,
    "quality": _quality,
    "cost": _cost,
    "provenance": _provenance,
    "extensions": _extensions,
}
