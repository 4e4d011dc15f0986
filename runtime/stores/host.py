"""Long rows in host memory: all tokens but the newest ones in a block there, token-major, so that one token's keys and
values of all heads are one contiguous read. On the device are the newest tokens, in a ring (token t in row t modulo
ring size) from which 64 at a time move to the host, behind slots for copies of chosen tokens.

Tokens leave on a copy stream (pinned.py), so that the attention and the MLP of their layer run meanwhile; whoever reads
the host part is ordered after them. What was written to `room` is packed already: one token's keys and values of all
heads, of all batch rows, side by side; other tensors are packed piece by piece through one small buffer.

Shapes: B batch, G KV heads, S tokens, C tokens on the host, R rows on the device (slots, then the ring), n fetched
tokens, D head size, P = 2 for key and value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.decode.slots import Fetch, SlotState
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.topk import blocks
from sparsekv.plans.patterns import Budget
from sparsekv.runtime.stores.pinned import Block, CopyDone, CopyStream, HostMemory
from sparsekv.runtime.stores.store import Binding, Bytes, Layout, StepMemory

_COPY_TOKENS = 16_384  # packing a long prompt in pieces bounds the device memory it takes


LEAVING = 64  # tokens move to the host so many at a time


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of a long context by decode steps of a layer, which size the layer's part on the device."""

    budgets: tuple[Budget, ...] = ()  # of chosen tokens; none where every step reads everything
    sink: int = 0
    recent: int = 0
    whole_up_to: int = 0  # contexts of so many tokens are read as a whole

    def listed(self, length: int) -> int | None:
        """Tokens that a step reads at most of contexts up to this length; None where it reads everything."""
        if not self.budgets:
            return None
        most = self.sink + max(budget.resolve(length) for budget in self.budgets) + self.recent
        return most if most < length else None


@dataclass(frozen=True, slots=True)
class HotSet:
    """The rows of a layer in host memory that lie on the device, in tokens."""

    slots: int  # of chosen tokens; 0 where a step reads everything
    ring: int  # rows behind them for the newest tokens
    listed: int  # tokens that a step attends to at most; 0 where it reads everything
    whole: int  # the longest context that lies there as a whole

    @classmethod
    def of(cls, hot: Budget, reads: Reads, capacity: int) -> HotSet:
        rows, ring, listed = hot.resolve(capacity), reads.recent + LEAVING, reads.listed(capacity) or 0
        slots = max(rows - ring, listed) if listed else 0
        return cls(slots, ring, listed, max(rows, slots + ring, reads.whole_up_to))

    @property
    def rows(self) -> int:
        return self.slots + self.ring


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


class LongRows:
    """Rows of one layer that are in host memory, but for the newest tokens, which every step reads, and for tokens that
    decode steps chose lately. Before `enter` memory may be allocated, and no token is here."""

    def __init__(self, memory: HostMemory, nbytes: Bytes, recent: int) -> None:
        self.bound_to: Binding | None = None
        self.slot_state: SlotState | None = None  # of what is in the slots
        self.hot_from = 0  # tokens before it lie on the host, the others in the ring
        self._memory = memory
        self._bytes = nbytes
        self._recent = recent
        self._sizes = HotSet(0, 0, 0, 0)
        self._arrived = 0  # tokens before it are known to have arrived on the host
        self.block: Block | None = None  # of host memory
        self._give_back: Callable[[], object] | None = None
        self._host_CBPGD: torch.Tensor | None = None
        self._rows_PBGRD: torch.Tensor | None = None
        self._written: CopyDone = None  # the last copy to the host

    @property
    def on_device(self) -> torch.Tensor:
        """[P, B, G, R, D]: slots and the ring."""
        assert self._rows_PBGRD is not None, "no token is here yet"
        return self._rows_PBGRD

    @property
    def on_host(self) -> torch.Tensor:
        """[C, B, P, G, D]: the block of host memory."""
        assert self._host_CBPGD is not None, "no token is here yet"
        return self._host_CBPGD

    @property
    def stream(self) -> CopyStream:
        return self._memory.stream(self.on_device.device)

    def first_hot(self, length: int) -> int:
        """Tokens before it are on the host once the append that led to this length is done."""
        return max(0, length - self._recent) // LEAVING * LEAVING

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, capacity: int, sizes: HotSet, layout: Layout, *, is_long: bool) -> None:
        """Makes room on the host for a context of `capacity` tokens; of one that is long already, for rows on the
        device too. All or, where memory runs out, nothing."""
        rows_PBGRD = self._new_rows(sizes, layout) if is_long else self._rows_PBGRD
        if is_long or capacity > sizes.whole:
            self._allocate_host(capacity - self._recent, layout)
        self._sizes = sizes
        if rows_PBGRD is not None:
            self._take_rows(rows_PBGRD)

    def _new_rows(self, sizes: HotSet, layout: Layout) -> torch.Tensor:
        """Rows of these sizes, with what the ring held."""
        former = self._rows_PBGRD
        if former is not None and former.shape[3] == sizes.rows:
            return former
        rows_PBGRD = torch.stack((layout.empty(sizes.rows), layout.empty(sizes.rows)))
        if former is not None:
            rows_PBGRD[:, :, :, sizes.slots :] = former[:, :, :, -sizes.ring :]
        return rows_PBGRD

    def _take_rows(self, rows_PBGRD: torch.Tensor) -> None:
        """A slot map of another size begins anew."""
        if rows_PBGRD is not self._rows_PBGRD:
            self._rows_PBGRD, self.slot_state = rows_PBGRD, None
            self._bytes.device = rows_PBGRD.untyped_storage().nbytes()

    def _allocate_host(self, tokens: int, layout: Layout) -> None:
        shape = (tokens, layout.batch, 2, layout.heads, layout.size)
        block = self._memory.take(torch.Size(shape).numel() * layout.dtype.itemsize, layout.device)
        host_CBPGD = block.view(shape, layout.dtype)
        if self.hot_from:
            self.stream.settle()  # copies into the old block, or out of the new one's last life, may be under way
            host_CBPGD[: self.hot_from] = self.on_host[: self.hot_from]
        self._host_CBPGD = host_CBPGD
        self._bytes.host = host_CBPGD.untyped_storage().nbytes()
        self._own(block, layout.device)

    def _own(self, block: Block, device: torch.device) -> None:
        """The block goes back to the memory when these rows take a larger one or cease to be."""
        if self._give_back is not None:
            self._give_back()
        self.block = block
        self._give_back = weakref.finalize(self, self._memory.give, block, device)

    def copy_from(self, other: LongRows) -> None:
        """Takes the tokens of rows of the same sizes, but for their slots, once all are on the host."""
        other.stream.settle()
        slots, hot_from = self._sizes.slots, other.hot_from
        self.on_device[:, :, :, slots:] = other.on_device[:, :, :, slots:]
        self.on_host[:hot_from] = other.on_host[:hot_from]
        self.hot_from = self._arrived = hot_from

    # --- tokens -------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def enter(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, hot_from: int) -> None:
        """Takes all tokens so far: those before `hot_from` go to the host, the others to the ring."""
        length = k_BGSD.shape[2]
        self._take_rows(self._new_rows(self._sizes, Layout.of(k_BGSD)))
        self._send(0, k_BGSD[:, :, :hot_from], v_BGSD[:, :, :hot_from])
        self._to_ring(hot_from, length, k_BGSD, v_BGSD)
        self.hot_from = min(length, hot_from)

    def append(self, old: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds tokens to `old` ones; the oldest that the ring has no room for move to the host."""
        new = old + k_BGSD.shape[2]
        hot_from = self.first_hot(new)
        self.copy_out(min(old, hot_from))
        self._send(old, k_BGSD[:, :, : max(hot_from - old, 0)], v_BGSD[:, :, : max(hot_from - old, 0)])
        self._to_ring(max(old, hot_from), new, k_BGSD, v_BGSD)
        self.hot_from = hot_from

    def copy_out(self, stop: int) -> None:
        """Copies tokens of the ring before `stop` to the host, so that others may take their rows."""
        if self.hot_from >= stop:
            return
        # gathered by the compute stream, which overwrites these rows next
        leaving_PBGSD = self.on_device[:, :, :, self._ring_rows(self.hot_from, stop)]
        self._send(self.hot_from, leaving_PBGSD[0], leaving_PBGSD[1])

    @torch.inference_mode(False)
    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on; what belongs in the ring again comes back."""
        self.slot_state = None
        first, stop = self.first_hot(length), min(length, self.hot_from)
        if first < stop:
            self.stream.order(self._written)
            packed_SBPGD = self.on_host[first:stop].to(self.on_device.device, non_blocking=True)
            self._to_ring(first, stop, *unpacked(packed_SBPGD))
        self.hot_from = min(first, self.hot_from)

    def view(self, length: int, lengths_B: torch.Tensor) -> KeyView:
        """All tokens, copied to the device for as long as the caller keeps them."""
        self.settle()
        whole_SBPGD = empty_packed(length, Layout.of(self.on_device[0]))
        whole_SBPGD[: self.hot_from].copy_(self.on_host[: self.hot_from], non_blocking=True)
        newest_PBGSD = self.on_device[:, :, :, self._ring_rows(self.hot_from, length)]
        whole_SBPGD[self.hot_from :] = newest_PBGSD.permute(3, 1, 0, 2, 4)
        return KeyView(*unpacked(whole_SBPGD), lengths_B)

    def fetch(self, fetch: Fetch) -> None:
        if fetch.newest >= self._arrived:
            self.stream.finish(self._written)
            self._arrived = self.hot_from
        batch, head, slot = fetch.into
        if fetch.lists == 1:
            rows_nPGD = self.on_host[fetch.token, fetch.batch].to(self.on_device.device)
            self.on_device[:, batch, :, slot] = rows_nPGD
        else:
            rows_nPD = self.on_host[fetch.token, fetch.batch, :, fetch.list].to(self.on_device.device)
            self.on_device[:, batch, head, slot] = rows_nPD.transpose(0, 1)

    def step_memory(self) -> StepMemory:
        rows_PBGRD = self.on_device
        return StepMemory(rows_PBGRD[0], rows_PBGRD[1], rows_PBGRD, self.on_host)

    def settle(self) -> None:
        """Later work of the compute stream comes after what was sent to the host."""
        self.stream.order(self._written)

    def unbind(self) -> None:
        """Counts what captured steps have written as a copy to the host."""
        if self.bound_to is not None:
            self.bound_to = None
            self._written = self.stream.run(lambda: None, ())

    def _ring_rows(self, first: int, stop: int) -> torch.Tensor:
        sizes = self._sizes
        return sizes.slots + torch.arange(first, stop, device=self.on_device.device) % sizes.ring

    def _send(self, first: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Queues the copies of these tokens to the host, the first of them being token `first`."""
        if k_BGSD.shape[2] == 0:
            return
        host_CBPGD, stream = self.on_host, self.stream

        def copy() -> None:
            for piece in blocks(k_BGSD.shape[2], 1, _COPY_TOKENS):
                packed_SBPGD = packed(k_BGSD[:, :, piece], v_BGSD[:, :, piece])
                host_CBPGD[first + piece.start : first + piece.stop].copy_(packed_SBPGD, non_blocking=True)

        self._written = stream.run(copy, (k_BGSD, v_BGSD))

    def _to_ring(self, first: int, stop: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if first >= stop:
            return
        rows_PBGRD, at, count = self.on_device, self._ring_rows(first, stop), stop - first
        rows_PBGRD[0].index_copy_(2, at, k_BGSD[:, :, -count:])
        rows_PBGRD[1].index_copy_(2, at, v_BGSD[:, :, -count:])
