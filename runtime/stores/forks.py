"""Knows which first tokens of the rows of a store are the same because one row became a copy of another, as beams do:
they need not be copied again.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Forks:
    """Knows which rows are copies; they begin as strangers."""

    def __init__(self) -> None:
        self._same_BB: torch.Tensor | None = None  # int64 on the host: first tokens of two rows that are the same

    @property
    def any(self) -> bool:
        """Returns whether some row may have tokens of another one."""
        return self._same_BB is not None

    def same_as(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Returns how many first tokens of each row are those of row `rows[i]`; lengths are tokens of the rows."""
        if len(rows) != len(lengths):
            return [0] * len(rows)
        return [
            lengths[row] if row == source else 0 if self._same_BB is None else int(self._same_BB[row, source])
            for row, source in enumerate(rows)
        ]

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, all of them at once; lengths are tokens of the rows as they were."""
        if self._same_BB is None:
            self._same_BB = torch.zeros((len(lengths), len(lengths)), dtype=torch.int64, device="cpu")
        self._same_BB.diagonal().copy_(torch.tensor(lengths, device="cpu"))
        index_B = torch.tensor(rows, device="cpu")
        self._same_BB = self._same_BB[index_B][:, index_B]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rows have only so many tokens left; other ones may follow."""
        if not any(lengths):
            self._same_BB = None
        elif self._same_BB is not None:
            left_B = torch.tensor(lengths, device="cpu")
            self._same_BB = torch.minimum(self._same_BB, torch.minimum(left_B[:, None], left_B))
