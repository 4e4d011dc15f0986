"""One segment of a decode plan, lowered: how its filter layer chooses tokens for its layers, at every length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsekv.kernels.decode.selection import ALL
from sparsekv.plans.phases import Segment
from sparsekv.runtime.stores.store import Reads


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Says how one filter layer chooses tokens for the layers of its segment, at every length."""

    filter: int
    sink: int
    recent: int
    selector: Literal["last", "uniform", "exponential"]
    queries: int  # of the newest ones, how many the selector looks at
    heads: Literal["max", "per_kv_head"]
    across_ranks: bool  # the heads of all ranks choose together
    bounds: tuple[int, ...]  # the longest length of every bucket but the last
    buckets: tuple[Segment | None, ...]  # the segment of every bucket; None attends to everything
    query_heads: int  # of the filter layer, on the rank
    lists: int  # that the filter layer chooses: one for all of the rank's KV heads, or one for each

    @property
    def most(self) -> int:
        """Tokens chosen at any length: what lists have room for."""
        return max(segment.budget.most for segment in self.buckets if segment is not None)

    @property
    def whole_up_to(self) -> int:
        """The longest length such that it, and every shorter one, is attended to as a whole by its bucket; 0 if none
        is."""
        sparse = next(at for at, segment in enumerate(self.buckets) if segment is not None)
        return self.bounds[sparse - 1] if sparse else 0

    def bucket(self, length: int) -> Segment | None:
        """The segment at `length` cached tokens; None attends to everything."""
        return self.buckets[bisect_left(self.bounds, length)]

    def count(self, length: int) -> int:
        """Tokens to choose among `length` cached ones, or ALL."""
        segment = self.bucket(length)
        chosen = None if segment is None else segment.chosen_tokens(length)
        return ALL if chosen is None else chosen

    def read_tokens(self, length: int, scores: bool) -> int:
        """Tokens that one of the layers reads where it attends to the choice, the filter layer with the keys that it
        scores; see `Segment.read_tokens`."""
        segment = self.bucket(length)
        return length if segment is None else segment.read_tokens(self.filter if scores else -1, length)

    def all_whole(self, lengths: Sequence[int] | None) -> bool:
        """Returns whether all rows are known to attend to everything; lengths that the host does not know are None."""
        return lengths is not None and all(self.count(length) == ALL for length in lengths)

    @property
    def reads(self) -> Reads:
        """Returns what its layers read of a long context."""
        budgets = tuple(bucket.budget for bucket in self.buckets if bucket is not None)
        return Reads(budgets, self.sink, self.recent, self.whole_up_to)
