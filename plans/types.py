"""The parts of every record of a plan: the base class, number and text types, layer sets, lengths.

Records are frozen, refuse unknown fields, and take no value for another type: "1" is not 1, true is not 1.
Floats are rounded to six significant digits when they enter, so that memory and file hold the same value.
Lengths as people write them: `32k` is 32,768 tokens, `1m` is 1,048,576. Layer sets are written as `0-1,5`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
)

from sparsekv.plans.errors import UsageError

MAX_LENGTH = 1 << 40
LEAST_CHUNK = 16  # fewest tokens of a prompt that a prefill in pieces gives to a model at once
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_LENGTH = re.compile(r"([0-9]{1,13})([kKmM]?)", re.ASCII)


def parse_length(text: str) -> int:
    """The number of tokens that `text` means."""
    match = _LENGTH.fullmatch(text.strip())
    length = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 0 < length <= MAX_LENGTH:
        raise UsageError(f"expected a length such as 8192, 32k (32,768 tokens) or 1m (1,048,576), found {text!r:.40}")
    return length


def format_length(length: int) -> str:
    """The shortest form that `parse_length` reads back as `length`."""
    unit = next((unit for unit in ("m", "k") if length > 0 and length % _UNITS[unit] == 0), "")
    return f"{length // _UNITS[unit]}{unit}"


KVDtype = Literal["auto", "fp8"]
"""Precision of cached keys and values: the model's, or e4m3."""

MAX_ID = 1023  # more than any model has; bounds what a file can make a reader allocate
_RANGES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", re.ASCII)


@lru_cache(maxsize=4096)
def parse_ids(text: str) -> tuple[int, ...]:
    """The ids that `text` names, ascending: "0-1,5" gives (0, 1, 5)."""
    compact = text.replace(" ", "")
    if not _RANGES.fullmatch(compact):
        raise ValueError(f"expected ids such as 4, 0-31 or 0-1,5, found {text!r:.60}")
    ids: list[int] = []
    for part in compact.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] > MAX_ID:
            raise ValueError(f"expected ascending ranges of ids up to {MAX_ID}, found {part!r}")
        ids.extend(span)
        _check_once(ids)
    return tuple(sorted(ids))


def format_ids(ids: Iterable[int]) -> str:
    """The canonical text of a set of ids: (5, 0, 1) gives "0-1,5"."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in id_spans(ids))


def id_spans(ids: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of ids that follow one another, ascending: (5, 0, 1) gives [(0, 1), (5, 5)]."""
    ordered = enumerate(sorted(ids))
    spans = ([number for _, number in same] for _, same in groupby(ordered, key=lambda one: one[1] - one[0]))
    return [(span[0], span[-1]) for span in spans]


def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None where there is none."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def and_listed(values: Iterable[object]) -> str:
    """The text of a list for people: "1, 4 and 7"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of equal length as text; the columns in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def format_bytes(count: int) -> str:
    """Bytes for people: 12.3 MB."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _check_once(ids: Sequence[int]) -> None:
    if len(set(ids)) < len(ids):
        raise ValueError(f"expected each id once, found {next(one for one in sorted(ids) if ids.count(one) > 1)} twice")


def ids_of(value: Any) -> tuple[int, ...]:
    """The ids in any form that a plan may hold them in: text, one number, several numbers."""
    if isinstance(value, str):
        return parse_ids(value)
    ids = (value,) if type(value) is int else value
    # Numpy integers and the like are the caller's mistake: plans hold plain numbers only.
    if not isinstance(ids, tuple | list | range | frozenset | set) or not all(type(n) is int for n in ids):
        raise ValueError(f"expected ids such as 4, 0-31 or 0-1,5, found {value!r:.60}")
    if not ids or not 0 <= min(ids) <= max(ids) <= MAX_ID:
        raise ValueError(f"expected at least one id, all from 0 to {MAX_ID}, found {value!r:.60}")
    _check_once(tuple(ids))
    return tuple(sorted(ids))


LayerSet = Annotated[
    tuple[int, ...],
    BeforeValidator(
        ids_of,
        json_schema_input_type=Annotated[str, Field(pattern=r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$")]
        | Annotated[int, Field(ge=0)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)],
    ),
    PlainSerializer(format_ids, return_type=str),
]


MAX_JSON_DEPTH = 12
SHA256 = r"^sha256(-all)?:[0-9a-f]{64}$|^sha256-2:[0-9a-f]{64}:[0-9a-f]{16}$"

Key = TypeVar("Key", str, int)
Value = TypeVar("Value")
Where = str | int | Callable[[dict[str, Any]], bool]
"""One step of a field path: a key, a position, or what the item of a list that is meant looks like in the file."""


class FieldError(ValueError):
    """A contradiction inside a plan, with the path of the field that a user should look at."""

    def __init__(self, message: str, *path: Where) -> None:
        super().__init__(message)
        self.path = path


class Part(BaseModel):
    """Base of every record in a plan file. Fields whose default says "nothing" are left out when it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _without_empty_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if fields[key].is_required() or not _empty(value)}


def _empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list | dict | tuple) and not value)


def rounded(value: float, digits: int = 6) -> float:
    """`value` at so many significant digits, without a negative zero."""
    return float(f"{value:.{digits}g}") + 0.0


def in_order(value: Mapping[Key, Value]) -> dict[Key, Value]:
    """`value` with ascending keys, so that equal plans have equal bytes."""
    return {key: value[key] for key in sorted(value)}


def json_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as plain JSON data, keys in order."""
    return {key: _json(item, key, 1) for key, item in in_order(value).items()}


def _json(value: object, name: str, depth: int) -> Any:
    if depth > MAX_JSON_DEPTH:
        raise FieldError(f"expected at most {MAX_JSON_DEPTH} levels of nesting, found more", name)
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {utf8(key): _json(item, name, depth + 1) for key, item in in_order(value).items()}
    if isinstance(value, list | tuple):
        return [_json(item, name, depth + 1) for item in value]
    small = isinstance(value, int) and abs(value) < 1 << 63
    if value is None or small or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise FieldError(f"expected JSON data (finite numbers, string keys), found {value!r:.80}", name)


def canonical_json(data: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def utf8(value: str) -> str:
    """`value`, if it can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError(f"expected text that can be written as UTF-8, found {value!r:.80}") from None
    return value


def _exact_int(value: object) -> object:
    # A literal compares with ==, so that true and 1.0 would pass for 1.
    if type(value) is not int:
        raise ValueError(f"expected an integer, found {value!r:.40}")
    return value


def _length(value: object) -> object:
    if not isinstance(value, str) or value.isdigit():
        return value
    try:
        return parse_length(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


Natural = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=1 << 53)]
Index = Annotated[int, Field(strict=True, ge=0, le=MAX_ID)]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_ID + 1)]
Length = Annotated[
    int,
    Field(strict=True, ge=1, le=1 << 40),
    BeforeValidator(_length, json_schema_input_type=int | Annotated[str, Field(pattern="^[0-9]+[kKmM]$")]),
]
ExactInt = BeforeValidator(_exact_int)
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False), AfterValidator(rounded)]
NonNegative = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False), AfterValidator(rounded)]
Portion = Annotated[float, Field(strict=True, ge=0.0, le=1.0, allow_inf_nan=False), AfterValidator(rounded)]


Share = Annotated[float, Field(strict=True, gt=0.0, le=1.0, allow_inf_nan=False), AfterValidator(rounded)]
Text = Annotated[
    str,
    StringConstraints(strict=True, min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]*$"),
    AfterValidator(utf8),
]
Digest = Annotated[str, StringConstraints(strict=True, pattern=SHA256)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_object)]
