"""YAML for files that come from anywhere: text to data, faults in that data by line, data to text.

Read from parser events, so that depth and number of values are bounded before anything is built. Refused: duplicate
keys, anchors, aliases, tags, a second document, keys that are not plain text. Scalars follow YAML 1.2 (`no` is text,
1e-05 is a number). Written: the same data always gives the same bytes, blocks outside and one flow line for each small
record (a head group, a segment, a budget); every scalar reads back alike under YAML 1.1 and 1.2 (floats have a point,
text that could be anything else is quoted).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sparsekv.plans.errors import PlanError
from sparsekv.plans.patterns import GONE
from sparsekv.plans.types import SHA256, FieldError, Part, Where

MAX_DEPTH = 24
# What a file may hold: enough for 128 layers of 128 heads at ten lengths, little enough to be refused at once.
MAX_VALUES = 400_000  # outside head groups: mostly the counts of each head
MAX_GROUPS = 1 << 16
GROUP_VALUES = 40
_GROUP = frozenset(("layer", "heads", "pattern"))

Path = tuple[str | int, ...]

_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?((\.[0-9]|[0-9]{1,99}\.)[0-9]{0,99}([eE][-+]?[0-9]{1,9})?|[0-9]{1,99}[eE][-+]?[0-9]{1,9})", re.ASCII
)
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Tree:
    """The data of a file; `lines` has the line, counted from 1, of each key and list item."""

    data: Any
    lines: dict[Path, int]
    source: str

    def line(self, path: Path) -> int:
        """The line of `path`, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_tree(text: str, source: str) -> Tree:
    """The data in `text`; `source` names it in messages."""
    builder = _Builder(text, source)
    try:
        return Tree(builder.document(), builder.lines, source)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        at = (mark.line, mark.column) if mark else (0, 0)
        cut = "; the file ends there: it may be cut off, fetch or write it again" if at >= _end(text) else ""
        _refuse(source, at[0], f"expected YAML, found a fault: {error.problem or error.context}{cut}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: odd escapes, without libyaml
        raise PlanError(f"{source}: expected YAML in UTF-8, found {str(error).splitlines()[0]}") from None


def _end(text: str) -> tuple[int, int]:
    """Returns the line and column, counted from 0, behind the last character that is no space."""
    lines = text.rstrip().splitlines() or [""]
    return len(lines) - 1, len(lines[-1])


class _Builder:
    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self._scalars: dict[str, Any] = dict(_WORDS)
        self._next: Callable[[], Any]
        self._left, self._groups = MAX_VALUES, MAX_GROUPS
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            self._next = loader(text).get_event
        except (yaml.YAMLError, UnicodeError) as error:
            raise PlanError(f"{source}: expected YAML in UTF-8, found {str(error).splitlines()[0]}") from None

    def document(self) -> Any:
        self._next()
        if isinstance(self._next(), yaml.StreamEndEvent):
            raise PlanError(f"{self.source}: expected a plan, found nothing in it")
        data = self._value(self._next(), ())
        self._next()
        after: Any = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            self._refuse(after, "expected one document, found a second")
        return data

    def _value(self, event: Any, path: Path) -> Any:
        self._admit(event, path)
        kind = type(event)
        if kind is yaml.ScalarEvent:
            return self._plain(event.value) if event.implicit[0] else event.value
        return self._mapping(path) if kind is yaml.MappingStartEvent else self._sequence(path)

    def _admit(self, event: Any, path: Path) -> None:
        self._left -= 1
        if type(event) is yaml.AliasEvent or event.anchor is not None:
            self._refuse(event, "expected plain values, found an anchor or alias; write the value out")
        if event.tag is not None:
            self._refuse(event, "expected plain values, found a tag; remove it")
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"expected at most {MAX_DEPTH} levels of nesting, found more")
        if self._left < 0:
            bound = f"{MAX_VALUES:,} values, and {GROUP_VALUES} for each of {MAX_GROUPS:,} head groups"
            self._refuse(event, f"expected at most {bound}, found more")

    def _mapping(self, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        while type(key := self._next()) is not yaml.MappingEndEvent:
            name = self._key(key, data)
            here = (*path, name)
            self.lines[here] = key.start_mark.line + 1
            data[name] = self._value(self._next(), here)
        return data

    def _key(self, event: Any, data: dict[str, Any]) -> str:
        if type(event) is not yaml.ScalarEvent or event.tag is not None or event.anchor is not None:
            self._refuse(event, "expected text as a key, found a list, mapping, alias, anchor or tag")
        name: str = event.value
        if name in data:
            self._refuse(event, "expected each key once, found this one again; remove one of the two")
        return name

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        may_hold_groups = path[:2] == ("prefill", "lengths") and path[3:] == ("heads",)
        while type(item := self._next()) is not yaml.SequenceEndEvent:
            here = (*path, len(items))
            self.lines[here] = item.start_mark.line + 1
            before = self._left
            items.append(self._value(item, here))
            if may_hold_groups and self._groups and isinstance(items[-1], dict) and items[-1].keys() >= _GROUP:
                self._groups -= 1
                self._left += min(GROUP_VALUES, before - self._left)
        return items

    def _plain(self, text: str) -> Any:
        if text not in self._scalars:
            self._scalars[text] = _scalar(text)
        return self._scalars[text]

    def _refuse(self, event: Any, message: str) -> NoReturn:
        _refuse(self.source, event.start_mark.line, message)


def _refuse(source: str, line: int, message: str) -> NoReturn:
    raise PlanError(f"{source}, line {line + 1}: {message}") from None


def _scalar(text: str) -> int | float | str:
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text


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
_ADVICE = (
    "Correct the file, or compile the plan again: `sparsekv plan MODEL -o FILE`; `sparsekv schema` prints what a plan "
    "may hold."
)
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
    return PlanError("\n".join([*lines, _ADVICE]))


def _places(details: Sequence[ErrorDetails], data: Any) -> dict[Path, list[ErrorDetails]]:
    """The faults at each place. Of a union, the members that got deepest into the data count."""
    together: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        cause = _cause(detail)
        steps = (*detail["loc"], *(cause.path if isinstance(cause, FieldError) else ()))
        path = _locate(steps, data, detail["type"] in ("missing", "extra_forbidden"))
        together.setdefault(path, []).append(detail)
    around = {path[:depth] for path in together for depth in range(len(path))}
    return {path: found for path, found in together.items() if path not in around}


def _cause(detail: ErrorDetails) -> Any:
    return detail.get("ctx", {}).get("error")


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
    """True where the steps go on beside `value`, as those of a head group's pattern do, and not inside it."""
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
        if last := GONE.get(context["tag"]):
            return f"pattern {context['tag']!r} is gone: sparsekv {last} was the last to run it"
        return f"expected pattern {context['expected_tags']}, found {context['tag']!r:.60}"
    if kind == "string_pattern_mismatch":
        digest = context.get("pattern") == SHA256
        expected = (
            "expected sha256: and 64 hexadecimal digits, or sha256-2: with 64 and 16 of them"
            if digest
            else "expected text without control characters"
        )
    else:
        message = detail["msg"].replace("Input should be", "expected").replace("a valid ", "a ")
        expected = _EXPECTED.get(kind, message.replace("a integer", "an integer"))
    return expected if kind in _SILENT else f"{expected}, found {detail['input']!r:.60}"


def _suggestion(name: str) -> str:
    known = set(_plan_fields(Part))
    if name in known:
        return "; that field belongs to another record"
    near = next(iter(get_close_matches(name, sorted(known), n=1)), None)
    return f"; did you mean `{near}`?" if near else "; only `extensions` may hold fields of your own"


def _plan_fields(part: type[Part]) -> Iterator[str]:
    plans = Part.__module__.rpartition(".")[0]  # other packages have records of their own, in whatever is loaded
    parts = (child for child in part.__subclasses__() if child.__module__.startswith(f"{plans}."))
    return chain.from_iterable((*child.model_fields, *_plan_fields(child)) for child in parts)


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


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*", re.ASCII)
_AMBIGUOUS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_INLINE = 100


def to_yaml(data: dict[str, Any]) -> str:
    before = (yaml.StreamStartEvent(), yaml.DocumentStartEvent(explicit=False))
    after = (yaml.DocumentEndEvent(explicit=False), yaml.StreamEndEvent())
    events = chain(before, _events(data, flow=False), after)
    text: str = yaml.emit(events, Dumper=_Emitter, allow_unicode=True, width=1 << 30)
    return text


class _Emitter(yaml.SafeDumper):
    """Never the emitter of libyaml, which is faster but lays out some text differently, and is not everywhere."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists stand further in than their key


def _events(value: Any, flow: bool) -> Iterator[yaml.Event]:
    if isinstance(value, dict):
        yield yaml.MappingStartEvent(None, None, True, flow_style=flow)
        for key, item in value.items():
            yield _scalar_event(key)
            yield from _events(item, flow or _fits_a_line(item))
        yield yaml.MappingEndEvent()
    elif isinstance(value, list):
        yield yaml.SequenceStartEvent(None, None, True, flow_style=flow)
        for item in value:
            yield from _events(item, flow or not _holds_records(item))
        yield yaml.SequenceEndEvent()
    else:
        yield _scalar_event(value)


def _scalar_event(value: Any) -> yaml.Event:
    if isinstance(value, str):
        plain = bool(_PLAIN.fullmatch(value)) and value.lower() not in _AMBIGUOUS
        return yaml.ScalarEvent(None, None, (plain, True), value, style=None if plain else '"')
    text = json.dumps(value)
    if isinstance(value, float) and "." not in text:
        text = text.replace("e", ".0e")
    return yaml.ScalarEvent(None, None, (True, True), text)


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _holds_records(value: Any) -> bool:
    is_list = isinstance(value, list)
    return any((is_list and isinstance(item, dict)) or _holds_records(item) for item in _items(value))


def _fits_a_line(value: Any) -> bool:
    small = isinstance(value, list) or (_height(value) <= 2 and len(str(value)) <= _INLINE)
    return isinstance(value, dict | list) and small and not _holds_records(value)


def _height(value: Any) -> int:
    return 1 + max(map(_height, _items(value)), default=0) if isinstance(value, dict | list) else 0
