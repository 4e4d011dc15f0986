"""The length below which dense is faster."""

from __future__ import annotations

from collections.abc import Callable

_SHORTEST = 256


def dense_below(is_faster: Callable[[int], bool], length: int) -> int | None:
    """The longest of length / 2, length / 4, ... at which sparse is predicted not to be faster; None if it is at all.

    Args:
        is_faster: whether sparse is predicted to beat dense at a length.
        length: the shortest length that was profiled.
    """
    shorter = length // 2
    while shorter >= _SHORTEST:
        if not is_faster(shorter):
            return shorter
        shorter //= 2
    return None
