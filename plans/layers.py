"""Sets of layers or heads, written as `0-1,5` and held as ascending tuples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

MAX_ID = 1023  # more than any model; small enough that no file makes a reader hold much
_RANGES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", re.ASCII)


@lru_cache(maxsize=4096)
def parse_ids(text: str) -> tuple[int, ...]:
    """The ids that `text` names, ascending: "0-1,5" gives (0, 1, 5).

    Raises:
        ValueError: it is no such list, a range runs backwards, or an id is named twice.
    """
    compact = text.replace(" ", "")
    if not _RANGES.fullmatch(compact):
        raise ValueError(f"expected ids such as 4, 0-31 or 0-1,5, found {text!r:.60}")
    ids: list[int] = []
    for part in compact.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] > MAX_ID:
            raise ValueError(f"expected ascending ranges of ids up to {MAX_ID}, found {part!r}")
        if len(ids) + len(span) > MAX_ID + 1:
            raise ValueError(f"expected each id once, found {text!r:.60}")
        ids.extend(span)
    return _ascending(ids)


def format_ids(ids: Iterable[int]) -> str:
    """The canonical text of a set of ids: (5, 0, 1) gives "0-1,5"."""
    spans: list[list[int]] = []
    for number in sorted(ids):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _ascending(ids: Iterable[int]) -> tuple[int, ...]:
    ordered = sorted(ids)
    twice = next((a for a, b in pairwise(ordered) if a == b), None)
    if twice is not None:
        raise ValueError(f"expected each id once, found {twice} twice")
    return tuple(ordered)


def ids_of(value: Any) -> tuple[int, ...]:
    """The ids in any form that a plan may hold them in: text, one number, several numbers.

    Raises:
        ValueError: it is none of these, is empty, or names an id twice.
    """
    if isinstance(value, str):
        return parse_ids(value)
    if type(value) is int:
        value = (value,)
    # Numpy integers and the like are the caller's mistake: plans hold plain numbers only.
    if not isinstance(value, tuple | list | range | frozenset | set) or not all(type(n) is int for n in value):
        raise ValueError(f"expected ids such as 4, 0-31 or 0-1,5, found {value!r:.60}")
    if not value:
        raise ValueError("expected at least one id, found none")
    if min(value) < 0 or max(value) > MAX_ID:
        raise ValueError(f"expected ids from 0 to {MAX_ID}, found {min(value)} to {max(value)}")
    return _ascending(value)


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
