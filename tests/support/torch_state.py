"""What torch does meanwhile: poison in new memory, fewer threads, few elements at once, and how much it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from unittest import mock

import torch
from torch.profiler import profile

from sparsekv.kernels.index import vertical_slash
from sparsekv.kernels.topk import blocks


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN and huge numbers, so that what is never written shows in what is read."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads: calls as small as those of most tests only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def small_blocks(elements: int = 1) -> Iterator[None]:
    """Temporaries of index builders and scores hold about so many elements, as on prompts a thousand times longer."""
    with (
        mock.patch.object(blocks, "__defaults__", (elements,)),
        mock.patch.object(vertical_slash, "BLOCK_ELEMENTS", elements),
    ):
        yield


def most_allocated(call: Callable[[], object]) -> int:
    """Most bytes that a call holds at once beyond those before it, temporaries inside operations included."""
    with profile(profile_memory=True) as recorded:
        call()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())), default=0)
