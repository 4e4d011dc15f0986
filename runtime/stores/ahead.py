"""A thread that maps pages before they are needed, while the device works on what comes before."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.stores.page_driver import PageDriver

AHEAD = 64  # tokens before the end of its pages at which a row gets more


_PATIENCE = 2e-5  # seconds


class Pool(Protocol):
    """Holds what it asks of the pool."""

    driver: PageDriver
    waiting: int


class Ahead:
    """The thread of one device.

    Args:
        pool: whose pages it maps. Whoever waits for these goes first.
    """

    def __init__(self, pool: Pool) -> None:
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
