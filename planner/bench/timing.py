"""Timing calls against one another in one process, and what to do when one does not fit in memory.

On a GPU a sample is the median of `triton.testing.do_bench`, which clears the cache between runs, or of one run where a
run is long; on a CPU it is one run. Samples are taken in rounds, every other round backwards, so that what disturbs
the machine meets all calls alike; the result is the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]

_LONG_MS = 100.0  # runs longer than this need no repetition to be timed, and no cleared cache
_SAMPLE_MS = 200  # that a sample of short runs takes
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def measure(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of each call, medians over `rounds`. Each runs once before: compilation is not counted.

    Raises:
        Whatever a call raises.
    """
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            samples[name].append(once(calls[name], device))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def once(call: Call, device: torch.device) -> float:
    """Milliseconds of one sample; the call has run before."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        milliseconds = _event_ms(call)
        if milliseconds > _LONG_MS:
            return milliseconds
        import triton

        return float(triton.testing.do_bench(call, warmup=_SAMPLE_MS // 8, rep=_SAMPLE_MS, return_mode="median"))


def _event_ms(call: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def wait_for(device: torch.device) -> None:
    """Until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on whatever device."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in text for word in _MEMORY_WORDS)


def in_short(error: BaseException) -> str:
    """An exception in a line, for a note."""
    if is_out_of_memory(error):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.160}"


def free_memory(device: torch.device) -> None:
    """Gives back what the allocator holds on to, so that the next case meets the whole device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
