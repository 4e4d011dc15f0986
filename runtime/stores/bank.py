"""A KV store in host memory with a hot set on the compute device.

A context that is no longer than the hot set, or that decode attends to as a whole anyway, is on the device as in a
DeviceStore. A longer one is in host memory (host.py), with the newest tokens in a ring on the device, and in slots
copies of the tokens that decode steps chose lately. A step fetches only chosen tokens that have no slot
(kernels/decode/slots.py); layers that take the same choice share one slot map.

Why tokens that were chosen seldom and long ago give up their slots, and why the hot set is twice the budget or more: in
answers of three small models at 16K and 32K, with budgets of 512 to 2,048 tokens, 35 to 70% of the chosen tokens were
not chosen in the step before. With slots for 1, 2 and 4 budgets, replacing the least recently used leaves 34 to 68, 11
to 50 and 3 to 34% to fetch; a clock half a percent more, as a rule; counts of use that age (LRFU) a sixth fewer at 2
budgets, for no more work.

Source of the idea: OmniKV (ICLR 2025), the context bank.

Shapes: B batch, G KV heads, S tokens, R rows on the device (slots, then the ring), M listed tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap, SlotStep
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import Budget
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.host import HotSet, LongRows, Reads, empty_packed, unpacked
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import (
    Binding,
    Bytes,
    Gathered,
    HostReads,
    HotRows,
    KVStore,
    Layout,
    StepMemory,
    StepRows,
    WholeStore,
    check_tokens_fit,
    grown,
)


def in_host_memory(stores: Iterable[KVStore]) -> list[HostStore]:
    return [store for store in stores if isinstance(store, HostStore)]


class HostStore(WholeStore):
    """Keys and values in host memory, but for a hot set.

    Args:
        hot: tokens that have a row on the compute device, the newest ones included; a fraction counts of the allocated
            tokens. There are always rows enough for one step.
        memory: where blocks of host memory come from and go back to; its own when None.
        reads: what decode steps read; by default everything.
        counts: where to count what they read; its own when None.
    """

    def __init__(
        self, hot: Budget, memory: HostMemory | None = None, reads: Reads | None = None, counts: HostReads | None = None
    ) -> None:
        self.length = 0
        self.bytes = Bytes()
        self.counts = HostReads() if counts is None else counts
        self._hot = hot
        self._memory = HostMemory() if memory is None else memory
        self._reads = Reads() if reads is None else reads
        self._capacity = 0  # tokens that there is room for
        self.hot_set = HotSet.of(hot, self._reads, 0)  # of that capacity
        self._reserved = 0
        self._whole: DeviceStore | None = DeviceStore(self.bytes)  # everything, while the context is short
        self.rows = LongRows(self._memory, self.bytes, self._reads.recent)
        self._slots = SlotMap()  # where no other layer takes the same choice

    @staticmethod
    def allocated(layout: Layout, hot: Budget, reads: Reads, tokens: int) -> Bytes:
        whole = HotSet.of(hot, reads, tokens).whole
        return Bytes(layout.bytes(min(tokens, whole)), layout.bytes(tokens - reads.recent) if tokens > whole else 0)

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
            copied.rows.copy_from(self.rows)
        return copied

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds the new tokens; of a long context, the oldest that the ring has no room for move to the host. The copies
        to the host run behind the compute and read the two tensors until then: they may be let go of, but not
        overwritten. Every read of the store is ordered after them."""
        check_tokens_fit(self.keys, k_BGSD, v_BGSD)
        self.rows.unbind()
        k_BGSD, v_BGSD = k_BGSD.detach(), v_BGSD.detach()
        new = self.length + k_BGSD.shape[2]
        self._make_room(new, Layout.of(k_BGSD))
        if self._whole is not None and new <= self.hot_set.whole:
            self._whole.append(k_BGSD, v_BGSD)
        else:
            self._leave_device(Layout.of(k_BGSD), self.rows.first_hot(new))
            self.rows.append(self.length, k_BGSD, v_BGSD)
        self.length = new

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory on the device: attention reads it there while it is copied to the host, if it goes there."""
        layout.check(self.keys)
        self._make_room(self.length + tokens, layout)
        if self._whole is not None and self.length + tokens <= self.hot_set.whole:
            return self._whole.room(tokens, layout)
        return unpacked(empty_packed(tokens, layout))

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if self._whole is None or self.length + k_BGSD.shape[2] > self.hot_set.whole:
            self.append(k_BGSD, v_BGSD)
        else:
            self._whole.commit(k_BGSD, v_BGSD)
            self.length = self._whole.length

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        if self.length == 0:
            self._reserved = max(self._reserved, tokens)
        known = self._layout() or layout
        if known is not None:
            self._make_room(max(tokens, self._reserved), known)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * (0 if self.keys is None or not self.length else self.keys.shape[0])

    def truncate(self, lengths: Sequence[int]) -> None:
        """A context that is in host memory stays there; what of it belongs in the ring again comes back."""
        if len(set(lengths)) > 1:
            raise UnsupportedError(
                f"expected rows of one length in host memory, found {min(lengths)} to {max(lengths)} tokens; keep the "
                "layer on the device"
            )
        self.rows.unbind()
        if self._whole is None:
            self.rows.truncate(max(lengths, default=0))
        else:
            self._whole.truncate(lengths)
        self.length = max(lengths, default=0)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens; those of a long context are copied to the device for as long as the caller keeps them."""
        return self.rows.view(self.length, lengths_B) if self._whole is None else self._whole.view(lengths_B)

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None, slots: SlotMap | None = None
    ) -> Gathered:
        """The rows on the device, with the selected tokens among them; all tokens where they lie there anyway, or a row
        attends to everything. A row selects no more than `reads` says."""
        if self._whole is not None:
            return self._whole.gather(selection, lengths_B, window)
        self.rows.unbind()
        shared, sizes = self._slots if slots is None else slots, self.hot_set
        if not sizes.listed:
            return self.view(lengths_B), selection, window
        step = shared.place(
            selection,
            lengths_B,
            most=sizes.listed,
            slots=sizes.slots,
            capacity=self._capacity,
            hot_from=self.rows.hot_from,
        )
        if step.reads_all:
            return self.view(lengths_B), selection, window
        self._follow(step)
        tokens_BgM = step.tokens_BgM
        ring_BgM = sizes.slots + tokens_BgM % sizes.ring
        rows_BgM = torch.where(tokens_BgM >= self.rows.hot_from, ring_BgM, step.placed.slots_BgM)
        if window is not None:
            rows_BgM = rows_BgM.masked_fill(tokens_BgM < lengths_B[:, None, None] - window, NO_TOKEN)
        k_BGRD, v_BGRD = self.rows.on_device.unbind()
        keys = KeyView(k_BGRD, v_BGRD, torch.full_like(lengths_B, sizes.rows))
        return keys, Selection(rows_BgM, step.counts_B, 0, 0), None

    def _follow(self, step: SlotStep) -> None:
        self.counts.steps += 1
        self.counts.chosen += step.slotted
        if self.rows.slot_state is step.state:
            return
        fetch = step.missed if self.rows.slot_state is step.before else step.present
        self.rows.fetch(fetch)
        self.counts.fetched += len(fetch)
        self.rows.slot_state = step.state

    # --- captured steps -----------------------------------------------------------------------------------------------

    def is_long(self, length: int = 0) -> bool:
        """Returns whether the context lies in host memory, or will with `length` tokens."""
        return self._whole is None or length > self.hot_set.whole

    @property
    def capacity(self) -> int:
        if self._whole is None:
            return self._capacity
        return min(self._capacity, self._whole.capacity, self.hot_set.whole)

    def step_rows(self, length: int = 0) -> StepRows:
        return HotRows(self.hot_set.slots, self.hot_set.ring) if self.is_long(length) else None

    def step_memory(self) -> StepMemory:
        return self.rows.step_memory() if self._whole is None else self._whole.step_memory()

    def bind(self, binding: Binding) -> object:
        """The binding, until the store is written to in any other way; of a short context as DeviceStore."""
        if self._whole is None:
            self.rows.bound_to = binding
        return self.bound

    @property
    def bound(self) -> object:
        return self.rows.bound_to if self._whole is None else self.keys

    def prepare(self, length: int) -> None:
        """Makes room for a captured step at which a row has so many tokens: those before its recent ones are on the
        host."""
        self.reserve(length)
        self.rows.unbind()
        if self._whole is not None and length <= self.hot_set.whole:
            self._whole.reserve(length)
            return
        if self._whole is not None:
            cached = self._whole.keys
            assert cached is not None, "there is a context"
            self._leave_device(Layout.of(cached), self.rows.first_hot(self.length))
        self.rows.copy_out(max(0, length - self._reads.recent))
        self.rows.settle()

    def advance(self, tokens: int) -> None:
        self.length += tokens
        if self._whole is None:
            self.rows.hot_from = self.rows.first_hot(self.length)
        else:
            self._whole.advance(tokens)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        return self.rows.on_device[0] if self._whole is None else self._whole.keys

    def _layout(self) -> Layout | None:
        return None if (cached := self.keys) is None else Layout.of(cached)

    def _make_room(self, needed: int, layout: Layout) -> None:
        capacity = grown(self._capacity, needed, self._reserved)
        if capacity != self._capacity:
            self._allocate(capacity, layout)

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def _allocate(self, capacity: int, layout: Layout) -> None:
        """All or, where memory runs out, nothing."""
        self.rows.unbind()
        sizes = HotSet.of(self._hot, self._reads, capacity)
        if self._whole is not None and self.length == 0:
            self._whole.reserve(min(capacity, sizes.whole), layout)
        self.rows.allocate(capacity, sizes, layout, is_long=self._whole is None)
        self._capacity, self.hot_set = capacity, sizes

    def _leave_device(self, layout: Layout, hot_from: int) -> None:
        if self._whole is None:
            return
        cached = self._whole.tensors if self.length else (layout.empty(0), layout.empty(0))
        k_BGSD, v_BGSD = (x_BGCD[:, :, : self.length] for x_BGCD in cached)
        self.rows.enter(k_BGSD, v_BGSD, hot_from)
        self._whole = None
