"""One segment of a decode plan, lowered: how its filter layer chooses tokens for its layers, at every length; and how
many tokens every row of a step chooses, and where its scores lie, on the device of the lengths.

Shapes: S segments, B batch, N buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from sparsekv.kernels.decode.selection import ALL
from sparsekv.plans.phases import DecodeBudget, Segment
from sparsekv.runtime.stores.host import Reads


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """The choice of tokens by one filter layer for the layers of its segment, at every length."""

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
        """The longest length up to which its bucket attends to everything at every length; 0 if none does."""
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
        """Tokens that one of its layers reads, with those whose keys it scores; see `Segment.read_tokens`."""
        segment = self.bucket(length)
        return length if segment is None else segment.read_tokens(self.filter if scores else -1, length)

    def all_whole(self, lengths: Sequence[int] | None) -> bool:
        """Returns whether all rows are known to attend to everything; None is lengths that the host does not know."""
        return lengths is not None and all(self.count(length) == ALL for length in lengths)

    @property
    def reads(self) -> Reads:
        budgets = tuple(bucket.budget for bucket in self.buckets if bucket is not None)
        return Reads(budgets, self.sink, self.recent, self.whole_up_to)


SCORE_BYTES = 512 << 20  # scratch for the logits of one filter layer

_LONGEST = 1 << 31
_EVERYTHING = DecodeBudget(fraction=1.0, at_most=1 << 40)


def scored_tokens(heads: int, scratch: torch.Tensor | None = None, lists: int = 0) -> int:
    """Tokens of all rows that a filter layer's scratch has room for: the host's, with the scores of its lists, if
    any."""
    return SCORE_BYTES // (4 * heads) if scratch is None else scratch.numel() // (heads + lists)


def counts_of(segment: SegmentProgram, lengths: Sequence[int]) -> list[int]:
    """`Budgets.of` for one segment, where the host knows the lengths."""
    room, end, counts = scored_tokens(segment.query_heads), 0, []
    for length in lengths:
        count = segment.count(length)
        end += 0 if count == ALL else length
        counts.append(count if end <= room else ALL)
    return counts


def chooses_from(segment: SegmentProgram) -> Iterator[int]:
    """Returns the fewest tokens of a row that chooses, by bucket; more than the bucket holds where no row does."""
    for shortest, longest in pairwise((0, *segment.bounds, _LONGEST)):
        lengths = range(shortest + 1, longest + 1)
        yield lengths.start + bisect_left(lengths, True, key=lambda length: segment.count(length) != ALL)


class Budgets:
    """The budgets of all segments as tensors: small, made once, and read by every step.

    Args:
        segments: of one program, so that they share the bounds of their buckets.
        rooms: tokens that the scratch of each segment's filter layer has room for; see `scored_tokens`.
        device: of the lengths to come.
    """

    def __init__(self, segments: Sequence[SegmentProgram], rooms: Sequence[int], device: torch.device) -> None:
        budgets = [[bucket.budget if bucket else _EVERYTHING for bucket in segment.buckets] for segment in segments]
        self._bounds_N = torch.tensor(segments[0].bounds, dtype=torch.int32, device=device)
        self._most_SN = torch.tensor([[b.most for b in row] for row in budgets], device=device)
        self._share_SN = None
        if any(b.fraction is not None and b is not _EVERYTHING for row in budgets for b in row):
            share = [[1.0 if b.fraction is None else b.fraction for b in row] for row in budgets]
            self._share_SN = torch.tensor(share, dtype=torch.float64, device=device)
        edges = [segment.sink + segment.recent for segment in segments]
        self._edges_S = torch.tensor(edges, dtype=torch.int32, device=device)
        self._room_S = torch.tensor(rooms, dtype=torch.int64, device=device)

    def of(self, lengths_B: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen tokens of every row, or ALL, and where its scores begin, or -1: int32 [S, B] each. Scores of the rows
        that choose lie one behind the other; a row that would end beyond the scratch attends to everything. `backend`
        is that of the attention."""
        if lengths_B.is_cuda and backend != "reference":
            return self.by_kernel(lengths_B)
        return self.by_torch(lengths_B)

    def by_kernel(self, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from sparsekv.kernels.decode.radix import budgets

        found_2SB = budgets(lengths_B, self._bounds_N, self._most_SN, self._share_SN, self._edges_S, self._room_S)
        return found_2SB[0], found_2SB[1]

    def by_torch(self, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_SB, chooses_SB = self._wanted(lengths_B)
        ends_SB = (lengths_B * chooses_SB).cumsum(1)
        chooses_SB &= ends_SB <= self._room_S[:, None]
        starts_SB = torch.where(chooses_SB, ends_SB - lengths_B, -1)
        return torch.where(chooses_SB, chosen_SB, ALL).int(), starts_SB.int()

    def _wanted(self, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to choose, and whether a row chooses where the scratch has room: [S, B] each."""
        bucket_B = torch.bucketize(lengths_B, self._bounds_N)
        chosen_SB = self._most_SN[:, bucket_B]
        if self._share_SN is not None:  # rounded as budgets are
            share_SB = (self._share_SN[:, bucket_B] * lengths_B - 1e-9).ceil_().long()
            chosen_SB = torch.minimum(share_SB, chosen_SB)
        return chosen_SB, chosen_SB + self._edges_S[:, None] < lengths_B
