"""Very long prompts, where dense takes minutes: ways are compared on a part, and the fastest alone runs on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sparsekv.planner.bench.timing import in_short

Found = TypeVar("Found")

RANKED_FROM = 256 << 10  # tokens
_PARTS = 4


def part_of(length: int) -> int:
    """Tokens of the part that ways are compared on."""
    return length // _PARTS


def fastest_that_runs(
    part_ms: Mapping[str, float], length: int, run: Callable[[str], Found]
) -> tuple[dict[str, Found], dict[str, str]]:
    """Runs the way that took least on the part, or the next where it does not run on the whole.

    Args:
        part_ms: milliseconds of every way that ran on the part.
        length: tokens of the whole prompt.
        run: one way on the whole; raises what its library raises.

    Returns:
        What the one that ran gave, by its name, if any did; and why each of the others is not there.
    """
    order = sorted(part_ms, key=lambda name: part_ms[name])
    refused = {
        name: f"{part_ms[name] / part_ms[order[0]]:.2f} times the time of {order[0]} at {part_of(length)} tokens"
        for name in order
    }
    for name in order:
        try:
            found = run(name)
        except Exception as error:
            refused[name] = in_short(error)
        else:
            del refused[name]
            return {name: found}, refused
    return {}, refused
