"""A file of another tool, read within bounds: JSON, an array of NumPy, or text; and the parts of a plan that a format
leaves out."""

from __future__ import annotations

import ast
import json
import math
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from sparsekv.plans.errors import PlanError
from sparsekv.plans.phases import DecodePlan, IndexSharing, PrefillPlan
from sparsekv.plans.schema import Plan

MAX_BYTES = 16 << 20  # the largest published one has half a megabyte
_NUMBER = re.compile("[0-9]{1,8}")
_MAGIC = b"\x93NUMPY"
_INTEGERS = {"<i2": "h", "<i4": "i", "<i8": "q", "|i1": "b", "|u1": "B", "<u2": "H", "<u4": "I", "<u8": "Q"}


@dataclass(frozen=True)
class Source:
    name: str
    data: bytes

    @cached_property
    def json(self) -> Any:
        """Its content; None where it is no JSON."""
        try:
            return json.loads(self.data.decode("utf-8-sig"), parse_constant=_refused)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def text(self) -> str:
        """Its text without blanks around it; empty where it is none."""
        try:
            return self.data.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            return ""

    @cached_property
    def table(self) -> tuple[tuple[int, ...], ...] | None:
        """The rows of a two-dimensional array of whole numbers (.npy); None where it is no such array."""
        if not self.data.startswith(_MAGIC) or len(self.data) < 12:
            return None
        try:
            start, size = (10, 2) if self.data[6] == 1 else (12, 4)
            end = start + int.from_bytes(self.data[start - size : start], "little")
            with warnings.catch_warnings(action="ignore"):  # of what looks like numbers
                header = ast.literal_eval(self.data[start : min(end, start + 4096)].decode("latin-1").strip())
            rows, columns = header["shape"]
            kind, by_column = _INTEGERS[header["descr"]], header["fortran_order"]
            values = struct.unpack_from(f"<{self._count(rows, columns, kind, end)}{kind}", self.data, end)
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError, struct.error):
            return None
        if by_column:
            return tuple(values[row::rows] for row in range(rows))
        return tuple(values[row * columns : (row + 1) * columns] for row in range(rows))

    def _count(self, rows: int, columns: int, kind: str, start: int) -> int:
        """The count of numbers, if the header has the same."""
        count = math.prod((rows, columns))
        if min(rows, columns) < 1 or count * struct.calcsize(kind) != len(self.data) - start:
            raise ValueError
        return count


def _refused(name: str) -> NoReturn:
    raise ValueError(name)


@dataclass(frozen=True)
class Imported:
    """The content of a file as phases of a plan; `notes` tell what it lacks, and where that was taken from."""

    prefill: PrefillPlan | None = None
    decode: DecodePlan | None = None
    index_sharing: IndexSharing | None = None
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Exported:
    """A plan in another format; `lost` names what the format cannot hold, a line each."""

    data: bytes
    lost: Sequence[str] = field(default_factory=tuple)


def whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 24:
        raise PlanError(f"expected a whole number as {what}, found {value!r:.60}; correct the file")
    return value


def layers_of(value: Any, what: str) -> tuple[int, ...]:
    """Layers as a list, or as text such as "0,2,8"."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise PlanError(f'expected layers such as "0,2,8" as {what}, found {value!r:.60}; correct the file')
    found = [int(part) if isinstance(part, str) and _NUMBER.fullmatch(part.strip()) else part for part in parts]
    layers = tuple(whole(one, what) for one in found)
    if not layers or list(layers) != sorted(set(layers)):
        raise PlanError(f"expected ascending layers as {what}, found {value!r:.60}; correct the file")
    return layers


def as_json(data: Any) -> bytes:
    """Indented, with a newline at the end."""
    return (json.dumps(data, indent=1) + "\n").encode()


_PHASES = {
    "prefill": "the prefill phase",
    "decode": "the decode phase",
    "kv_cache": "KV cache eviction: all tokens stay cached",
}
_KNOWN = (
    "`status`, `targets`, `quality`, `cost`, `provenance`, `extensions`: what is known of the plan, where it has any"
)


def left_out(plan: Plan, *held: str) -> list[str]:
    """A line for each part of a plan that a format of some phases leaves out."""
    parts = (f"`{name}`: {what}" for name, what in _PHASES.items() if name not in held and getattr(plan, name))
    return [*parts, _KNOWN]
