"""A KV store in the memory of the compute device, contiguous.

Shapes: B batch, G KV heads, S tokens, C allocated tokens, D head size.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.runtime.stores.base import Gathered, check_rows, grown


class DeviceStore:
    """Keys and values side by side with their queries; views cost nothing."""

    def __init__(self) -> None:
        self._k_BGCD: torch.Tensor | None = None
        self._v_BGCD: torch.Tensor | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens held for each batch row."""
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
        stop = self._length + k_BGSD.shape[2]
        self._k_BGCD = self._with_room(self._k_BGCD, k_BGSD, stop)
        self._v_BGCD = self._with_room(self._v_BGCD, v_BGSD, stop)
        self._k_BGCD[:, :, self._length : stop].copy_(k_BGSD.detach())
        self._v_BGCD[:, :, self._length : stop].copy_(v_BGSD.detach())
        self._length = stop

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, without a copy."""
        assert self._k_BGCD is not None, "a view of an empty store"
        assert self._v_BGCD is not None
        return self._k_BGCD[:, :, : self._length], self._v_BGCD[:, :, : self._length]

    def gather(self, rows: DecodeRows) -> Gathered:
        """All tokens, without a copy: kernels pick the rows where they lie."""
        return Gathered(*self.view(), rows)

    def _with_room(self, held: torch.Tensor | None, new_BGSD: torch.Tensor, needed: int) -> torch.Tensor:
        capacity = 0 if held is None else held.shape[2]
        if needed <= capacity:
            assert held is not None
            return held
        batch, heads, _, size = new_BGSD.shape
        larger = new_BGSD.new_empty((batch, heads, grown(capacity, needed), size), requires_grad=False)
        if held is not None:
            larger[:, :, : self._length].copy_(held[:, :, : self._length])
        return larger
