"""Plain data as YAML text: the same data always gives the same bytes.

Blocks outside, one flow line for each small record (a head group, a segment, a budget). Every scalar reads back alike
under YAML 1.1 and 1.2: floats keep a point (PyYAML takes 1e-05 for text), text that could be anything else is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*", re.ASCII)
_AMBIGUOUS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_INLINE = 100


def to_yaml(data: dict[str, Any]) -> str:
    """`data` (JSON types only, finite floats) as YAML."""
    text: str = yaml.emit(_document(data), Dumper=_Emitter, allow_unicode=True, width=1 << 30)
    return text


class _Emitter(yaml.SafeDumper):
    """Never the emitter of libyaml, which is faster but lays out some text differently, and is not everywhere."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists stand further in than their key


def _document(data: dict[str, Any]) -> Iterator[yaml.Event]:
    yield yaml.StreamStartEvent()
    yield yaml.DocumentStartEvent(explicit=False)
    yield from _mapping(data, flow=False)
    yield yaml.DocumentEndEvent(explicit=False)
    yield yaml.StreamEndEvent()


def _events(value: Any, flow: bool) -> Iterator[yaml.Event]:
    if isinstance(value, dict):
        yield from _mapping(value, flow)
    elif isinstance(value, list):
        yield yaml.SequenceStartEvent(None, None, True, flow_style=flow)
        for item in value:
            yield from _events(item, flow or not _holds_records(item))
        yield yaml.SequenceEndEvent()
    else:
        yield _scalar(value)


def _mapping(data: dict[str, Any], flow: bool) -> Iterator[yaml.Event]:
    yield yaml.MappingStartEvent(None, None, True, flow_style=flow)
    for key, value in data.items():
        yield _scalar(key)
        yield from _events(value, flow or _fits_a_line(value))
    yield yaml.MappingEndEvent()


def _scalar(value: Any) -> yaml.Event:
    if isinstance(value, str):
        plain = bool(_PLAIN.fullmatch(value)) and value.lower() not in _AMBIGUOUS
        return yaml.ScalarEvent(None, None, (plain, True), value, style=None if plain else '"')
    return yaml.ScalarEvent(None, None, (True, True), _number(value))


def _number(value: bool | float | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _holds_records(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) or _holds_records(item) for item in value)
    return isinstance(value, dict) and any(_holds_records(item) for item in value.values())


def _fits_a_line(value: Any) -> bool:
    if isinstance(value, list):
        return not _holds_records(value)
    return isinstance(value, dict) and _height(value) <= 2 and not _holds_records(value) and len(str(value)) <= _INLINE


def _height(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_height, value), default=0) if isinstance(value, list) else 0
