"""A change of one record or entry between two plans, as data and in words; `diff` finds them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparsekv.plans.patterns import Budget
from sparsekv.plans.schema import to_data
from sparsekv.plans.types import SHA256_WEIGHTS, canonical_json, format_length


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs. `old` and `new` are JSON data: None where one plan does not have it."""

    section: str  # such as "Prefill, up to 8,192"
    path: str  # of the field in a plan, lengths, layers and heads in brackets
    text: str  # such as "layers 4-9: budget 2048 -> 4096 tokens"
    old: Any
    new: Any


def is_same(old: Any, new: Any) -> bool:
    """Whether the JSON is the same: 1, 1.0 and true are equal in Python alone."""
    return canonical_json(old) == canonical_json(new)


def record_change(
    section: str, path: str, what: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> Iterator[Change]:
    """A change of one record, which names the fields that differ; all fields where one plan does not have it."""
    if is_same(old, new):
        return
    if old is None or new is None:
        told = [fields_in_words(record) if record is not None else "none" for record in (old, new)]
        yield Change(section, path, f"{what}: {told[0]} -> {told[1]}", old, new)
        return
    names = [name for name in dict.fromkeys((*old, *new)) if not is_same(old.get(name), new.get(name))]
    steps = ", ".join(
        step_in_words(name, field_in_words(name, old.get(name)), field_in_words(name, new.get(name))) for name in names
    )
    here = [{name: record[name] for name in names if name in record} for record in (old, new)]
    yield Change(section, path, f"{what}: {steps}", here[0], here[1])


def entry_changes(
    section: str, path: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> Iterator[Change]:
    """A change for each entry that differs."""
    old, new = old or {}, new or {}
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new or not is_same(old[name], new[name]):
            told = [value_in_words(record[name]) if name in record else "none" for record in (old, new)]
            text = f"{label_of(name)}: {told[0]} -> {told[1]}"
            if _is_number(old.get(name)) and _is_number(new.get(name)) and old[name] == new[name]:
                text = f"{label_of(name)}: the same number, written as {new[name]} instead of {old[name]}"
            yield Change(section, f"{path}.{name}", text, old.get(name), new.get(name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fields_in_words(record: Mapping[str, Any]) -> str:
    """All fields of a record: "dense 0.99, sparse 0.985"."""
    return ", ".join(f"{label_of(name)} {field_in_words(name, value)}" for name, value in record.items())


def step_in_words(name: str, old: str, new: str) -> str:
    """A field that changed, with its unit once: "budget 2048 -> 4096 tokens"."""
    for unit in (" tokens", " ms"):
        if old.endswith(unit) and new.endswith(unit):
            old = old.removesuffix(unit)
    return f"{label_of(name)} {old} -> {new}"


def label_of(name: str) -> str:
    """The name of a field as people read it."""
    return _printable(name.removesuffix("_us").replace("_", " "))


_IS_DIGEST = re.compile(SHA256_WEIGHTS)
_DIGITS = 12  # of a digest: enough to tell two of them apart


def field_in_words(name: str, value: Any) -> str:
    """The value of a field as people read it, with all the digits that a plan keeps."""
    if value is None:
        return value_in_words(value)
    if name.endswith("interval"):
        return f"{value[0]:+.6g} to {value[1]:+.6g}"
    if name == "lengths":
        return ", ".join(map(format_length, value))
    if name.endswith("_us"):
        return f"{value / 1000:,.6g} ms"
    value = to_data(value) if isinstance(value, Budget) else value
    if not isinstance(value, dict):
        return value_in_words(value)
    most = f" (at most {value['at_most']} tokens)" if "at_most" in value else ""
    return f"{value['tokens']} tokens" if "tokens" in value else f"{100 * value['fraction']:.6g}%{most}"


def value_in_words(value: Any) -> str:
    """JSON data of any kind; digests are shortened."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, str):
        kind, _, digits = value.partition(":")
        return f"{kind}:{digits[:_DIGITS]}" if _IS_DIGEST.fullmatch(value) else _printable(value)
    if isinstance(value, float) and float(f"{value:.6g}") == value:
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)
