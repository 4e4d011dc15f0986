"""What pydantic found wrong, in words that point into the file: line, field path, expected, found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
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


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file."""

    path: Path
    message: str


def plan_error(error: ValidationError, tree: Tree) -> PlanError:
    """The error a user sees for a file whose data does not make a plan."""
    problems = _distinct([_problem(detail, tree.data) for detail in error.errors(include_url=False)])
    lines = [f"{tree.source}, line {tree.line(p.path)}: {_name(p.path)}{p.message}" for p in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more.")
    return PlanError("\n".join([*lines, "Correct the file; `sparsekv schema` prints what a plan may hold."]))


def _problem(detail: ErrorDetails, data: Any) -> Problem:
    cause = detail.get("ctx", {}).get("error")
    steps: Sequence[Where] = detail["loc"]
    if isinstance(cause, FieldError):
        steps = (*steps, *cause.path)
    return Problem(_locate(steps, data, detail["type"] in ("missing", "extra_forbidden")), _message(detail, cause))


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
    if isinstance(step, tuple):
        name, wanted = step
        items = enumerate(data) if isinstance(data, list) else ()
        return next((n for n, item in items if isinstance(item, dict) and item.get(name) == wanted), None)
    if isinstance(data, list):
        return step if isinstance(step, int) and step < len(data) else None
    return str(step) if isinstance(data, dict) and str(step) in data else None


def _message(detail: ErrorDetails, cause: Exception | None) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
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
    near = get_close_matches(name, sorted(set(_field_names(Part))), n=1)
    return f"; did you mean `{near[0]}`?" if near else "; only `extensions` may hold fields of your own"


def _field_names(part: type[Part]) -> Iterator[str]:
    for child in part.__subclasses__():
        yield from child.model_fields
        yield from _field_names(child)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """One problem a place: of a union's members the one that got deepest, or all that failed at once."""
    deepest = [p for p in problems if not any(_inside(other.path, p.path) for other in problems)]
    together: dict[Path, list[str]] = {}
    for problem in deepest:
        together.setdefault(problem.path, []).append(problem.message)
    return [Problem(path, _joined(list(dict.fromkeys(messages)))) for path, messages in together.items()]


def _joined(messages: list[str]) -> str:
    if len(messages) == 1:
        return messages[0]
    wanted = [message.partition(", found ")[0].removeprefix("expected ") for message in messages]
    found = next((found for m in messages if (found := m.partition(", found ")[2])), "another value")
    return f"expected {' or '.join(wanted)}, found {found}"


def _inside(path: Path, outer: Path) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _name(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return f"{text[1:]:.200}: " if text else ""
