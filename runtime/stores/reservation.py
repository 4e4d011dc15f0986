"""Addresses for many rows, and the pages that each of them has so far. Rows that become copies share full pages."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import is_

from sparsekv.runtime.stores.page_pool import PageError, PagePool, Pages

Change = tuple[int, Sequence[Pages]]
"""Of a row: how many of its first pages stay, and those that it has behind them from then on."""


class Reservation:
    """Rows side by side, each with pages from its first byte on. What a row has beyond them is not there: to read it
    fails. Several rows may have the same pages.

    It is closed when the last one lets go of it: a tensor over the addresses, or the store.

    Args:
        pool: where pages come from and go to. Whoever calls is `first` there, or outside captures.
        row_bytes: that a row may have, a multiple of the granularity.

    Raises:
        PageError: there are not so many addresses.
    """

    def __init__(self, pool: PagePool, rows: int, row_bytes: int) -> None:
        self.address = pool.driver.reserve(rows * row_bytes)
        self.row_bytes = row_bytes
        self._pool = pool
        self._rows: list[list[Pages]] = [[] for _ in range(rows)]
        self._ends = [self.address + row * row_bytes for row in range(rows)]  # where the next page goes
        self._mapped: dict[int, Pages] = {}  # by address
        self._places: Counter[Pages] = Counter()  # where each of them is
        self._bytes = 0
        closing = partial(_close, pool, self.address, rows * row_bytes, self._mapped)
        weakref.finalize(self, pool.close_later, closing).atexit = False

    @property
    def bytes(self) -> int:
        return self._bytes

    def pages(self, row: int) -> Sequence[Pages]:
        return self._rows[row]

    def size(self, row: int) -> int:
        return self._ends[row] - self.address - row * self.row_bytes

    def up_to(self, row: int, nbytes: int) -> tuple[int, int]:
        """First pages of a row that have its first bytes, and those of them that have no others."""
        pages, end = self._rows[row], self.size(row)
        count = len(pages)
        while count and end - pages[count - 1].nbytes >= nbytes:
            count -= 1
            end -= pages[count].nbytes
        return count, count - (end > nbytes)

    def shares(self, row: int, begin: int) -> bool:
        """Returns whether other rows have pages that this one's bytes from `begin` on are in."""
        return any(page.users > 1 for page in self._rows[row][self.up_to(row, begin)[1] :])

    def ensure(self, needed: Sequence[tuple[int, int]]) -> None:
        """Maps pages until these rows have so many bytes. All or, where the driver fails, nothing."""
        changes: dict[int, Change] = {}
        try:
            for row, nbytes in needed:
                if new := self._pool.take(nbytes - self.size(row)):
                    changes[row] = len(self._rows[row]), new
            self.replace(changes)
        except BaseException:
            self._pool.give(page for _, new in changes.values() for page in new)
            raise

    def replace(self, changes: Mapping[int, Change]) -> None:
        """Gives rows other pages, of which this is one user, and lets go of those before. Where the driver fails
        nothing has changed, and users of new pages are the caller's."""
        before = {row: list(self._rows[row]) for row in changes}
        if any(keep < len(before[row]) for row, (keep, _) in changes.items()):
            self._pool.driver.settle()
        try:
            for row, change in changes.items():
                self._put(row, *change)
        except BaseException:
            for row, old in before.items():
                keep = common(self._rows[row], old)
                self._put(row, keep, old[keep:])
            raise
        self._pool.give(page for row, (keep, _) in changes.items() for page in before[row][keep:])

    def _put(self, row: int, keep: int, pages: Sequence[Pages]) -> None:
        driver, had = self._pool.driver, self._rows[row]
        while len(had) > keep:
            at = self._ends[row] - had[-1].nbytes
            driver.unmap(at, had[-1].nbytes)
            self._remove(row, at)
        begin = self._ends[row]
        try:
            for page in pages:
                driver.map(self._ends[row], page.nbytes, page.handle)
                self._add(row, page)
            if pages:
                driver.allow(begin, self._ends[row] - begin)
        except BaseException:
            self._put(row, keep, ())
            raise

    def _add(self, row: int, page: Pages) -> None:
        self._bytes += 0 if self._places[page] else page.nbytes
        self._places[page] += 1
        self._mapped[self._ends[row]] = page
        self._rows[row].append(page)
        self._ends[row] += page.nbytes

    def _remove(self, row: int, at: int) -> None:
        page = self._mapped.pop(at)
        self._rows[row].pop()
        self._ends[row] = at
        self._places[page] -= 1
        if not self._places[page]:
            del self._places[page]
            self._bytes -= page.nbytes


def total(pages: Iterable[Pages]) -> int:
    return sum(page.nbytes for page in pages)


def common(pages: Sequence[Pages], others: Sequence[Pages]) -> int:
    return [*map(is_, pages, others), False].index(False)


def _close(pool: PagePool, address: int, nbytes: int, mapped: dict[int, Pages]) -> None:
    """Frees all that it can. Raises PageError where that is not all, and is called again for the rest."""
    pool.driver.settle()
    failed = ""
    for at, page in list(mapped.items()):
        try:
            pool.driver.unmap(at, page.nbytes)
        except PageError as error:
            failed = str(error)  # itself would keep the frames of all callers alive, and what they refer to
        else:
            pool.give([mapped.pop(at)])
    if failed:
        raise PageError(failed)
    pool.driver.free(address, nbytes)


@dataclass(slots=True)
class Fork:
    """A row of a reservation that becomes a copy."""

    at: int
    own: Sequence[Pages]
    full: Sequence[Pages]  # pages of its source, which may be itself, that are not written to any more
    nbytes: int  # that count of that row
    change: Change = (0, ())  # what becomes of its pages

    def right(self, same: int) -> int:
        """First bytes that are right without a copy, where `same` first bytes of the row are those of its source."""
        return max(total(self.full), min(same, total(self.own[: self.change[0]])))


@contextmanager
def planned(pool: PagePool, forks: Sequence[Fork]) -> Iterator[None]:
    """Inside it, every fork has its `change`, with the users of the pages counted; undone where that fails."""
    shared = [page for fork in forks for page in fork.full]
    for page in shared:
        page.users += 1
    taken: list[Pages] = []
    had: list[Pages] = []  # of `shared`, in the same row as before
    try:
        for fork in forks:
            keep, rest = common(fork.own, fork.full), list[Pages]()
            had += fork.full[:keep]
            if keep == len(fork.full):
                rest += takewhile(lambda page: page.users == 1, fork.own[keep:])
            new = pool.take(fork.nbytes - total(fork.full) - total(rest))
            taken += new
            fork.change = keep + len(rest), [*fork.full[keep:], *new]
        yield
    except BaseException:
        pool.give([*shared, *taken])
        raise
    pool.give(had)
