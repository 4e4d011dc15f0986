"""Times launches of one layer beside each other on a GPU: in turn, each with keys that no cache of the device holds,
as between two layers of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Launch = Callable[[], object]

_ROUNDS = 5
_REPLAYS = 15  # launches of some microseconds
_CYCLES_A_US = 2000  # of a device at two GHz
_WAIT_US = 20_000.0  # in which the program issues launches
_ISSUE_US = 3000.0  # in which it issues an index and a sparse launch
_REPLAY_WAIT_US = 200.0  # in which it issues a graph


def launched_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch where many are issued one after another: the longer of the device's time and the
    program's, each by itself."""
    with torch.cuda.device(device):
        issued = [_issued_us(launch) for launch in launches]
        taken = _in_turn(launches, _ROUNDS, device, 2 * max(issued))
    return [max(times) for times in zip(taken, issued, strict=True)]


def device_us(launches: Sequence[Launch], device: torch.device, rounds: int = _ROUNDS) -> list[float]:
    """Median time of each launch on the device."""
    with torch.cuda.device(device):
        return _in_turn(launches, rounds, device, _ISSUE_US)


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
    with torch.cuda.device(device):
        times = _in_turn([graph.replay for graph in graphs], _REPLAYS, device, _REPLAY_WAIT_US)
    for graph in graphs:
        graph.reset()
    return times


def _in_turn(launches: Sequence[Launch], rounds: int, device: torch.device, wait_us: float) -> list[float]:
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(2 * cached, dtype=torch.uint8, device=device)
    for launch in launches:
        launch()
    samples = [[_elapsed_us(launch, other, wait_us) for launch in launches] for _ in range(rounds)]
    return [median(of_launch) for of_launch in zip(*samples, strict=True)]


def _elapsed_us(launch: Launch, other: torch.Tensor, wait_us: float) -> float:
    """The device's time, behind a wait in which the program issues the launch, with `other` in its L2."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait_us * _CYCLES_A_US))
    other.zero_()
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))
