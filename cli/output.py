"""Data goes to standard output, everything said about it to standard error."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any


def prepare_streams() -> None:
    """Makes the standard streams fit for anything: a closed one leads nowhere, and no text is too strange to print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: file names need not be text


def tell(message: str) -> None:
    """Says something to the user, on standard error."""
    print(message, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Writes data, on standard output."""
    print(text)


def emit_json(data: Any) -> None:
    """Writes data as JSON; numbers that JSON does not know become null."""
    narrow = "utf" not in (sys.stdout.encoding or "").lower()
    print(json.dumps(_finite(data), indent=2, ensure_ascii=narrow, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of equal length as text; the columns in `right` are aligned to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def size(count: int) -> str:
    """Bytes for people: 12.3 MB."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
