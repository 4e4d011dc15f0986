"""A KV store in the memory of the compute device, contiguous.

Shapes: B batch, G KV heads, S tokens, C allocated tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.plans.errors import ShapeError

# What a KV store offers. Stores know logical token positions and physical places, and no policy.
#
# Shapes: B batch, G KV heads, S tokens, N chosen tokens, D head size.

_LEAST_MARGIN, _MOST_MARGIN = 256, 65_536


@dataclass(frozen=True, slots=True)
class Layout:
    """What the tokens of a store look like."""

    batch: int
    heads: int  # KV heads
    size: int  # of a head
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k_BGSD: torch.Tensor) -> Layout:
        """That of these keys."""
        batch, heads, _, size = k_BGSD.shape
        return cls(batch, heads, size, k_BGSD.dtype, k_BGSD.device)

    def empty(self, tokens: int) -> torch.Tensor:
        """Room for the keys, or the values, of so many tokens: [B, G, S, D] on the device."""
        return torch.empty((self.batch, self.heads, tokens, self.size), dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys and values wherever the store found them best placed, and where in them the asked for rows lie."""

    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    rows: DecodeRows


class KVStore(Protocol):
    """Keys and values of one layer, of equally long batch rows."""

    @property
    def length(self) -> int:
        """Tokens held for each batch row."""

    @property
    def bytes_device(self) -> int:
        """Bytes allocated on the compute device."""

    @property
    def bytes_host(self) -> int:
        """Bytes allocated in host memory for what would otherwise be on the compute device."""

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds the tokens that follow those already held.

        Raises:
            ShapeError: batch, heads or head size differ from what is held.
        """

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the next tokens' keys and values can be written piece by piece: [B, G, tokens, D] each.

        They are not held before `commit`; another call of this store between the two makes the room invalid.

        Raises:
            ShapeError: the layout differs from that of what is held.
        """

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Holds what was written to `room`, whose two tensors these are."""

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Makes room for `tokens` in all, so that the store does not grow on the way there.

        The memory is allocated now if its layout is known: given, or that of what is held; else at the first append.
        An empty store takes exactly so much, one that holds tokens already may take more, as every growth copies.

        Raises:
            UsageError: host memory does not suffice.
        """

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [B, G, S, D] on the compute device."""

    def gather(self, rows: DecodeRows) -> Gathered:
        """Keys and values that hold at least `rows`, and `rows` counted in them."""


def grown(capacity: int, needed: int, reserved: int = 0) -> int:
    """Tokens to allocate so that `needed` fit: unchanged if they do, else what was reserved, else an eighth more,
    within bounds.

    One append in many then copies what is held, and a long context does not carry a long empty end.
    """
    if needed <= capacity:
        return capacity
    if needed <= reserved:
        return reserved
    return needed + min(max(needed // 8, _LEAST_MARGIN), _MOST_MARGIN)


def check_rows(held: torch.Tensor | None, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
    """Raises ShapeError unless the rows fit together, and to the [B, G, *, D] of `held`."""
    if k_BGSD.dim() != 4 or k_BGSD.shape != v_BGSD.shape:
        raise ShapeError(
            f"keys and values must both be [batch, KV heads, tokens, head size]; "
            f"found {tuple(k_BGSD.shape)} and {tuple(v_BGSD.shape)}"
        )
    check_layout(held, Layout.of(k_BGSD))


def check_layout(held: torch.Tensor | None, layout: Layout) -> None:
    """Raises ShapeError unless tokens of this layout fit to the [B, G, *, D] of `held`."""
    if held is None:
        return
    expected = (held.shape[0], held.shape[1], held.shape[3])
    found = (layout.batch, layout.heads, layout.size)
    if found != expected:
        raise ShapeError(
            f"the cache holds (batch, KV heads, head size) = {expected}, the new tokens have {found}; "
            f"start a new cache for another batch"
        )


class DeviceStore:
    """Keys and values side by side with their queries; views cost nothing."""

    def __init__(self) -> None:
        self._k_BGCD: torch.Tensor | None = None
        self._v_BGCD: torch.Tensor | None = None
        self._length = 0
        self._reserved = 0

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
        k_room, v_room = self.room(k_BGSD.shape[2], Layout.of(k_BGSD))
        k_room.copy_(k_BGSD.detach())
        v_room.copy_(v_BGSD.detach())
        self.commit(k_room, v_room)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The place behind the tokens held. Raises ShapeError when the layout does not fit."""
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

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, without a copy."""
        k_BGCD, v_BGCD = self._buffers()
        return k_BGCD[:, :, : self._length], v_BGCD[:, :, : self._length]

    def gather(self, rows: DecodeRows) -> Gathered:
        """All tokens, without a copy: kernels pick the rows where they lie."""
        return Gathered(*self.view(), rows)

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

    def _moved(self, held_BGCD: torch.Tensor | None, larger_BGCD: torch.Tensor) -> torch.Tensor:
        if held_BGCD is not None:
            larger_BGCD[:, :, : self._length].copy_(held_BGCD[:, :, : self._length])
        return larger_BGCD
