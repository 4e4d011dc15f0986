"""Times launches of one layer beside each other on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Launch = Callable[[], object]

_ROUNDS = 3
_IN_A_ROW = 2  # launches, as of neighbouring layers
_REPLAYS = 10
_CYCLES_A_US = 2000  # of a device at two GHz
_WAIT_US = 20_000.0  # in which the program issues launches


def launched_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch where many are issued one after another: the longer of the device's time and the
    program's, each by itself."""
    repeated = [_repeated(launch, _IN_A_ROW) for launch in launches]
    with torch.cuda.device(device):
        issued = [_issued_us(launch) for launch in repeated]
        wait_us = 2 * max(issued)
        taken = _in_turn(repeated, _IN_A_ROW, device, wait_us)
    return [max(device_us, us / _IN_A_ROW) for device_us, us in zip(taken, issued, strict=True)]


def _issued_us(launch: Launch) -> float:
    """The program's time for a launch that the device does not begin meanwhile."""
    launch()  # compiles
    samples = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_WAIT_US * _CYCLES_A_US))
        started = time.perf_counter()
        launch()
        samples.append(1e6 * (time.perf_counter() - started))
    return min(samples)


def replayed_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch as part of a captured step."""
    graphs = []
    for launch in launches:
        launch()  # compiles; what is captured may not
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        graphs.append(graph)
    times = _in_turn([_repeated(graph.replay, _REPLAYS) for graph in graphs], _REPLAYS, device)
    for graph in graphs:
        graph.reset()
    return times


def _repeated(launch: Launch, times: int) -> Launch:
    def run() -> None:
        for _ in range(times):
            launch()

    return run


def _in_turn(launches: Sequence[Launch], times: int, device: torch.device, wait_us: float = 0.0) -> list[float]:
    with torch.cuda.device(device):
        for launch in launches:
            launch()
        samples = [[_elapsed_us(launch, wait_us) / times for launch in launches] for _ in range(_ROUNDS)]
    return [median(of_launch) for of_launch in zip(*samples, strict=True)]


def _elapsed_us(launch: Launch, wait_us: float) -> float:
    """The device's time, behind a wait in which the program issues the launch."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait_us * _CYCLES_A_US))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))
