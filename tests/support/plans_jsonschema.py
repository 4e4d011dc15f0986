"""As much of JSON Schema as the plan's schema uses, so that the test of the golden file needs no other package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_NOTES = {"title", "description", "default", "$schema", "$id", "$defs", "discriminator"}


def faults(value: Any, schema: Any, root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Everything in `value` that `schema` does not allow.

    Raises:
        NotImplementedError: the schema uses a keyword that is not known here.
    """
    if schema is True:
        return
    for keyword, wanted in schema.items():
        if keyword in _NOTES:
            continue
        check = _CHECKS.get(keyword)
        if check is None:
            raise NotImplementedError(keyword)
        yield from check(value, wanted, schema, root, path)


def _reference(value: Any, wanted: str, schema: Any, root: Any, path: str) -> Iterator[str]:
    yield from faults(value, root["$defs"][wanted.removeprefix("#/$defs/")], root, path)


def _type(value: Any, wanted: str, schema: Any, root: Any, path: str) -> Iterator[str]:
    if not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean"):  # type: ignore[arg-type]
        yield f"{path}: no {wanted}: {value!r}"


def _properties(value: Any, wanted: dict[str, Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    for name, inner in wanted.items():
        if isinstance(value, dict) and name in value:
            yield from faults(value[name], inner, root, f"{path}.{name}")


def _matching(value: Any, wanted: dict[str, Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    for pattern, inner in wanted.items():
        for name in value if isinstance(value, dict) else ():
            if re.search(pattern, name):
                yield from faults(value[name], inner, root, f"{path}.{name}")


def _others(value: Any, wanted: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    for name in set(value if isinstance(value, dict) else ()) - set(schema.get("properties", ())):
        if wanted is False:
            yield f"{path}: unknown {name}"
        else:
            yield from faults(value[name], wanted, root, f"{path}.{name}")


def _members(value: Any, wanted: list[Any], root: Any, path: str) -> int:
    return sum(not list(faults(value, member, root, path)) for member in wanted)


def _any_of(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    if not _members(value, wanted, root, path):
        yield f"{path}: none of {len(wanted)} members: {value!r:.80}"


def _one_of(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    if _members(value, wanted, root, path) != 1:
        yield f"{path}: not exactly one of {len(wanted)} members: {value!r:.80}"


def _items(value: Any, wanted: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    first = len(schema.get("prefixItems", ()))
    for number, item in enumerate(value[first:] if isinstance(value, list) else ()):
        yield from faults(item, wanted, root, f"{path}[{first + number}]")


def _first_items(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    for number, (item, inner) in enumerate(zip(value if isinstance(value, list) else (), wanted, strict=False)):
        yield from faults(item, inner, root, f"{path}[{number}]")


def _simple(holds: Any, kinds: tuple[type, ...]) -> Any:
    def check(value: Any, wanted: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
        if isinstance(value, kinds) and not holds(value, wanted):
            yield f"{path}: {value!r:.80} against {wanted!r:.80}"

    return check


_CHECKS: dict[str, Any] = {
    "$ref": _reference,
    "type": _type,
    "properties": _properties,
    "patternProperties": _matching,
    "additionalProperties": _others,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "items": _items,
    "prefixItems": _first_items,
    "required": _simple(lambda value, wanted: set(wanted) <= set(value), (dict,)),
    "const": _simple(lambda value, wanted: value == wanted, (object,)),
    "enum": _simple(lambda value, wanted: value in wanted, (object,)),
    "pattern": _simple(lambda value, wanted: re.search(wanted, value), (str,)),
    "minLength": _simple(lambda value, wanted: len(value) >= wanted, (str,)),
    "maxLength": _simple(lambda value, wanted: len(value) <= wanted, (str,)),
    "minItems": _simple(lambda value, wanted: len(value) >= wanted, (list,)),
    "maxItems": _simple(lambda value, wanted: len(value) <= wanted, (list,)),
    "minProperties": _simple(lambda value, wanted: len(value) >= wanted, (dict,)),
    "maxProperties": _simple(lambda value, wanted: len(value) <= wanted, (dict,)),
    "minimum": _simple(lambda value, wanted: value >= wanted, (int, float)),
    "maximum": _simple(lambda value, wanted: value <= wanted, (int, float)),
    "exclusiveMinimum": _simple(lambda value, wanted: value > wanted, (int, float)),
    "exclusiveMaximum": _simple(lambda value, wanted: value < wanted, (int, float)),
    "propertyNames": lambda value, wanted, schema, root, path: (
        fault for name in value for fault in faults(name, wanted, root, f"{path} key")
    ),
}
