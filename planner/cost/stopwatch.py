"""Timing launches on one device.

On CUDA a launch is timed behind a kernel that waits, so that the program has issued it before the device begins: the
time is the device's own, however slow the program is. What the program needs to issue a launch is timed by itself, as
a device that is faster than that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Launch = Callable[[], object]

SECONDS_A_TIMING = 0.03
_FEWEST, _MOST = 3, 100  # samples of a launch
_WARM_SECONDS = 0.1  # of work before the first sample, until clocks have risen
_CYCLES_A_US = 2000  # of a device at two GHz; a guess that is doubled where it is too short
_MOST_WAIT_US = 20_000
_LATE_ROUNDS = 8  # in which the device was faster than the program, before the wait is long enough
_ISSUED = 5  # launches that are issued in a row, to time the program
_LONG_SECONDS = 0.01  # of a launch, beside which issuing it is nothing
_VERY_LONG_SECONDS = 4.0  # of a round


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times launches in microseconds. All are taken in turn, so that clocks and neighbours are alike for each."""

    device: torch.device

    @property
    def processors(self) -> int:
        """Multiprocessors of a GPU; 1 of a CPU."""
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def in_turn(self, launches: Sequence[Launch]) -> list[float]:
        """Returns what each launch takes on the device: medians on CUDA. On a CPU, where other programs take time
        slices, the fastest of several is what the work takes."""
        seconds = self._warm(launches)
        rounds = _rounds(len(launches), sum(seconds))
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return _on_cuda(launches, rounds)
        return [min(samples) for samples in self._walled(launches, rounds, [1] * len(launches))]

    def queued(self, launches: Sequence[Launch]) -> list[float]:
        """Returns what each launch takes where many are issued one after another: the longer of the device's time and
        the program's, as in a prompt whose attention is all there is to it."""
        if self.device.type != "cuda":
            return self.in_turn(launches)
        seconds = self._warm(launches)
        counts = [max(1, min(_ISSUED, round(_LONG_SECONDS / one))) for one in seconds]
        rounds = _rounds(len(launches), sum(count * one for count, one in zip(counts, seconds, strict=True)))
        return [median(samples) for samples in self._walled(launches, rounds, counts)]

    def issue(self, launch: Launch) -> float:
        """Returns what the program needs to issue a launch; 0 on a CPU, where the program computes it."""
        if self.device.type != "cuda":
            return 0.0
        with torch.cuda.device(self.device):
            launch()
            found = []
            for _ in range(_FEWEST):
                torch.cuda.synchronize()
                torch.cuda._sleep(_MOST_WAIT_US * _CYCLES_A_US)
                started = time.perf_counter()
                for _ in range(_ISSUED):
                    launch()
                found.append((time.perf_counter() - started) / _ISSUED)
            torch.cuda.synchronize()
        return 1e6 * min(found)

    def step(self, launches: Sequence[Launch]) -> float:
        """Returns what one of these takes as part of a decode step: on a GPU in a CUDA graph, as steps run there."""

        def all_of_them() -> None:
            for launch in launches:
                launch()

        if self.device.type != "cuda":
            return self.in_turn([all_of_them])[0] / len(launches)
        from triton.testing import do_bench_cudagraph

        with torch.cuda.device(self.device):
            all_of_them()
            torch.cuda.synchronize()  # the stream that times does not wait for this one
            timed_ms = do_bench_cudagraph(all_of_them, rep=round(1e3 * SECONDS_A_TIMING), return_mode="median")
            return float(timed_ms) * 1e3 / len(launches)

    def _warm(self, launches: Sequence[Launch]) -> list[float]:
        """Runs launches until they are compiled and clocks have risen; returns the seconds that each took last."""
        found = self._walled(launches, 1, [1] * len(launches))
        spent, enough = 0.0, min(_WARM_SECONDS, len(launches) * SECONDS_A_TIMING)
        while spent < enough:
            found = self._walled(launches, 1, [1] * len(launches))
            spent += max(1e-6 * sum(samples[0] for samples in found), 1e-6)
        return [max(1e-6 * samples[0], 1e-9) for samples in found]

    def _walled(self, launches: Sequence[Launch], rounds: int, counts: Sequence[int]) -> list[list[float]]:
        """Samples by the clock on the wall, of so many launches each."""
        found: list[list[float]] = [[] for _ in launches]
        for _ in range(rounds):
            for launch, count, samples in zip(launches, counts, found, strict=True):
                self._wait()
                started = time.perf_counter()
                for _ in range(count):
                    launch()
                self._wait()
                samples.append(1e6 * (time.perf_counter() - started) / count)
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rounds(launches: int, seconds: float) -> int:
    """Returns how often all are timed, where one round takes so many seconds: once where that is long."""
    if seconds > _VERY_LONG_SECONDS:
        return 1
    return max(_FEWEST, min(_MOST, round(launches * SECONDS_A_TIMING / seconds)))


def _on_cuda(launches: Sequence[Launch], rounds: int) -> list[float]:
    """Medians between events, of the samples in which the device had not yet come to the launch when it was issued.

    A program that is slower than the longest wait is in the time of its launch.
    """
    waits_us = [500.0] * len(launches)
    behind: list[list[float]] = [[] for _ in launches]
    late: list[list[float]] = [[] for _ in launches]
    for _ in range(rounds + _LATE_ROUNDS):
        for number, launch in enumerate(launches):
            if len(behind[number]) == rounds:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(round(waits_us[number] * _CYCLES_A_US))
            start.record()
            launch()
            was_late = start.query()
            end.record()
            end.synchronize()
            (late if was_late else behind)[number].append(1e3 * start.elapsed_time(end))
            if was_late:
                waits_us[number] = min(2 * waits_us[number], _MOST_WAIT_US)
    return [median(samples or others) for samples, others in zip(behind, late, strict=True)]
