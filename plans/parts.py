"""What every record of a plan is made of: the base class, number and text types, errors that know their field.

Records are frozen, refuse unknown fields, and take no value for another type: "1" is not 1, true is not 1.
Floats are rounded to six significant digits when they enter, so that what is in memory is what the file will say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
)

from sparsekv.plans.errors import UsageError
from sparsekv.plans.layers import MAX_ID
from sparsekv.plans.lengths import parse_length

MAX_JSON_DEPTH = 12
SHA256 = r"^sha256:[0-9a-f]{64}$"

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


def rounded(value: float) -> float:
    """`value` at six significant digits, without a negative zero."""
    return float(f"{value:.6g}") + 0.0


def in_order(value: Mapping[Key, Value]) -> dict[Key, Value]:
    """`value` with ascending keys, so that equal plans have equal bytes."""
    return {key: value[key] for key in sorted(value)}


def json_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as plain JSON data, keys in order.

    Raises:
        FieldError: it holds something JSON cannot: NaN, another type, a key that is no string, or too deep a nesting.
    """
    return {key: _json(item, key, 1) for key, item in in_order(value).items()}


def _json(value: object, name: str, depth: int) -> Any:
    if depth > MAX_JSON_DEPTH:
        raise FieldError(f"expected at most {MAX_JSON_DEPTH} levels of nesting, found more", name)
    if isinstance(value, str):
        return utf8(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {utf8(key): _json(item, name, depth + 1) for key, item in in_order(value).items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_json(item, name, depth + 1) for item in value]
    raise FieldError(f"expected JSON data (finite numbers, string keys), found {value!r:.80}", name)


def utf8(value: str) -> str:
    """`value`, if it can be written as UTF-8.

    Raises:
        FieldError: it holds half of a surrogate pair.
    """
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
Share = Annotated[float, Field(strict=True, gt=0.0, le=1.0, allow_inf_nan=False), AfterValidator(rounded)]
Text = Annotated[
    str,
    StringConstraints(strict=True, min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]*$"),
    AfterValidator(utf8),
]
Digest = Annotated[str, StringConstraints(strict=True, pattern=SHA256)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_object)]
