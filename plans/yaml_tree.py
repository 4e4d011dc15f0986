"""YAML text as plain data, for files that come from anywhere.

Built from parser events, so that depth and number of values are bounded before anything is held. Refused: duplicate
keys, anchors, aliases, tags, a second document, keys that are no plain text. Keys are held as text. Scalars follow
YAML 1.2 (`no` is text, 1e-05 is a number), which reads what the writer writes as YAML 1.1 does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from sparsekv.plans.errors import PlanError

MAX_DEPTH = 24
MAX_VALUES = 1_500_000

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
    """What a file says, and where: `lines` holds the line, counted from 1, of each key and list item."""

    data: Any
    lines: dict[Path, int]
    source: str

    def line(self, path: Path) -> int:
        """The line of `path`, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_tree(text: str, source: str) -> Tree:
    """The data in `text`; `source` names it in messages.

    Raises:
        PlanError: it is not YAML, or uses what is refused here.
    """
    builder = _Builder(text, source)
    try:
        return Tree(builder.document(), builder.lines, source)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        _refuse(source, mark.line if mark else 0, f"expected YAML, found a fault: {error.problem or error.context}")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: odd escapes, without libyaml
        raise PlanError(f"{source}: expected YAML in UTF-8, found {str(error).splitlines()[0]}") from None


class _Builder:
    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self._scalars: dict[str, Any] = dict(_WORDS)
        self._next: Callable[[], Any]
        self._left = MAX_VALUES
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
            self._refuse(event, f"expected plain values, found the tag {event.tag!r:.60}; remove it")
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"expected at most {MAX_DEPTH} levels of nesting, found more")
        if self._left < 0:
            self._refuse(event, f"expected at most {MAX_VALUES} values, found more")

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
            self._refuse(event, f"expected each key once, found {name!r:.60} again; remove one of the two")
        return name

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while type(item := self._next()) is not yaml.SequenceEndEvent:
            here = (*path, len(items))
            self.lines[here] = item.start_mark.line + 1
            items.append(self._value(item, here))
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
