"""Block sizes of the Triton prefill kernel, by GPU generation and head size.

Chosen so that registers hold (on Hopper, head size 256 spills a few) and shared memory fits: 160 KiB on Hopper at head
size 128, under 99 KiB elsewhere. benchmarks/kernel_resources.py shows both for GPUs that are not at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel cuts the work: rows and keys of a step, columns gathered at once, warps, pipeline depths."""

    block_m: int
    block_n: int
    block_c: int
    warps: int
    stages: int
    column_stages: int


# The largest padded head size that a row is for, and its launch; ascending.
_HOPPER = ((128, Launch(128, 128, 64, 8, 2, 3)), (256, Launch(128, 64, 32, 8, 2, 3)))
_AMPERE = ((128, Launch(64, 64, 32, 4, 2, 2)), (256, Launch(32, 32, 32, 4, 2, 2)))
_ROCM = ((128, Launch(64, 32, 32, 4, 1, 1)), (256, Launch(32, 32, 32, 4, 1, 1)))
# Without tensor cores every product is unrolled into registers; this only has to be right.
_FLOAT32 = ((128, Launch(32, 32, 32, 4, 1, 1)), (256, Launch(16, 32, 32, 4, 1, 1)))


def launch_for(device: torch.device, dtype: torch.dtype, block_d: int, tile: TileShape) -> Launch:
    """The launch for this GPU, dtype and padded head size; its blocks divide the tile."""
    rows = _FLOAT32 if dtype == torch.float32 else _rows_of(device)
    launch = next(launch for limit, launch in rows if block_d <= limit)
    return fit(launch, tile)


def fit(launch: Launch, tile: TileShape) -> Launch:
    """Cuts the blocks to the tile: a kernel may subdivide tiles, never join them."""
    block_m = min(launch.block_m, tile.query)
    warps = min(launch.warps, 4) if block_m <= 64 else launch.warps  # a warp group multiplies 64 rows
    return replace(launch, block_m=block_m, block_n=min(launch.block_n, tile.key), warps=warps)


def _rows_of(device: torch.device) -> tuple[tuple[int, Launch], ...]:
    if device.type != "cuda":
        return _AMPERE  # the interpreter: any block size will do
    if torch.version.hip is not None:
        return _ROCM
    return table_of(torch.cuda.get_device_capability(device)[0])


def table_of(major: int) -> tuple[tuple[int, Launch], ...]:
    """The launches for NVIDIA GPUs of this major compute capability, by the largest padded head size."""
    # 9 and 10 are the data centre parts; 12 has the shared memory of 8.6.
    return _HOPPER if major in (9, 10) else _AMPERE
