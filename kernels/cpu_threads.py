"""Work on several heads side by side, each on one thread.

Sparse work is many operations of a tenth of a millisecond to a few. Spread over all threads, each of them ends with a
wait for the slowest, which on a busy machine is a time slice of its scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """`work` on every item, as many at once as torch has threads; no more than one of them works on an item.

    With fewer items than threads, one after the other by all threads. The threads are made anew each time, so that
    there are none to lose in a fork. Until it returns, threads that begin to use torch elsewhere get one each.

    Raises:
        Whatever `work` raises, of the first item for which it does.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < threads:
        for item in items:
            work(item)
        return
    inference = torch.is_inference_mode_enabled()

    def alone(item: Item) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both are the caller's thread's own
            work(item)

    try:
        with ThreadPoolExecutor(threads, "sparsekv", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(alone, items):
                pass
    finally:
        torch.set_num_threads(threads)  # a worker's own number is also what new threads would start with
