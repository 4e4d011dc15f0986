"""What pydantic found wrong, in words that point into the file: line, field path, expected, found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sparsekv.plans.errors import PlanError
from sparsekv.plans.parts import SHA256, FieldError, Part, Where
from sparsekv.plans.yaml_tree import Path, Tree

_SHOWN = 5
_EXPECTED = {
    "missing": "expected this field, found none",
    "union_tag_not_found": "expected the field `pattern`, found none",
    "finite_number": "expected a finite number",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
}
_SILENT = ("missing", "union_tag_not_found", "value_error")


def plan_error(error: ValidationError, tree: Tree) -> PlanError:
    """The error a user sees for a file whose data does not make a plan."""
    places = _places(error.errors(include_url=False), tree.data)
    lines = [
        f"{tree.source}, line {tree.line(path)}: {_name(path)}{_joined(details)}"
        for path, details in islice(places.items(), _SHOWN)
    ]
    if len(places) > _SHOWN:
        lines.append(f"and {len(places) - _SHOWN} more.")
    return PlanError("\n".join([*lines, "Correct the file; `sparsekv schema` prints what a plan may hold."]))


def _places(details: Sequence[ErrorDetails], data: Any) -> dict[Path, list[ErrorDetails]]:
    """What is wrong at each place. Of the members of a union, those that got deepest into the data speak."""
    together: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        cause = _cause(detail)
        steps = (*detail["loc"], *(cause.path if isinstance(cause, FieldError) else ()))
        path = _locate(steps, data, detail["type"] in ("missing", "extra_forbidden"))
        together.setdefault(path, []).append(detail)
    around = {path[:depth] for path in together for depth in range(len(path))}
    return {path: found for path, found in together.items() if path not in around}


def _cause(detail: ErrorDetails) -> Exception | None:
    cause: Exception | None = detail.get("ctx", {}).get("error")
    return cause


def _locate(steps: Sequence[Where], data: Any, names_a_field: bool) -> Path:
    """The path of `steps` in the data, without the union members and flattened records that pydantic counts in."""
    path: list[str | int] = []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        found = _find(step, data)
        if found is None or _is_flattened(data[found], steps[number + 1 :], data, names_a_field):
            if last and names_a_field and isinstance(step, str):
                path.append(step)
            continue
        path.append(found)
        data = data[found]
    return tuple(path)


def _is_flattened(value: Any, rest: Sequence[Where], data: Any, names_a_field: bool) -> bool:
    """Whether the steps go on beside `value`, as those of a head group's pattern do, and not inside it."""
    is_leaf = bool(rest) and not isinstance(value, dict | list)
    return is_leaf and (names_a_field or any(_find(step, data) is not None for step in rest))


def _find(step: Where, data: Any) -> Any:
    if isinstance(data, list):
        if callable(step):
            return next((number for number, item in enumerate(data) if step(item)), None)
        return step if isinstance(step, int) and step < len(data) else None
    return str(step) if isinstance(data, dict) and str(step) in data else None


def _message(detail: ErrorDetails) -> str:
    kind, context, cause = detail["type"], detail.get("ctx", {}), _cause(detail)
    if cause is not None:
        return str(cause)
    if kind == "extra_forbidden":
        return f"unknown field{_suggestion(str(detail['loc'][-1]))}"
    if kind == "union_tag_invalid":
        return f"expected pattern {context['expected_tags']}, found {context['tag']!r:.60}"
    expected = _EXPECTED.get(kind) or _expected(detail)
    return expected if kind in _SILENT else f"{expected}, found {detail['input']!r:.60}"


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] == "string_pattern_mismatch":
        digest = detail.get("ctx", {}).get("pattern") == SHA256
        return "expected sha256: and 64 hexadecimal digits" if digest else "expected text without control characters"
    message = detail["msg"].replace("Input should be", "expected").replace("a valid ", "a ")
    return message.replace("a integer", "an integer")


def _suggestion(name: str) -> str:
    known = set(_field_names(Part))
    if name in known:
        return "; that field belongs to another record"
    near = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else "; only `extensions` may hold fields of your own"


def _field_names(part: type[Part]) -> Iterator[str]:
    for child in part.__subclasses__():
        yield from child.model_fields
        yield from _field_names(child)


def _joined(details: Sequence[ErrorDetails]) -> str:
    messages = list(dict.fromkeys(map(_message, details)))
    if len(messages) == 1:
        return messages[0]
    wanted = [message.partition(", found ")[0].removeprefix("expected ") for message in messages]
    found = next((found for m in messages if (found := m.partition(", found ")[2])), "another value")
    return f"expected {' or '.join(wanted)}, found {found}"


def printable(text: str) -> str:
    """`text` as it is, or escaped where it would do more to a terminal than print."""
    return text if text.isprintable() else ascii(text)


def _name(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{printable(step)}" for step in path)
    return f"{text[1:]:.200}: " if text else ""
