"""From which length on sparse pays, and which gain is one at all.

Between two profiled lengths A < B the patterns of B hold. Where they are not predicted to be faster than dense, dense
runs, even if the patterns of A paid at A: those were never measured on contexts longer than A, while patterns in
tokens lose nothing on shorter ones, and dense loses nothing anywhere. Whoever wants more buckets profiles more lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

# Predictions and timings differ by more than this: a smaller gain is none.
LEAST_GAIN = 0.02
_STEP = 256  # tokens; bounds of buckets are multiples of it
_TILE = 64  # rows of the smallest tile
_APART = 16  # lengths that are asked about first lie a sixteenth apart, or a step


def pays(sparse_us: float, dense_us: float) -> bool:
    """Whether a predicted time is worth leaving dense for."""
    return sparse_us < (1.0 - LEAST_GAIN) * dense_us


def longest_losing(pays_at: Callable[[int], bool], length: int, above: int = 0) -> int | None:
    """The longest length between `above` and `length` at which sparse does not pay; None if it pays all the way down.

    Everything from there down to `above` is dense, also where a shorter length would pay again. Lengths are asked
    about from the longest down, so that nothing hangs on predictions that rise with length; then between the first
    that loses and the one before it.

    Args:
        pays_at: whether the patterns of `length` are predicted to pay at a shorter one.
        length: the length that the patterns were profiled at.
        above: the profiled length before it; 0 for none.

    Returns:
        A multiple of 256 tokens.
    """
    paying = length
    for shorter in _descending(length, above):
        if not pays_at(shorter):
            return _refined(pays_at, shorter, paying)
        paying = shorter
    # Between `above` and the first multiple of 256, which is as fine as buckets are cut, all of it or nothing. Where a
    # tile ends, what dense costs has stood still for longest, and index building has not.
    ends = range((above // _TILE + 1) * _TILE, paying, _TILE)
    return paying if paying < length and not all(map(pays_at, (above + 1, *ends))) else None


def _descending(length: int, above: int) -> Iterator[int]:
    point = (length - 1) // _STEP * _STEP
    while point > above:
        yield point
        sixteenth = -(-point * (_APART - 1) // _APART // _STEP) * _STEP
        point = min(point - _STEP, sixteenth)


def _refined(pays_at: Callable[[int], bool], losing: int, paying: int) -> int:
    while paying - losing > _STEP:
        middle = (losing + paying) // 2 // _STEP * _STEP
        if pays_at(middle):
            paying = middle
        else:
            losing = middle
    return losing
