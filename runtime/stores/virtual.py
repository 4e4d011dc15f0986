"""A KV store in virtual memory of the compute device: rows have addresses for the model's whole context, and pages for
the tokens that they have. It grows without a copy, and its addresses do not change.

In memory every token is followed by the next one with all its heads: [B, C, G, D], seen as [B, G, C, D].

Shapes: B batch, G KV heads, S tokens, C tokens that there are addresses for, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparsekv.kernels.keys import KeyView
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.page_pool import AHEAD, PageError, PagePool
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES
from sparsekv.runtime.stores.reservation import Change, Fork, Reservation, planned
from sparsekv.runtime.stores.store import Bytes, Layout

_TILE = 128  # kernels may load whole tiles of the last tokens


@dataclass(frozen=True, slots=True)
class _Memory:
    """Addresses of a layer: first the keys of all rows, then their values."""

    reservation: Reservation
    layout: Layout
    kv_2BGCD: torch.Tensor

    @classmethod
    def of(cls, pool: PagePool, layout: Layout, context: int) -> _Memory:
        """For so many tokens a row. The first page is there."""
        token = layout.token_bytes
        row = round_up(context * token, math.lcm(pool.driver.granularity, layout.size * layout.dtype.itemsize))
        try:
            reservation = Reservation(pool, 2 * layout.batch, row)
        except PageError as error:
            fit = next((rows for rows in range(layout.batch - 1, 0, -1) if _has_addresses(pool, 2 * rows * row)), 0)
            raise UsageError(
                f"expected addresses for {layout.batch} rows of {context:,} tokens in a layer, found some for {fit} "
                f"({error}); run fewer rows together"
            ) from error
        reservation.ensure([(0, 1)])  # else nobody can tell where the memory is
        size = (2, layout.batch, layout.heads, row // token, layout.size)
        step = row // layout.dtype.itemsize
        stride = (layout.batch * step, step, layout.size, layout.heads * layout.size, 1)
        kv_2BGCD = pool.driver.tensor(reservation.address, size, stride, layout.dtype, reservation)
        return cls(reservation, layout, kv_2BGCD)

    @property
    def context(self) -> int:
        return self.kv_2BGCD.shape[3]

    def rows_of(self, row: int) -> tuple[int, int]:
        return row, self.layout.batch + row

    def mapped(self) -> list[int]:
        token = self.layout.token_bytes
        both = [min(map(self.reservation.size, self.rows_of(row))) for row in range(self.layout.batch)]
        return [min(nbytes // token, self.context) for nbytes in both]

    def shares(self, row: int, length: int) -> bool:
        """Returns whether other rows have pages that the tokens behind so many of a row go to."""
        begin = length * self.layout.token_bytes
        return any(self.reservation.shares(at, begin) for at in self.rows_of(row))

    def bytes_for(self, tokens: int) -> int:
        return min(round_up(tokens, _TILE) * self.layout.token_bytes, self.reservation.row_bytes)

    def ensure(self, wanted: Sequence[int]) -> None:
        """Pages for so many tokens of each row."""
        needed = [(at, self.bytes_for(n)) for row, n in enumerate(wanted) for at in self.rows_of(row)]
        self.reservation.ensure(needed)


def _has_addresses(pool: PagePool, nbytes: int) -> bool:
    try:
        pool.driver.free(pool.driver.reserve(nbytes), nbytes)
    except PageError:
        return False
    return True


_LEAST_PAGES = 8


def pages_pay(layout: Layout, context: int, page: int) -> bool:
    """Returns whether pages of so many bytes pay for such keys. A row has up to a page beyond its tokens. Where its
    whole context fills eight, that is no more than the eighth by which a device store grows, and copies, with old and
    new side by side, are saved."""
    return 0 < _LEAST_PAGES * page <= layout.token_bytes * context


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step


class VirtualStore(DeviceStore):
    """Keys and values beside their queries; views cost nothing. A row owns the pages from its next token on; those
    before may be of several rows. Where a row exceeds `context`, it gets other addresses."""

    def __init__(self, pool: PagePool, context: int) -> None:
        super().__init__()
        self._pool = pool
        self._context = context
        self._memory: _Memory | None = None
        self._capacity = self._extent = 0
        self._mapped: list[int] = []  # tokens that each row has pages for
        self._layout: Layout | None = None  # of what is cached, or expected
        self._asked: tuple[int, ...] = ()  # tokens of each row that pages are asked for ahead of need

    @staticmethod
    def allocated(layout: Layout, tokens: int, page: int) -> Bytes:
        return Bytes(2 * layout.batch * round_up(round_up(tokens, _TILE) * layout.token_bytes, page))

    @torch.inference_mode(False)  # else the copy could not be written to under torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualStore:
        copied = VirtualStore(self._pool, self._context)
        copied._reserved = self._reserved
        if self._memory is not None:
            copied._grow(self.length, self._memory.layout, self.lengths or None)
            copied.lengths = self.lengths
            for row, length in enumerate(self.lengths):
                for mine, theirs in zip(copied.tensors, self.tensors, strict=True):
                    mine[row, :, :length].copy_(theirs[row, :, :length])
            copied._measure()
        return copied

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens of the longest row up to which all rows can grow together with the pages they have."""
        return self._capacity

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values up to where the row with most pages ends; others may end before."""
        k_BGCD, v_BGCD = super().tensors
        extent = self._extent  # once: the thread that maps ahead may take note of more
        return k_BGCD[:, :, :extent], v_BGCD[:, :, :extent]

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return replace(super().view(lengths_B), held=self.lengths if self._is_ragged else None)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        self._reserved = max(self._reserved, tokens)
        if (known := self._layout or layout) is not None:
            self._grow(tokens, known)

    def hold(self, tokens: int, layout: Layout, row: int | None = None) -> None:
        """Pages for so many tokens of one row; or of the longest, all others as far behind as they are."""
        layout.check(self.keys)
        wanted = list(self.lengths or (0,) * layout.batch)
        if row is not None:
            wanted[row] = max(tokens, self._reserved)
        self._grow(tokens, layout, wanted if row is not None else None)

    def prepare(self, length: int) -> None:
        assert self._memory is not None
        self._grow(length, self._memory.layout)

    def _count(self, tokens: int) -> None:
        super()._count(tokens)
        is_announced = self.length <= self._reserved <= self._capacity  # no more than that is to come
        if self._capacity - self.length < AHEAD and not is_announced and not self._asked:
            self.expect([length + 2 * AHEAD for length in self.lengths])

    def expect(self, wanted: Sequence[int], layout: Layout | None = None) -> None:
        """Pages for so many tokens of each row are mapped meanwhile, as far as there are addresses for them."""
        if self._memory is None:  # else the layout is known
            self._layout = layout or self._layout
        self._asked = tuple(wanted)
        self._pool.ahead.run(self._map_ahead)

    def missing(self, wanted: Sequence[int], layout: Layout) -> int:
        """Bytes of the pages to map for so many tokens of each row. Raises ShapeError when the layout does not fit."""
        layout.check(self.keys)
        token, page, mapped = layout.token_bytes, self._pool.driver.granularity, self._mapped or (0,) * len(wanted)
        more = [max(0, round_up(n, _TILE) - has) for n, has in zip(wanted, mapped, strict=True)]
        return 2 * sum(round_up(tokens * token, page) for tokens in more)

    def _map_ahead(self) -> None:
        with OUTSIDE_CAPTURES.none_under_way():
            wanted, self._asked = self._asked, ()
            layout = self._memory.layout if self._memory else self._layout
            if layout is None or len(wanted) != layout.batch:  # nothing, or for the rows of a pass that failed
                return
            try:
                memory = self._memory or self._new_memory(layout, wanted)
                if max(wanted) <= memory.context:
                    memory.ensure(wanted)
            finally:
                self._measure()

    @torch.inference_mode(False)  # else what is made there could not be written to under torch.no_grad()
    def _grow(self, needed: int, layout: Layout, wanted: Sequence[int] | None = None) -> None:
        """Pages for `wanted` tokens of the rows; without it for `needed` of the longest, or as many as are reserved."""
        lengths = self.lengths or (0,) * layout.batch
        if wanted is None:
            if self._memory is not None and needed <= self._capacity:
                return
            more = max(needed, 0 if self.length else self._reserved) - self.length
            wanted = [length + more for length in lengths]
        with self._pool.first():
            try:
                memory = self._memory or self._new_memory(layout, wanted)
                if max(wanted) > memory.context:
                    self._fork(range(layout.batch), memory := _Memory.of(self._pool, layout, max(wanted)))
                if any(map(memory.shares, range(layout.batch), lengths)):
                    self._fork(range(layout.batch), memory)  # other rows still have what these write to
                memory.ensure(wanted)
            finally:
                self._measure()

    def _new_memory(self, layout: Layout, wanted: Sequence[int]) -> _Memory:
        return self._take(_Memory.of(self._pool, layout, max(*wanted, self._context)))

    def _take(self, memory: _Memory) -> _Memory:
        self._memory, self._layout = memory, memory.layout
        self._kv_BGCD = memory.kv_2BGCD[0], memory.kv_2BGCD[1]
        return memory

    def _measure(self) -> None:
        memory = self._memory
        if memory is None:
            return
        mapped, lengths = memory.mapped(), self.lengths or (0,) * memory.layout.batch
        room = [0 if memory.shares(row, has) else mapped[row] - has for row, has in enumerate(lengths)]
        self._extent, self.bytes.device = max(mapped), memory.reservation.bytes
        self._mapped, self._capacity = mapped, max(lengths) + min(room)  # last: whoever reads it reads `tensors` then

    # --- rows -----------------------------------------------------------------------------------------------------

    def truncate(self, lengths: Sequence[int]) -> None:
        """Counts so many tokens. Pages behind them go back, but for the reserved and the next few tokens; of a store
        that is empty then, all of them and its addresses."""
        has_forks, has_grown = self._forks.any, any(map(int.__gt__, lengths, self.lengths or (0,) * len(lengths)))
        with self._pool.first():  # else the thread that maps ahead may take note of room for the rows as they were
            super().truncate(lengths)
            if not self.lengths and not self._reserved:
                return self._let_go()
            if self._layout is None:
                return
            if has_grown:  # one row was written; the others may have pages for what comes next
                return self._measure()
            counts = lengths or (0,) * self._layout.batch
            if self._asked:
                self._asked = tuple(map(min, self._asked, map(self._kept, counts)))
            if (memory := self._memory) is None or (not has_forks and self._keeps_all(memory, counts)):
                return
            try:
                self._drop_behind(memory, list(map(self._kept, counts)))
            finally:
                self._measure()

    def _keeps_all(self, memory: _Memory, lengths: Sequence[int]) -> bool:
        """Returns whether no row has a page to give back; then takes note of the room that there is."""
        page = self._pool.driver.granularity // memory.layout.token_bytes
        keeps = all(most - page <= self._kept(length) for most, length in zip(self._mapped, lengths, strict=True))
        if keeps:
            self._capacity = max(lengths) + min(map(int.__sub__, self._mapped, lengths))
        return keeps

    def _let_go(self) -> None:
        self._asked, self._mapped = (), []
        self._memory = self._layout = self._kv_BGCD = None
        self._capacity = self._extent = self.bytes.device = 0

    def _kept(self, length: int) -> int:
        """Tokens that a row of this length has pages for, once some were taken back: all that it asks for ahead."""
        return max(length + 2 * AHEAD, self._reserved)

    def _drop_behind(self, memory: _Memory, tokens: Sequence[int]) -> None:
        changes: dict[int, Change] = {}
        for row, count in enumerate(tokens):
            for at in memory.rows_of(row):
                needed, _ = memory.reservation.up_to(at, memory.bytes_for(count))
                if needed < len(memory.reservation.pages(at)):
                    changes[at] = needed, ()
        if changes:
            memory.reservation.replace(changes)

    @torch.inference_mode(False)
    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, all at once: it shares the full pages, and owns the last one."""
        if not self.lengths or list(rows) == list(range(len(self.lengths))):
            return
        with self._pool.first():
            assert self._memory is not None
            layout, into = self._memory.layout, self._memory
            if len(rows) != layout.batch:
                into = _Memory.of(self._pool, replace(layout, batch=len(rows)), into.context)
            self._asked = ()
            self._fork(rows, into)
            self._forks.select(rows, self.lengths)
            self.lengths = tuple(self.lengths[row] for row in rows)
            self._measure()

    def _fork(self, rows: Sequence[int], into: _Memory) -> None:
        """As `select`, to other memory where it is not that of the store. Nothing changes where it fails."""
        source, lengths = self._memory, self.lengths or (0,) * into.layout.batch
        assert source is not None
        forks = {
            row: [self._fork_of(row, rows, into, half) for half in range(2)]
            for row, of in enumerate(rows)
            if row != of or into is not source or source.shares(row, lengths[row])
        }
        same, token = self._forks.same_as(rows, lengths), into.layout.token_bytes
        with planned(self._pool, [fork for halves in forks.values() for fork in halves]):
            tails = []
            for row, halves in forks.items():
                right, of = min(fork.right(same[row] * token) for fork in halves), rows[row]
                tail = slice(min(right // token, lengths[of]), lengths[of])
                if tail.start < tail.stop:
                    tails.append((row, tail, source.kv_2BGCD[:, of, :, tail].clone()))
            into.reservation.replace({fork.at: fork.change for halves in forks.values() for fork in halves})
        for row, tail, kv_2GSD in tails:
            into.kv_2BGCD[:, row, :, tail].copy_(kv_2GSD)
        if into is not source:
            self._take(into)

    def _fork_of(self, row: int, rows: Sequence[int], into: _Memory, half: int) -> Fork:
        source, of = self._memory, rows[row]
        assert source is not None
        at = into.rows_of(row)[half]
        nbytes = self.lengths[of] * into.layout.token_bytes if self.lengths else 0
        had = source.rows_of(of)[half]
        pages, moves = source.reservation.pages(had), into is not source and of not in rows[:row]
        full = pages if moves else pages[: source.reservation.up_to(had, nbytes)[1]]
        return Fork(at, into.reservation.pages(at) if into is source else (), full, nbytes)
