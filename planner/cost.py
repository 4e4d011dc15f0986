"""Measuring what attention costs on this device: a few timed launches, and lines fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from sparsekv.kernels.dispatch import choose_backend
from sparsekv.planner.cost_data import DeviceCost, HeadShape, Line, Timing
from sparsekv.planner.place import device_name, dtype_name, versions
from sparsekv.planner.pricing.timings import PATTERNS, Bench
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import BackendName

# Work of the largest dense launch that is timed, in floating-point operations: a fraction of a second either way.
_MOST_WORK = {"cpu": 1.2e10, "cuda": 2e14}
_SHORTEST = 512
# Short lengths say what a launch costs, long ones what work costs. Work of an index grows with the length and with its
# square: three lengths tell these apart.
_APART = 4
_FEWEST = 3
_ROUND = 128


def measure_cost(
    shape: HeadShape,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: TileShape,
    backend: str = "auto",
    offload: bool = False,
    progress: Progress | None = None,
) -> DeviceCost:
    """Times dense and sparse attention, index building and decode on this device, and fits lines to them.

    Lengths too long to time quickly are left to the fit.

    Args:
        shape: the heads of one layer.
        lengths: context lengths the plan is for.
        device: where to measure.
        dtype: of queries, keys and values.
        tile: the plan's tile shape.
        backend: of sparse prefill, or "auto".
        offload: time decode over rows in host memory too.
        progress: where to report.

    Raises:
        BackendError: the backend cannot run here.
    """
    choice = choose_backend(device, dtype, shape.head_dim, backend, tile)
    bench = Bench(shape, device, dtype, tile, choice.name, offload)
    timed = timed_lengths(shape, lengths, device.type)
    timings: list[Timing] = []
    with (progress or NoProgress()).stage("cost", total=len(timed)) as step:
        for length in timed:
            timings.extend(bench.run(length))
            step.advance(note=f"{length} tokens")
    return DeviceCost(
        device=device_name(device),
        dtype=dtype_name(dtype),
        backend=cast(BackendName, choice.name),
        shape=shape,
        tile=tile,
        versions=versions(),
        prefill_dense=fit_line(timings, "dense prefill"),
        prefill_sparse=fit_line(timings, "sparse prefill"),
        index={name: fit_line(timings, f"index {name}") for name in PATTERNS},
        decode_dense=fit_line(timings, "dense decode"),
        decode_sparse=fit_line(timings, "sparse decode"),
        decode_choose=fit_line(timings, "choose"),
        decode_host=fit_line(timings, "host decode") if offload else None,
        timings=tuple(timings),
    )


def timed_lengths(shape: HeadShape, lengths: Sequence[int], device_type: str) -> tuple[int, ...]:
    """From few tokens up to the longest that is timed quickly, but not beyond the longest of the plan."""
    most = math.isqrt(int(_MOST_WORK.get(device_type, _MOST_WORK["cpu"]) / (2 * shape.heads * shape.head_dim)))
    longest = max(2 * _SHORTEST, min(max(lengths), most) // _SHORTEST * _SHORTEST)
    count = max(_FEWEST, 1 + round(math.log(longest / _SHORTEST, _APART)))
    spaced = np.geomspace(_SHORTEST, longest, count)
    return tuple(sorted({round(float(length) / _ROUND) * _ROUND for length in spaced}))


def fit_line(timings: Sequence[Timing], what: str) -> Line:
    """Least squares of relative errors with non-negative prices: short launches count as much as long ones."""
    from scipy.optimize import nnls

    own = [timing for timing in timings if timing.what == what]
    features = np.array([timing.features for timing in own])
    us = np.array([timing.us for timing in own])
    size = np.maximum(features.max(0), 1e-12)
    prices, _ = nnls(features / size / us[:, None], np.ones(len(own)))
    return Line(prices=tuple(float(price) for price in prices / size))
