"""A KV store in host memory with a hot set on the compute device.

Each token is in exactly one place: the most recent ones in a ring on the device (token t in slot t modulo ring
size), all before them in pinned host memory, token-major, so that one token's keys and values of all heads are one
contiguous read. What the ring takes from the device and what lies on the host add up to a DeviceStore of the same
tokens. Source of the idea: OmniKV (ICLR 2025), the context bank.

Tokens leave on a copy stream (pinned.py), so that the attention and the MLP of their layer run meanwhile; whoever reads
the host part is ordered after them. What was written to `room` is packed already: one token's keys and values of all
heads, of all batch rows, side by side; other tensors are packed piece by piece through one small buffer.

Shapes: B batch, G KV heads, S tokens, C tokens on the host, R slots of the ring, M wanted tokens, D head size,
P = 2 for key and value; g is 1 (a choice shared by all heads) or G.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.patterns import Budget
from sparsekv.runtime.stores.pinned import Block, CopyDone, CopyStream, HostMemory
from sparsekv.runtime.stores.store import Bytes, Layout, check_fit, grown


def empty_packed(tokens: int, layout: Layout) -> torch.Tensor:
    """[S, B, P, G, D] on the device, in the order of host memory."""
    shape = (tokens, layout.batch, 2, layout.heads, layout.size)
    return torch.empty(shape, dtype=layout.dtype, device=layout.device)


def unpacked(packed_SBPGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as views, [B, G, S, D]."""
    k_BGSD, v_BGSD = (packed_SBPGD[:, :, pair].permute(1, 2, 0, 3) for pair in (0, 1))
    return k_BGSD, v_BGSD


def packed(k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """[S, B, P, G, D], contiguous: the memory of the two where they came from `unpacked`, else a copy."""
    (batch, heads, tokens, size), layout = k_BGSD.shape, Layout.of(k_BGSD)
    strides = (2 * heads * size, size, batch * 2 * heads * size, 1)
    together = k_BGSD.untyped_storage().data_ptr() == v_BGSD.untyped_storage().data_ptr()
    apart = v_BGSD.storage_offset() - k_BGSD.storage_offset()
    if k_BGSD.stride() == v_BGSD.stride() == strides and together and apart == heads * size:
        return k_BGSD.as_strided((tokens, batch, 2, heads, size), (strides[2], strides[0], heads * size, size, 1))
    packed_SBPGD = empty_packed(tokens, layout)
    packed_SBPGD[:, :, 0] = k_BGSD.permute(2, 0, 1, 3)
    packed_SBPGD[:, :, 1] = v_BGSD.permute(2, 0, 1, 3)
    return packed_SBPGD


_COPY_TOKENS = 16_384  # packing a long prompt in pieces bounds the device memory it takes


class HostStore:
    """Keys and values in host memory, but for a hot set of the most recent tokens.

    Args:
        hot: how many of the most recent tokens stay on the compute device; a fraction counts of the allocated tokens.
        memory: where blocks of host memory come from and go back to; its own when None.
    """

    def __init__(self, hot: Budget, memory: HostMemory | None = None) -> None:
        self.length = 0
        self.bytes = Bytes()
        self._hot = hot
        self._memory = HostMemory() if memory is None else memory
        self._capacity = 0  # tokens allocated, on the device and the host together
        self._reserved = 0
        self._hot_start = 0  # tokens before it lie on the host, the others in the ring
        self._block: Block | None = None
        self._give_back: Callable[[], object] | None = None
        self._host_CBPGD: torch.Tensor | None = None  # the block as a tensor
        self._ring_PBGRD: torch.Tensor | None = None
        self._written: CopyDone = None  # the last copy to the host
        self.fetched_tokens = 0  # read from the host by gather so far, counted per batch row and choice

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        """A store of its own in a block of its own, once everything has arrived on the host."""
        copied = HostStore(self._hot, self._memory)
        copied._reserved = self._reserved
        if self._ring_PBGRD is not None:
            copied.reserve(self._capacity, self._layout())
            ring_PBGRD, host_CBPGD = copied._buffers()
            self._stream().settle()
            ring_PBGRD.copy_(self._buffers()[0])
            host_CBPGD[: self._hot_start] = self._buffers()[1][: self._hot_start]
        copied.length, copied._hot_start = self.length, self._hot_start
        copied.fetched_tokens = self.fetched_tokens
        return copied

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Puts the new tokens into the ring and moves those it has no room for to the host.

        The copies to the host run behind the compute and read the two tensors until then: they may be let go of, but
        not overwritten. Every read of the store is ordered after them.
        """
        check_fit(None if self._ring_PBGRD is None else self._ring_PBGRD[0], k_BGSD, v_BGSD)
        k_BGSD, v_BGSD = k_BGSD.detach(), v_BGSD.detach()
        old, new = self.length, self.length + k_BGSD.shape[2]
        self._make_room(new, Layout.of(k_BGSD))
        hot_start = max(self._hot_start, new - self._buffers()[0].shape[3])
        self._evict(self._hot_start, min(old, hot_start))
        self._send(old, k_BGSD[:, :, : max(hot_start - old, 0)], v_BGSD[:, :, : max(hot_start - old, 0)])
        self._to_ring(max(old, hot_start), new, k_BGSD, v_BGSD)
        self.length, self._hot_start = new, hot_start

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of its own on the device: attention reads it there while it is copied to the host."""
        layout.check(None if self._ring_PBGRD is None else self._ring_PBGRD[0])
        return unpacked(empty_packed(tokens, layout))

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Appends what was written."""
        self.append(k_BGSD, v_BGSD)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Room for `tokens` in all; allocated now where the layout is known. Raises UsageError without the memory."""
        if self.length == 0:
            self._reserved = max(self._reserved, tokens)
        known = layout if self._ring_PBGRD is None else self._layout()
        if known is not None:
            self._make_room(max(tokens, self._reserved), known)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens, copied to the compute device for as long as the caller keeps them."""
        ring_PBGRD, host_CBPGD = self._buffers()
        self._stream().order(self._written)
        whole_SBPGD = empty_packed(self.length, self._layout())
        whole_SBPGD[: self._hot_start].copy_(host_CBPGD[: self._hot_start], non_blocking=True)
        hot_PBGSD = ring_PBGRD[:, :, :, self._slots_of(self._hot_start, self.length)]
        whole_SBPGD[self._hot_start :] = hot_PBGSD.permute(3, 1, 0, 2, 4)
        return KeyView(*unpacked(whole_SBPGD), lengths_B)

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None
    ) -> tuple[KeyView, Selection, int | None]:
        """The selected tokens alone, side by side; only those that are not hot are read from the host. All tokens where
        a row attends to everything."""
        if bool((selection.counts_B == ALL).any()):
            return self.view(lengths_B), selection, window
        wanted_BgM = selection.listed(lengths_B)
        if window is not None:
            wanted_BgM = wanted_BgM.masked_fill(wanted_BgM < lengths_B[:, None, None] - window, NO_TOKEN)
        found_PBGMD = self._from_ring(wanted_BgM)
        self._fetch_cold(wanted_BgM, found_PBGMD)
        listed_BgM = torch.arange(wanted_BgM.shape[2], dtype=torch.int32, device=wanted_BgM.device)
        listed_BgM = torch.where(wanted_BgM < 0, wanted_BgM, listed_BgM)
        full_B = torch.full_like(lengths_B, wanted_BgM.shape[2])
        return KeyView(found_PBGMD[0], found_PBGMD[1], full_B), Selection(listed_BgM, full_B, 0, 0), None

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring and host part."""
        assert self._ring_PBGRD is not None, "nothing was appended to this store yet"
        assert self._host_CBPGD is not None
        return self._ring_PBGRD, self._host_CBPGD

    def _slots_of(self, first: int, stop: int) -> torch.Tensor:
        ring_PBGRD, _ = self._buffers()
        return torch.arange(first, stop, device=ring_PBGRD.device) % max(ring_PBGRD.shape[3], 1)

    def _layout(self) -> Layout:
        return Layout.of(self._buffers()[0][0])

    def _stream(self) -> CopyStream:
        return self._memory.stream(self._buffers()[0].device)

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def _make_room(self, needed: int, layout: Layout) -> None:
        capacity = grown(self._capacity, needed, self._reserved)
        if capacity == self._capacity:
            return
        slots = self._hot.resolve(capacity)
        shape = (capacity - slots, layout.batch, 2, layout.heads, layout.size)
        block = self._memory.take(torch.Size(shape).numel() * layout.dtype.itemsize, layout.device)
        ring_PBGRD = torch.stack((layout.empty(slots), layout.empty(slots)))
        host_CBPGD = block.view(shape, layout.dtype)
        if self.length:
            old_ring, old_host = self._buffers()
            moved = torch.arange(self._hot_start, self.length, device=layout.device) % max(slots, 1)
            ring_PBGRD[:, :, :, moved] = old_ring[:, :, :, self._slots_of(self._hot_start, self.length)]
            self._stream().settle()  # copies into the old block, or out of the new one's last life, may be under way
            host_CBPGD[: self._hot_start] = old_host[: self._hot_start]
        self._ring_PBGRD, self._host_CBPGD, self._capacity = ring_PBGRD, host_CBPGD, capacity
        self.bytes.device = ring_PBGRD.untyped_storage().nbytes()
        self.bytes.host = host_CBPGD.untyped_storage().nbytes()
        self._own(block, layout.device)

    def _own(self, block: Block, device: torch.device) -> None:
        """The block goes back to the memory when this store takes a larger one or ceases to be."""
        if self._give_back is not None:
            self._give_back()
        self._block = block
        self._give_back = weakref.finalize(self, self._memory.give, block, device)

    def _evict(self, first: int, stop: int) -> None:
        if first >= stop:
            return
        # gathered by the compute stream, which overwrites these slots next
        leaving_PBGSD = self._buffers()[0][:, :, :, self._slots_of(first, stop)]
        self._send(first, leaving_PBGSD[0], leaving_PBGSD[1])

    def _send(self, first: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Queues the copies of these tokens to the host, the first of them being token `first`."""
        if k_BGSD.shape[2] == 0:
            return
        host_CBPGD, stream = self._buffers()[1], self._stream()

        def copy() -> None:
            for begin in range(0, k_BGSD.shape[2], _COPY_TOKENS):
                piece = slice(begin, begin + _COPY_TOKENS)
                packed_SBPGD = packed(k_BGSD[:, :, piece], v_BGSD[:, :, piece])
                at = first + begin
                host_CBPGD[at : at + len(packed_SBPGD)].copy_(packed_SBPGD, non_blocking=True)

        self._written = stream.run(copy, (k_BGSD, v_BGSD))

    def _to_ring(self, first: int, stop: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if first >= stop:
            return
        ring_PBGRD, slots, count = self._buffers()[0], self._slots_of(first, stop), stop - first
        ring_PBGRD[0].index_copy_(2, slots, k_BGSD[:, :, -count:])
        ring_PBGRD[1].index_copy_(2, slots, v_BGSD[:, :, -count:])

    def _from_ring(self, wanted_BgM: torch.Tensor) -> torch.Tensor:
        """[P, B, G, M, D]; rows of tokens that are not hot hold anything."""
        ring_PBGRD, _ = self._buffers()
        pairs, batch, heads, slots, size = ring_PBGRD.shape
        shape = (pairs, batch, heads, wanted_BgM.shape[2], size)
        if slots == 0:
            return ring_PBGRD.new_zeros(shape)
        slot_BgM = wanted_BgM.clamp(min=0).long() % slots
        return ring_PBGRD.gather(3, slot_BgM[None, :, :, :, None].expand(shape))

    def _fetch_cold(self, wanted_BgM: torch.Tensor, into_PBGMD: torch.Tensor) -> None:
        """Reads the wanted tokens that lie on the host. Waits for the device: the host must know which."""
        _, host_CBPGD = self._buffers()
        wanted = wanted_BgM.cpu()
        batch, head, position = ((wanted >= 0) & (wanted < self._hot_start)).nonzero(as_tuple=True)
        if not len(position):
            return
        self.fetched_tokens += len(position)
        self._stream().finish(self._written)
        token, device = wanted[batch, head, position].long(), into_PBGMD.device
        if wanted.shape[1] == 1:
            rows_nPGD = host_CBPGD[token, batch].to(device)
            into_PBGMD[:, batch.to(device), :, position.to(device)] = rows_nPGD
        else:
            rows_nPD = host_CBPGD[token, batch, :, head].to(device)
            into_PBGMD[:, batch.to(device), head.to(device), position.to(device)] = rows_nPD.transpose(0, 1)
