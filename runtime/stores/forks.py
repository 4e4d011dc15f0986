"""Which first tokens of the rows of a store are the same because one row became a copy of another, as beams do: they
need not be copied again.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Forks:
    """Of rows that begin as strangers."""

    def __init__(self) -> None:
        self._same_BB: torch.Tensor | None = None  # int64 on the host: first tokens of two rows that are the same

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], slice]:
        """Row i becomes a copy of row `rows[i]`, all of them at once.

        Args:
            rows: as many as there are.
            lengths: tokens of the rows as they were.

        Returns:
            The rows that change, and which of their tokens have to be copied.
        """
        if self._same_BB is None:
            self._same_BB = torch.zeros((len(rows), len(rows)), dtype=torch.int64, device="cpu")
        self._same_BB.diagonal().copy_(torch.tensor(lengths, device="cpu"))
        index_B, changed = torch.tensor(rows, device="cpu"), [row for row, source in enumerate(rows) if row != source]
        begin = min((int(self._same_BB[row, rows[row]]) for row in changed), default=0)
        end = max((lengths[rows[row]] for row in changed), default=0)
        self._same_BB = self._same_BB[index_B][:, index_B]
        return changed, slice(begin, max(begin, end))

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rows have only so many tokens left; other ones may follow."""
        if not any(lengths):
            self._same_BB = None
        elif self._same_BB is not None:
            left_B = torch.tensor(lengths, device="cpu")
            self._same_BB = torch.minimum(self._same_BB, torch.minimum(left_B[:, None], left_B))
