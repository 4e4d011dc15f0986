"""A KV store in host memory with a hot set on the compute device.

A context that is no longer than the hot set, or that decode attends to as a whole anyway, is on the device as in a
DeviceStore. A longer one is on the host, token-major, so that one token's keys and values of all heads are one
contiguous read. On the device remain the newest tokens, in a ring (token t in row t modulo ring size) from which 64 at
a time move to the host, and copies of the tokens that decode steps chose lately, in slots. A step fetches only chosen
tokens that have no slot (kernels/decode/slots.py); layers that take the same choice share one slot map.

Why tokens that were chosen seldom and long ago give up their slots, and why the hot set is twice the budget or more: in
answers of three small models at 16K and 32K, with budgets of 512 to 2,048 tokens, 35 to 70% of the chosen tokens were
not chosen in the step before. With slots for 1, 2 and 4 budgets, replacing the least recently used leaves 34 to 68, 11
to 50 and 3 to 34% to fetch; a clock half a percent more, as a rule; counts of use that age (LRFU) a sixth fewer at 2
budgets, for no more work (the curves are in docs/experiments.md).

Tokens leave on a copy stream (pinned.py), so that the attention and the MLP of their layer run meanwhile; whoever reads
the host part is ordered after them. What was written to `room` is packed already: one token's keys and values of all
heads, of all batch rows, side by side; other tensors are packed piece by piece through one small buffer.

Source of the idea: OmniKV (ICLR 2025), the context bank.

Shapes: B batch, G KV heads, S tokens, C tokens on the host, R rows on the device (slots, then the ring), M listed
tokens, n fetched tokens, D head size, P = 2 for key and value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import Fetch, SlotMap, SlotState, Step
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import Budget
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.pinned import Block, CopyDone, CopyStream, HostMemory
from sparsekv.runtime.stores.store import (
    LEAVING,
    Binding,
    Bytes,
    HostReads,
    HotRows,
    HotSet,
    KVStore,
    Layout,
    Reads,
    StepMemory,
    StepRows,
    check_fit,
    grown,
)


def in_host_memory(stores: Iterable[KVStore]) -> list[HostStore]:
    """Those of these stores that have host memory."""
    return [store for store in stores if isinstance(store, HostStore)]


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
    """Keys and values in host memory, but for a hot set.

    Args:
        hot: tokens that have a row on the compute device, the newest ones included; a fraction counts of the allocated
            tokens. There are always rows enough for one step.
        memory: where blocks of host memory come from and go back to; its own when None.
        reads: what decode steps read; by default everything.
        counts: where to count what they read; its own when None.
    """

    def __init__(
        self,
        hot: Budget,
        memory: HostMemory | None = None,
        reads: Reads | None = None,
        counts: HostReads | None = None,
    ) -> None:
        self.length = 0
        self.bytes = Bytes()
        self.counts = HostReads() if counts is None else counts
        self.bound_to: Binding | None = None
        self._hot = hot
        self._memory = HostMemory() if memory is None else memory
        self._reads = Reads() if reads is None else reads
        self._capacity = 0  # tokens that there is room for
        self.hot_set = HotSet.of(hot, self._reads, 0)  # of that capacity
        self._reserved = 0
        self._whole: DeviceStore | None = DeviceStore(self.bytes)  # everything, while the context is short
        self._hot_from = 0  # tokens before it lie on the host, the others in the ring
        self._arrived = 0  # tokens before it are known to have arrived there
        self._block: Block | None = None
        self._give_back: Callable[[], object] | None = None
        self._host_CBPGD: torch.Tensor | None = None  # the block as a tensor
        self._rows_PBGRD: torch.Tensor | None = None
        self._written: CopyDone = None  # the last copy to the host
        self._slots = SlotMap()  # where no other layer takes the same choice
        self.slot_state: SlotState | None = None  # of what is in the slots

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        """A store of its own in a block of its own, once everything has arrived on the host. Its slots are empty."""
        copied = HostStore(self._hot, self._memory, self._reads, self.counts)
        memo[id(self.bytes)] = copied.bytes
        copied._reserved, copied._whole = self._reserved, deepcopy(self._whole, memo)
        copied.bytes.device = self.bytes.device
        copied.length = self.length
        if (layout := self._layout()) is not None:
            copied._allocate(self._capacity, layout)
        if self._whole is None:
            self._stream().settle()
            slots, hot_from = self.hot_set.slots, self._hot_from
            copied._rows()[:, :, :, slots:] = self._rows()[:, :, :, slots:]
            copied._host()[:hot_from] = self._host()[:hot_from]
            copied._hot_from = copied._arrived = hot_from
        return copied

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds the new tokens; of a long context, the oldest that the ring has no room for move to the host.

        The copies to the host run behind the compute and read the two tensors until then: they may be let go of, but
        not overwritten. Every read of the store is ordered after them.
        """
        check_fit(self.keys, k_BGSD, v_BGSD)
        self._unbind()
        k_BGSD, v_BGSD = k_BGSD.detach(), v_BGSD.detach()
        old, new = self.length, self.length + k_BGSD.shape[2]
        self._make_room(new, Layout.of(k_BGSD))
        if self._whole is not None and new <= self.hot_set.whole:
            self._whole.append(k_BGSD, v_BGSD)
            self.length = new
            return
        hot_from = self._first_hot(new)
        if self._whole is not None:
            self._leave_device(self._whole, hot_from, Layout.of(k_BGSD))
        else:
            self._evict(self._hot_from, min(old, hot_from))
            self._hot_from = min(old, hot_from)
        self._send(old, k_BGSD[:, :, : max(hot_from - old, 0)], v_BGSD[:, :, : max(hot_from - old, 0)])
        self._to_ring(max(old, hot_from), new, k_BGSD, v_BGSD)
        self.length, self._hot_from = new, hot_from

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory on the device: attention reads it there while it is copied to the host, if it goes there."""
        layout.check(self.keys)
        self._make_room(self.length + tokens, layout)
        if self._whole is not None and self.length + tokens <= self.hot_set.whole:
            return self._whole.room(tokens, layout)
        return unpacked(empty_packed(tokens, layout))

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Appends what was written."""
        if self._whole is None or self.length + k_BGSD.shape[2] > self.hot_set.whole:
            self.append(k_BGSD, v_BGSD)
        else:
            self._whole.commit(k_BGSD, v_BGSD)
            self.length = self._whole.length

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Room for `tokens` in all; allocated now where the layout is known. Raises UsageError without the memory."""
        if self.length == 0:
            self._reserved = max(self._reserved, tokens)
        known = self._layout() or layout
        if known is not None:
            self._make_room(max(tokens, self._reserved), known)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of rows that are equally long."""
        return (self.length,) * (0 if self.keys is None or not self.length else self.keys.shape[0])

    @property
    def cached(self) -> tuple[int, ...]:
        """All tokens."""
        return self.lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        """A context that is in host memory stays there; what of it belongs in the ring again comes back."""
        if len(set(lengths)) > 1:
            raise UnsupportedError(
                f"expected rows of one length in host memory, found {min(lengths)} to {max(lengths)} tokens; keep the "
                "layer on the device"
            )
        length = max(lengths, default=0)
        self._unbind()
        if self._whole is None:
            self.slot_state = None
            first = self._first_hot(length)
            self._bring_back(first, min(length, self._hot_from))
            self._hot_from = min(first, self._hot_from)
        else:
            self._whole.truncate(lengths)
        self.length = length

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens; those of a long context are copied to the device for as long as the caller keeps them."""
        if self._whole is not None:
            return self._whole.view(lengths_B)
        rows_PBGRD, host_CBPGD = self._rows(), self._host()
        self._stream().order(self._written)
        whole_SBPGD = empty_packed(self.length, Layout.of(rows_PBGRD[0]))
        whole_SBPGD[: self._hot_from].copy_(host_CBPGD[: self._hot_from], non_blocking=True)
        newest_PBGSD = rows_PBGRD[:, :, :, self._ring_rows(self._hot_from, self.length)]
        whole_SBPGD[self._hot_from :] = newest_PBGSD.permute(3, 1, 0, 2, 4)
        return KeyView(*unpacked(whole_SBPGD), lengths_B)

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """The rows on the device, with the selected tokens among them. All tokens where they lie there anyway, or where
        a row attends to everything. A row selects no more than what `reads` says."""
        if self._whole is not None:
            return self._whole.gather(selection, lengths_B, window)
        self._unbind()
        shared, sizes = self._slots if slots is None else slots, self.hot_set
        if not sizes.listed:
            return self.view(lengths_B), selection, window
        step = shared.place(
            selection,
            lengths_B,
            most=sizes.listed,
            slots=sizes.slots,
            capacity=self._capacity,
            hot_from=self._hot_from,
        )
        if step.reads_all:
            return self.view(lengths_B), selection, window
        self._follow(step)
        tokens_BgM = step.tokens_BgM
        ring_BgM = sizes.slots + tokens_BgM % sizes.ring
        rows_BgM = torch.where(tokens_BgM >= self._hot_from, ring_BgM, step.placed.slots_BgM)
        if window is not None:
            rows_BgM = rows_BgM.masked_fill(tokens_BgM < lengths_B[:, None, None] - window, NO_TOKEN)
        k_BGRD, v_BGRD = self._rows().unbind()
        keys = KeyView(k_BGRD, v_BGRD, torch.full_like(lengths_B, sizes.rows))
        return keys, Selection(rows_BgM, step.counts_B, 0, 0), None

    # --- captured steps -----------------------------------------------------------------------------------------------

    def is_long(self, length: int = 0) -> bool:
        """Returns whether the context lies in host memory, or will with `length` tokens."""
        return self._whole is None or length > self.hot_set.whole

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        if self._whole is None:
            return self._capacity
        return min(self._capacity, self._whole.capacity, self.hot_set.whole)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a short context, as DeviceStore.tensors."""
        assert self._whole is not None, "the context is long"
        return self._whole.tensors

    def step_rows(self, length: int = 0) -> StepRows:
        """Of a long context, the hot set."""
        return HotRows(self.hot_set.slots, self.hot_set.ring) if self.is_long(length) else None

    def step_memory(self) -> StepMemory:
        """Of a long context, the rows on the device and the memory on the host."""
        if self._whole is not None:
            return self._whole.step_memory()
        rows_PBGRD = self._rows()
        return StepMemory(rows_PBGRD[0], rows_PBGRD[1], rows_PBGRD, self._host())

    def bind(self, binding: Binding) -> object:
        """The binding, until the store is written to in any other way; of a short context as DeviceStore."""
        if self._whole is None:
            self.bound_to = binding
        return self.bound

    @property
    def bound(self) -> object:
        """See `bind`."""
        return self.bound_to if self._whole is None else self.keys

    def prepare(self, length: int) -> None:
        """Makes room for a captured step at which a row has so many tokens. Of a long context, all tokens before the
        recent ones of that step are on the host for whatever the device is given from here on."""
        self.reserve(length)
        self._unbind()
        if self._whole is not None and length <= self.hot_set.whole:
            self._whole.reserve(length)
            return
        if self._whole is not None:
            cached = self._whole.keys
            assert cached is not None, "there is a context"
            self._leave_device(self._whole, self._first_hot(self.length), Layout.of(cached))
        self._evict(self._hot_from, max(0, length - self._reads.recent))
        self._stream().order(self._written)

    def advance(self, tokens: int) -> None:
        """Counts what a captured step has written."""
        self.length += tokens
        if self._whole is None:
            self._hot_from = self._first_hot(self.length)
        else:
            self._whole.advance(tokens)

    def _unbind(self) -> None:
        """Of a context that captured steps have written to, what they did counts as a copy to the host."""
        if self.bound_to is not None:
            self.bound_to = None
            self._written = self._stream().run(lambda: None, ())

    def _first_hot(self, length: int) -> int:
        """Tokens before it are on the host once the append that led to this length is done."""
        return max(0, length - self._reads.recent) // LEAVING * LEAVING

    # --- slots --------------------------------------------------------------------------------------------------------

    def _follow(self, step: Step) -> None:
        """Fetches what the slots lack of the step."""
        self.counts.steps += 1
        self.counts.chosen += step.slotted
        if self.slot_state is step.state:
            return
        fetch = step.missed if self.slot_state is step.before else step.present
        self._fetch(fetch)
        self.counts.fetched += len(fetch)
        self.slot_state = step.state

    def _fetch(self, fetch: Fetch) -> None:
        if fetch.newest >= self._arrived:
            self._stream().finish(self._written)
            self._arrived = self._hot_from
        rows_PBGRD, host_CBPGD = self._rows(), self._host()
        batch, head, slot = fetch.into
        if fetch.lists == 1:
            rows_nPGD = host_CBPGD[fetch.token, fetch.batch].to(rows_PBGRD.device)
            rows_PBGRD[:, batch, :, slot] = rows_nPGD
        else:
            rows_nPD = host_CBPGD[fetch.token, fetch.batch, :, fetch.list].to(rows_PBGRD.device)
            rows_PBGRD[:, batch, head, slot] = rows_nPD.transpose(0, 1)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _rows(self) -> torch.Tensor:
        assert self._rows_PBGRD is not None, "the context is short yet"
        return self._rows_PBGRD

    def _host(self) -> torch.Tensor:
        assert self._host_CBPGD is not None, "the context is short yet"
        return self._host_CBPGD

    def _ring_rows(self, first: int, stop: int) -> torch.Tensor:
        sizes = self.hot_set
        return sizes.slots + torch.arange(first, stop, device=self._rows().device) % sizes.ring

    @property
    def keys(self) -> torch.Tensor | None:
        """[B, G, *, D]: those on the device."""
        return self._rows()[0] if self._whole is None else self._whole.keys

    def _layout(self) -> Layout | None:
        return None if (cached := self.keys) is None else Layout.of(cached)

    def _stream(self) -> CopyStream:
        return self._memory.stream(self._rows().device)

    def _make_room(self, needed: int, layout: Layout) -> None:
        capacity = grown(self._capacity, needed, self._reserved)
        if capacity != self._capacity:
            self._allocate(capacity, layout)

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def _allocate(self, capacity: int, layout: Layout) -> None:
        """All or, where memory runs out, nothing."""
        self._unbind()
        sizes = HotSet.of(self._hot, self._reads, capacity)
        rows_PBGRD = self._rows_PBGRD if self._whole is not None else self._new_rows(sizes, layout)
        if self._whole is not None and self.length == 0:
            self._whole.reserve(min(capacity, sizes.whole), layout)
        if self._whole is None or capacity > sizes.whole:
            self._allocate_host(capacity - self._reads.recent, layout)
        self._capacity, self.hot_set = capacity, sizes
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

    def _take_rows(self, rows_PBGRD: torch.Tensor | None) -> None:
        """A slot map of another size begins anew."""
        if rows_PBGRD is not None and rows_PBGRD is not self._rows_PBGRD:
            self._rows_PBGRD, self.slot_state = rows_PBGRD, None
            self.bytes.device = rows_PBGRD.untyped_storage().nbytes()

    def _allocate_host(self, tokens: int, layout: Layout) -> None:
        shape = (tokens, layout.batch, 2, layout.heads, layout.size)
        block = self._memory.take(torch.Size(shape).numel() * layout.dtype.itemsize, layout.device)
        host_CBPGD = block.view(shape, layout.dtype)
        if self._hot_from:
            self._stream().settle()  # copies into the old block, or out of the new one's last life, may be under way
            host_CBPGD[: self._hot_from] = self._host()[: self._hot_from]
        self._host_CBPGD = host_CBPGD
        self.bytes.host = host_CBPGD.untyped_storage().nbytes()
        self._own(block, layout.device)

    def _own(self, block: Block, device: torch.device) -> None:
        """The block goes back to the memory when this store takes a larger one or ceases to be."""
        if self._give_back is not None:
            self._give_back()
        self._block = block
        self._give_back = weakref.finalize(self, self._memory.give, block, device)

    # --- to the host --------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _leave_device(self, whole: DeviceStore, hot_from: int, layout: Layout) -> None:
        """From here on the context is long: tokens before `hot_from` go to the host, the others to the ring."""
        self._take_rows(self._new_rows(self.hot_set, layout))
        if self.length:
            k_BGSD, v_BGSD = (cached_BGCD[:, :, : self.length] for cached_BGCD in whole.tensors)
            self._send(0, k_BGSD[:, :, :hot_from], v_BGSD[:, :, :hot_from])
            self._to_ring(hot_from, self.length, k_BGSD, v_BGSD)
        self._whole, self._hot_from = None, min(self.length, hot_from)

    def _evict(self, first: int, stop: int) -> None:
        if first >= stop:
            return
        # gathered by the compute stream, which overwrites these rows next
        leaving_PBGSD = self._rows()[:, :, :, self._ring_rows(first, stop)]
        self._send(first, leaving_PBGSD[0], leaving_PBGSD[1])

    def _send(self, first: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Queues the copies of these tokens to the host, the first of them being token `first`."""
        if k_BGSD.shape[2] == 0:
            return
        host_CBPGD, stream = self._host(), self._stream()

        def copy() -> None:
            for begin in range(0, k_BGSD.shape[2], _COPY_TOKENS):
                piece = slice(begin, begin + _COPY_TOKENS)
                packed_SBPGD = packed(k_BGSD[:, :, piece], v_BGSD[:, :, piece])
                at = first + begin
                host_CBPGD[at : at + len(packed_SBPGD)].copy_(packed_SBPGD, non_blocking=True)

        self._written = stream.run(copy, (k_BGSD, v_BGSD))

    @torch.inference_mode(False)
    def _bring_back(self, first: int, stop: int) -> None:
        """Tokens of the host into the ring."""
        if first >= stop:
            return
        self._stream().order(self._written)
        packed_SBPGD = self._host()[first:stop].to(self._rows().device, non_blocking=True)
        self._to_ring(first, stop, *unpacked(packed_SBPGD))

    def _to_ring(self, first: int, stop: int, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if first >= stop:
            return
        rows_PBGRD, at, count = self._rows(), self._ring_rows(first, stop), stop - first
        rows_PBGRD[0].index_copy_(2, at, k_BGSD[:, :, -count:])
        rows_PBGRD[1].index_copy_(2, at, v_BGSD[:, :, -count:])
