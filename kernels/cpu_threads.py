"""Work on several heads side by side, each on one thread.

Sparse work is many operations of a tenth of a millisecond to a few. Spread over all threads, each of them ends with a
wait for the slowest, which on a busy machine is a time slice of its scheduler.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")

THREAD_ELEMENTS = 1 << 23  # read in three milliseconds; a new thread begins with neither memory nor scratch buffers


def for_each(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """`work` on every item, as many at once as torch has threads; no more than one of them works on an item.

    With fewer items than threads, one after the other by all threads. The threads are made anew each time, so that
    there are none to lose in a fork. Until it returns, threads that begin to use torch elsewhere get one each.
    Interrupted (Ctrl-C), it returns once no item is being worked on.

    Raises:
        Whatever `work` raises, of the first item for which it does.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < threads:
        for item in items:
            work(item)
        return
    _side_by_side(work, items, threads)


def spread(work: Callable[[Item], None], items: Sequence[Item], *, elements: int, device: torch.device) -> None:
    """`work` on every item, one thread each: the caller's where all of it is small, else as many as pay.

    For the layers of a decode step, of which there are many and each short. On a busy machine an operation that all
    threads share takes a time slice, however small it is. As `for_each` otherwise; a single item gets one thread.

    Args:
        elements: that all items together read from memory, or as much work.
        device: where they lie. What goes to a GPU stays on the caller's thread, and so on its stream.
    """
    threads = min(torch.get_num_threads(), len(items), elements // THREAD_ELEMENTS)
    if threads > 1 and device.type == "cpu":
        _side_by_side(work, items, threads)
        return
    with one_thread():
        for item in items:
            work(item)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside it, operations of the calling thread are not spread over others."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def _side_by_side(work: Callable[[Item], None], items: Sequence[Item], at_once: int) -> None:
    threads, crew = torch.get_num_threads(), _Crew(work, items)
    try:
        for _ in range(at_once):
            threading.Thread(target=crew.work, name="sparsekv").start()
        crew.wait()
    finally:
        crew.stop()
        torch.set_num_threads(threads)  # a worker's own number is also what new threads would start with
    if crew.failed:
        raise crew.failed[min(crew.failed)]


class _Crew(Generic[Item]):
    """The state that the threads of one call share.

    Not a ThreadPoolExecutor, which joins its threads: a join that Ctrl-C interrupts takes its thread for ended
    (CPython 3.11 and 3.12). The interpreter then goes down while it computes, and the process is aborted. Here nothing
    is joined. A thread counts as running before it first calls torch and until after it last did; it does not begin
    once the crew has stopped.
    """

    def __init__(self, work: Callable[[Item], None], items: Sequence[Item]) -> None:
        self.failed: dict[int, BaseException] = {}
        self._work, self._left = work, deque(enumerate(items))
        self._running, self._stopped = 0, False
        self._changed = threading.Condition()
        self._inference = torch.is_inference_mode_enabled()

    def work(self) -> None:
        """One thread: item after item, until none is left."""
        with self._changed:
            if self._stopped:
                return
            self._running += 1
        try:
            torch.set_num_threads(1)
            with torch.inference_mode(self._inference), torch.no_grad():  # both are the caller's thread's own
                self._empty()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _empty(self) -> None:
        while True:
            try:
                number, item = self._left.popleft()
            except IndexError:
                return
            try:
                self._work(item)
            except BaseException as error:
                self.failed[number] = error
                self._left.clear()

    def wait(self) -> None:
        """Returns when all items are done or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left and not self._running)

    def stop(self) -> None:
        """Begins no further item, and returns when none is being worked on."""
        self._left.clear()
        with self._changed:
            self._stopped = True
        self.wait()
