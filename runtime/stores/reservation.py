"""Addresses for many rows, and the pages that each of them has so far."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from sparsekv.runtime.stores.page_driver import Pages
from sparsekv.runtime.stores.page_pool import PagePool
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES


class Reservation:
    """Rows side by side, each with pages from its first byte on. What a row has beyond them is not there: to read it
    fails. Several rows may have the same pages.

    It is closed when the last one lets go of it: a tensor over the addresses, or the store.

    Args:
        pool: where pages come from and go to. Whoever calls has its lock.
        rows: how many.
        row_bytes: that a row may have, a multiple of the granularity.

    Raises:
        PageError: there are not so many addresses.
    """

    def __init__(self, pool: PagePool, rows: int, row_bytes: int) -> None:
        self.address = pool.driver.reserve(rows * row_bytes)
        self.row_bytes = row_bytes
        self._pool = pool
        self._rows: list[list[Pages]] = [[] for _ in range(rows)]
        closing = partial(_close, pool, self.address, row_bytes, self._rows)
        weakref.finalize(self, OUTSIDE_CAPTURES.run, partial(pool.close_later, closing)).atexit = False

    @property
    def bytes(self) -> int:
        """Of its pages, each counted once."""
        return sum(one.nbytes for one in {id(one): one for row in self._rows for one in row}.values())

    def pages(self, row: int) -> tuple[Pages, ...]:
        """Of a row, in order."""
        return tuple(self._rows[row])

    def ensure(self, needed: Sequence[tuple[int, int]]) -> bool:
        """Maps pages so that each of these rows has at least so many bytes; whether there were any to map.

        Raises:
            PageError, torch.OutOfMemoryError: a call of the driver failed; nothing has changed.
        """
        changes, taken = {}, list[Pages]()
        try:
            for row, nbytes in needed:
                new = self._pool.take(nbytes - total(self._rows[row]))
                taken += new
                if new:
                    changes[row] = [*self._rows[row], *new]
            self.replace(changes)
        except BaseException:
            self._pool.give(taken)
            raise
        return bool(changes)

    def replace(self, changes: Mapping[int, Sequence[Pages]]) -> None:
        """Gives rows other pages. Those that a row has already stay where they are as far as they are the same; behind
        them, one user of the new pages is this, and of the old ones no more.

        Raises:
            PageError: a call of the driver failed; nothing has changed, and users of new pages are the caller's.
        """
        before = {row: list(self._rows[row]) for row in changes}
        if any(common(before[row], pages) < len(before[row]) for row, pages in changes.items()):
            self._pool.driver.settle()
        try:
            for row, pages in changes.items():
                self._put(row, pages)
        except BaseException:
            for row, old in before.items():
                self._put(row, old)
            raise
        for row, pages in changes.items():
            self._pool.give(before[row][common(before[row], pages) :])

    def _put(self, row: int, pages: Sequence[Pages]) -> None:
        driver, had = self._pool.driver, self._rows[row]
        keep = common(had, pages)
        first = self.address + row * self.row_bytes + total(had[:keep])
        at = first + total(had[keep:])
        while len(had) > keep:
            at -= had[-1].nbytes
            driver.unmap(at, had[-1].nbytes)
            had.pop()
        done: list[tuple[int, int]] = []
        try:
            for one in pages[keep:]:
                driver.map(at, one.nbytes, one.handle)
                done.append((at, one.nbytes))
                at += one.nbytes
            if done:
                driver.allow(first, at - first)
        except BaseException:
            for place in done:
                driver.unmap(*place)
            raise
        had += pages[keep:]


def total(pages: Iterable[Pages]) -> int:
    """Bytes."""
    return sum(one.nbytes for one in pages)


def common(some: Sequence[Pages], others: Sequence[Pages]) -> int:
    """How many of the first pages are the same."""
    return next(
        (at for at, pair in enumerate(zip(some, others, strict=False)) if pair[0] is not pair[1]),
        min(len(some), len(others)),
    )


def _close(pool: PagePool, address: int, row_bytes: int, rows: list[list[Pages]]) -> None:
    pool.driver.settle()
    for number, row in enumerate(rows):
        at = address + number * row_bytes
        for one in row:
            pool.driver.unmap(at, one.nbytes)
            at += one.nbytes
        pool.give(row)
    pool.driver.free(address, len(rows) * row_bytes)
