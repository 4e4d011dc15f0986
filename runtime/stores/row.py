"""One row of a device store as a store of a batch of one: how rows of different lengths are filled one by one.

Shapes: B batch, G KV heads, S tokens, C allocated tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.store import Layout, check_tokens_fit


class RowStore:
    """A row of `whole`: what is added here is there.

    Args:
        whole: of all rows; may be empty.
        row: which one.
        batch: rows that it has, or will have.
    """

    def __init__(self, whole: DeviceStore, row: int, batch: int) -> None:
        self.bytes = whole.bytes
        self._whole = whole
        self._row = row
        self._batch = batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the row."""
        return (self._whole.lengths[self._row] if self._whole.lengths else 0,)

    @property
    def cached(self) -> tuple[int, ...]:
        """All tokens."""
        return self.lengths

    def append(self, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor) -> None:
        """Copies the new tokens behind the old ones. Raises ShapeError when they do not fit."""
        check_tokens_fit(None, k_1GSD, v_1GSD)
        room_1GSD = self.room(k_1GSD.shape[2], Layout.of(k_1GSD))
        for there_1GSD, new_1GSD in zip(room_1GSD, (k_1GSD, v_1GSD), strict=True):
            there_1GSD.copy_(new_1GSD.detach())
        self.commit(k_1GSD, v_1GSD)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory behind the row's tokens. Raises ShapeError when the layout does not fit."""
        (length,) = self.lengths
        self._whole.hold(length + tokens, replace(layout, batch=layout.batch * self._batch), self._row)
        k_1GCD, v_1GCD = self._memory
        return k_1GCD.narrow(2, length, tokens), v_1GCD.narrow(2, length, tokens)

    def commit(self, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor) -> None:
        """Counts the tokens written."""
        self.truncate((self.lengths[0] + k_1GSD.shape[2],))

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Nothing to do: room is made for all rows together."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Counts so many tokens of the row."""
        whole = list(self._whole.lengths or (0,) * self._batch)
        (whole[self._row],) = lengths
        self._whole.truncate(whole)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens, and the memory behind them, without a copy."""
        return KeyView(*self._memory, lengths_B)

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """All tokens, without a copy."""
        return self.view(lengths_B), selection, window

    @property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, G, C, D] each."""
        k_BGCD, v_BGCD = self._whole.tensors
        return k_BGCD[self._row : self._row + 1], v_BGCD[self._row : self._row + 1]
