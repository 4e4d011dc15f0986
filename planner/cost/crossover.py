"""Where sparse pays: from which length on, and for which heads, families and layers of a length.

Between two profiled lengths A < B the patterns of B hold. Where they are not predicted to be faster than dense, dense
runs, even if the patterns of A paid at A: those were never measured on contexts longer than A, while patterns in
tokens lose nothing on shorter ones, and dense loses nothing anywhere. Profiling more lengths gives more buckets.

Within a length (`Savings`), from the inside out. A head: do its tiles and its part of the index cost less than a dense
head of the same launch? A family in a layer: do its heads together save what its index launch costs? A layer: is
sparse attention with all its indices faster than the dense kernel?

Shapes: L profiled layers, C slots of candidates, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.predict import (
    DENSE,
    Choice,
    ScoreTables,
    families_of,
    head_times,
    layer_times,
)
from sparsekv.planner.options import Family
from sparsekv.plans.patterns import TileShape

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


Mask = npt.NDArray[np.bool_]


class Savings:
    """What sparse saves over dense at one length, on one device."""

    def __init__(self, cost: DeviceCost, tables: ScoreTables, tile: TileShape) -> None:
        self._cost, self._tables, self._tile = cost, tables, tile
        times = head_times(cost, tables, tile)
        self._saved_LCH = np.asarray(times.dense_us - times.sparse_LCH)

    def paying_candidates(self) -> Mask:
        """[L, C, H]: those that cost less than a dense head of the same launch."""
        return np.asarray(self._saved_LCH > 0.0)

    def losing_family(self, choice_H: Choice, row: int) -> Family | None:
        """The family of the profiled layer `row` whose heads save least against its index launch, if that is a loss."""
        families = dict(families_of(self._tables, row, choice_H))
        gain = {name: -self._cost.index_launch_us(name, self._tables.entry.length) for name in families.values()}
        for head, name in families.items():
            gain[name] += float(self._saved_LCH[row, choice_H[head], head])
        losing = [(us, name) for name, us in gain.items() if us <= 0.0]
        return min(losing)[1] if losing else None

    def without_losing_layers(self, choice: Choice) -> Choice:
        """The choice, with layers dense as a whole where sparse attention and index building would not pay."""
        times = layer_times(self._cost, self._tables, choice, self._tile)
        losing_L = np.array([not pays(*pair) for pair in zip(times.sparse_us, times.dense_us, strict=True)])
        return np.where(losing_L[:, None] & (choice >= 0), DENSE, choice)
