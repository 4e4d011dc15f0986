"""Lengths as people write them: `32k` is 32,768 tokens, `1m` is 1,048,576."""

from __future__ import annotations

import re

from sparsekv.plans.errors import UsageError

MAX_LENGTH = 1 << 40
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_LENGTH = re.compile(r"([0-9]{1,13})([kKmM]?)", re.ASCII)


def parse_length(text: str) -> int:
    """The number of tokens that `text` means.

    Raises:
        UsageError: it is not a positive whole number with at most one of the suffixes `k` and `m`.
    """
    match = _LENGTH.fullmatch(text.strip())
    length = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 0 < length <= MAX_LENGTH:
        raise UsageError(f"expected a length such as 8192, 32k (32,768 tokens) or 1m (1,048,576), found {text!r:.40}")
    return length


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths separated by commas, ascending, each once.

    Raises:
        UsageError: one of them is not a length.
    """
    return tuple(sorted({parse_length(part) for part in text.split(",")}))


def format_length(length: int) -> str:
    """The shortest form that `parse_length` reads back as `length`."""
    for unit in ("m", "k"):
        if length > 0 and length % _UNITS[unit] == 0:
            return f"{length // _UNITS[unit]}{unit}"
    return str(length)
