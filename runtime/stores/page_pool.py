"""Pages of a device that no row uses, kept for the next one: creating them takes longer than mapping them."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.stores.page_driver import CudaPages, PageDriver, PageError, Pages, index_of, why_not
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES

AHEAD = 64  # tokens before the end of its pages at which a row gets more
LARGE = 16  # pages of a larger allocation, of which a prompt takes as many as fit
_PATIENCE = 2e-5  # seconds


class PageWarning(UserWarning):
    """Memory of a cache could not be freed; it is tried again."""


class Ahead:
    """A thread of one device that maps pages before they are needed, while the device works on what comes before.

    Args:
        pool: whose pages it maps. Whoever waits for these goes first.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._waiting: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, method: Callable[[], object]) -> None:
        """Calls a method of an object, unless that is gone by then. What fails is tried again by whoever needs it."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="sparsekv-pages", daemon=True)
            self._thread.start()
        self._waiting.put(weakref.WeakMethod(method))

    def _work(self) -> None:
        self._pool.driver.enter()
        while True:
            method: Any = self._waiting.get()()
            while self._pool.waiting:
                time.sleep(_PATIENCE)
            if method is not None:
                with suppress(SparseKVError, RuntimeError):  # also torch's, which empties no cache beside a capture
                    method()
            del method  # keeps no store alive


class PagePool:
    """Pages of a device that no row uses, kept for the next one.

    What maps and unmaps does so outside captures of CUDA graphs, of any thread: unmapping waits for the device.

    Args:
        driver: where they come from.
    """

    def __init__(self, driver: PageDriver) -> None:
        self.driver = driver
        self.bytes = 0  # of free pages
        self.used = 0  # bytes of pages that are mapped
        self._free: dict[int, list[Pages]] = {}
        self.ahead = Ahead(self)
        self.waiting = 0  # who cannot go on without pages
        self._closings: deque[Callable[[], None]] = deque()

    def take(self, nbytes: int) -> list[Pages]:
        """At least so many bytes, in few allocations; one user has them. None where that is no number above 0. The last
        page is a small one: a row that becomes a copy of another has its own in place of it.

        Raises:
            PageError, torch.OutOfMemoryError: there is no memory, not even with an empty pool; nothing was taken.
        """
        page = self.driver.granularity
        count = max(0, -(-nbytes // page))
        taken: list[Pages] = []
        try:
            large = max(0, count - 1) // LARGE
            for size in (LARGE,) * large + (1,) * (count - large * LARGE):
                taken.append(self._take(size * page))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _take(self, nbytes: int) -> Pages:
        free = self._free.get(nbytes)
        if free:
            pages = free.pop()
            self.bytes -= nbytes
            pages.users = 1
        else:
            pages = Pages(self._create(nbytes), nbytes)
        self.used += nbytes
        return pages

    def _create(self, nbytes: int) -> Any:
        try:
            return self.driver.create(nbytes)
        except torch.OutOfMemoryError:
            self.trim()
            self.driver.relieve()
            return self.driver.create(nbytes)

    def give(self, some: Iterable[Pages]) -> None:
        """One user less of each; without any, they wait for the next one."""
        for pages in some:
            pages.users -= 1
            if not pages.users:
                self.used -= pages.nbytes
                self.bytes += pages.nbytes
                self._free.setdefault(pages.nbytes, []).append(pages)

    def make_way(self, missing: int, working: Callable[[], int]) -> None:
        """Before a prompt that takes `missing` bytes of pages and `working` bytes of other memory: free pages that it
        has no need of go back to the driver where these would not fit beside them."""
        if self.bytes > missing and self.driver.available() < working():
            self.trim(missing)

    def trim(self, keep: int = 0) -> bool:
        """Gives free pages back to the driver, all but so many bytes; whether there were any. Also inside a capture,
        for what ran out of memory there."""
        OUTSIDE_CAPTURES.enter(waits=False)
        try:
            before = self.bytes
            for free in list(self._free.values()):  # what garbage collection closes meanwhile may add another size
                while free and self.bytes > keep:
                    pages = free.pop()
                    self.bytes -= pages.nbytes
                    self.driver.release(pages.handle)
            return self.bytes < before
        finally:
            OUTSIDE_CAPTURES.leave()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Outside captures, and before the thread that maps ahead of need. What nobody uses any more is closed."""
        self.waiting += 1
        try:
            OUTSIDE_CAPTURES.enter()
        finally:  # else the thread would wait forever for someone whom Ctrl-C has ended here
            self.waiting -= 1
        try:
            self._close_all()
            yield
        finally:
            OUTSIDE_CAPTURES.leave()

    def close_later(self, closing: Callable[[], None]) -> None:
        """Closes a range that nobody uses any more: now, unless a graph is captured or another thread is at work.

        Args:
            closing: goes on where it stopped when it is called again.
        """
        self._closings.append(closing)
        OUTSIDE_CAPTURES.run(self._close_all)

    def _close_all(self) -> None:
        """Closes what it can; the rest is tried again with the next one."""
        failed: list[Callable[[], None]] = []
        try:
            while self._closings:
                failed.append(self._closings.popleft())
                try:
                    failed[-1]()
                except (PageError, RuntimeError) as error:  # torch's, where somebody else captures a graph
                    warnings.warn(f"memory that no cache uses is not free yet: {error}", PageWarning, stacklevel=2)
                else:
                    failed.pop()
        finally:
            self._closings += failed


def pool_of(device: torch.device) -> PagePool | None:
    """The one pool of a device; None where there is no virtual memory."""
    return None if why_not(device) else _pool_of(index_of(device))


def page_bytes(device: torch.device) -> int:
    """Returns the bytes of a page of a device; 0 where there is no virtual memory."""
    pool = pool_of(device)
    return 0 if pool is None else pool.driver.granularity


@cache
def _pool_of(index: int) -> PagePool:
    return PagePool(CudaPages(torch.device("cuda", index)))
