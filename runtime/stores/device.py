"""A KV store in the memory of the compute device, contiguous.

Shapes: B batch, G KV heads, S tokens, C allocated tokens, D head size.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.stores.store import Layout, check_layout, check_rows, grown


class DeviceStore:
    """Keys and values side by side with their queries; views cost nothing."""

    def __init__(self) -> None:
        self._k_BGCD: torch.Tensor | None = None
        self._v_BGCD: torch.Tensor | None = None
        self._length = 0
        self._reserved = 0

    @property
    def length(self) -> int:
        """Tokens cached for each batch row."""
        return self._length

    @property
    def bytes_device(self) -> int:
        """Bytes allocated on the compute device."""
        return sum(buffer.untyped_storage().nbytes() for buffer in (self._k_BGCD, self._v_BGCD) if buffer is not None)

    @property
    def bytes_host(self) -> int:
        """None of it is elsewhere."""
        return 0

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Copies the new tokens behind the old ones. Raises ShapeError when they do not fit."""
        check_rows(self._k_BGCD, k_BGSD, v_BGSD)
        k_room, v_room = self.room(k_BGSD.shape[2], Layout.of(k_BGSD))
        k_room.copy_(k_BGSD.detach())
        v_room.copy_(v_BGSD.detach())
        self.commit(k_room, v_room)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory behind the cached tokens. Raises ShapeError when the layout does not fit."""
        check_layout(self._k_BGCD, layout)
        stop = self._length + tokens
        if self._k_BGCD is None or stop > self._k_BGCD.shape[2]:
            self._make_room(stop, layout)
        k_BGCD, v_BGCD = self._buffers()
        return k_BGCD[:, :, self._length : stop], v_BGCD[:, :, self._length : stop]

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Counts the tokens written."""
        self._length += k_BGSD.shape[2]

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Room for `tokens` in all; allocated now where the layout is known."""
        if self._length == 0:
            self._reserved = max(self._reserved, tokens)
        known = layout if self._k_BGCD is None else Layout.of(self._k_BGCD)
        if known is not None:
            self._make_room(max(tokens, self._reserved), known)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens, and the memory behind them, without a copy."""
        return KeyView(*self._buffers(), lengths_B)

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None
    ) -> tuple[KeyView, Selection]:
        """All tokens, without a copy: kernels read the selected ones where they lie."""
        return self.view(lengths_B), selection

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._k_BGCD is not None, "nothing was appended to this store yet"
        assert self._v_BGCD is not None
        return self._k_BGCD, self._v_BGCD

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def _make_room(self, needed: int, layout: Layout) -> None:
        capacity = 0 if self._k_BGCD is None else self._k_BGCD.shape[2]
        larger = grown(capacity, needed, self._reserved)
        if larger > capacity or self._k_BGCD is None:
            self._k_BGCD = self._moved(self._k_BGCD, layout.empty(larger))
            self._v_BGCD = self._moved(self._v_BGCD, layout.empty(larger))

    def _moved(self, old_BGCD: torch.Tensor | None, larger_BGCD: torch.Tensor) -> torch.Tensor:
        if old_BGCD is not None:
            larger_BGCD[:, :, : self._length].copy_(old_BGCD[:, :, : self._length])
        return larger_BGCD
