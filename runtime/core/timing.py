"""Times launches of one layer beside each other on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

Launch = Callable[[], object]

_ROUNDS = 3
_IN_A_ROW = 2  # launches: what the program needs to issue one hides behind another, as between the layers of a model
_REPLAYS = 10


def launched_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch where the program issues one after another: the longer of the device's time and the
    program's."""
    return _in_turn([_repeated(launch, _IN_A_ROW) for launch in launches], _IN_A_ROW, device)


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


def _in_turn(launches: Sequence[Launch], times: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        for launch in launches:
            launch()
        samples = [[_elapsed_us(launch) / times for launch in launches] for _ in range(_ROUNDS)]
    return [median(of_launch) for of_launch in zip(*samples, strict=True)]


def _elapsed_us(launch: Launch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))
