"""Antidiagonal tile scores by a Triton kernel, a drop-in for tile_scores.tile_scores("antidiagonal", ...).

Used where `build_index` builds by Triton. Right in the interpreter and compiled for Hopper and Ampere; not yet run on a
GPU.

Shapes as in call.py; R row tiles of one block, M key tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton

from sparsekv.kernels.index.call import IndexCall, ceil_div
from sparsekv.kernels.index.device.antidiagonal import antidiagonal_kernel
from sparsekv.kernels.index.tile_scores import STRIDE, TileScores, tiles_up_to
from sparsekv.kernels.kept import on_device
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import (
    LONGEST_ROW_STRIDE,
    check_device,
    check_head_size,
    check_row_strides,
    head_size_obstacle,
    interpreting,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel cuts its work: strided rows of a program, strided keys of a step, warps, pipeline depth.

    Rows and keys are multiples of the 8 that a tile of 128 has.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# Everything that is to be tuned: the largest padded head size that a row is for, and its launch. None has been timed on
# a GPU yet. As compiled by Triton 3.7 they spill 8 bytes at most and share 192 KiB on Hopper, 48 KiB elsewhere.
_HOPPER = ((128, Launch(128, 128, 8, 3)), (256, Launch(128, 64, 8, 2)))
_AMPERE = ((128, Launch(64, 64, 4, 2)), (256, Launch(64, 32, 8, 2)))
# Without tensor cores every product is unrolled into registers; this only has to be right.
_FLOAT32 = ((256, Launch(32, 32, 4, 1)),)


def takes(call: IndexCall) -> bool:
    """Whether the kernel takes this head size and layout."""
    fits = head_size_obstacle(call.q_BHSD.shape[3]) is None
    return fits and all(x.stride(3) == 1 and x.stride(2) < LONGEST_ROW_STRIDE for x in (call.q_BHSD, call.k_BGKD))


def tile_scores_by_triton(heads: Sequence[int], call: IndexCall) -> Iterator[TileScores]:
    """Antidiagonal scores of these heads, all heads and a block of row tiles in one launch.

    Takes any strides of batch, heads and tokens and copies neither queries nor keys; what it yields holds about
    topk.BLOCK_ELEMENTS elements. Nothing waits for the device.

    Args:
        heads: query heads, ascending.
        call: the layer's queries and keys; elements of a row lie side by side.

    Raises:
        BackendError: the tensors are not where Triton runs, or it does not take the head size.
        ShapeError: tokens lie too far apart.
    """
    check_device(call.q_BHSD)
    check_head_size(call.q_BHSD.shape[3])
    check_row_strides(call.q_BHSD, call.k_BGKD)
    heads_h = on_device(list(heads), call.device, torch.int32)
    past_B, lengths_B = on_device([call.chunk.past, call.chunk.lengths], call.device, torch.int32)
    for part in blocks(call.row_tiles, call.batch * len(heads) * call.key_tiles):
        shape = (call.batch, len(heads), part.stop - part.start, tiles_up_to(part, call))
        scores_BhRM = torch.zeros(shape, dtype=torch.float32, device=call.device)
        with torch.cuda.device_of(scores_BhRM):
            _launch(scores_BhRM, part.start, heads_h, past_B, lengths_B, call)
        yield TileScores(tuple(range(len(heads))), part, scores_BhRM)


def _launch(
    scores_BhRM: torch.Tensor,
    first_tile: int,
    heads_h: torch.Tensor,
    past_B: torch.Tensor,
    lengths_B: torch.Tensor,
    call: IndexCall,
) -> None:
    q_BHSD, k_BGKD = call.q_BHSD, call.k_BGKD
    batch, places, row_tiles, key_tiles = scores_BhRM.shape
    block_d, per_tile = triton.next_power_of_2(q_BHSD.shape[3]), call.tile.query // STRIDE
    launch = launch_for(call.device, q_BHSD.dtype, block_d)
    antidiagonal_kernel[(ceil_div(row_tiles * per_tile, launch.rows), places, batch)](
        q_BHSD,
        k_BGKD,
        scores_BhRM,
        heads_h,
        past_B,
        lengths_B,
        *q_BHSD.stride()[:3],
        *k_BGKD.stride()[:3],
        call.scale / STRIDE * math.log2(math.e),
        call.window or 0,
        first_tile,
        row_tiles,
        key_tiles,
        places,
        GROUP=call.group_size,
        S=STRIDE,
        D=q_BHSD.shape[3],
        BLOCK_D=block_d,
        TILE_X=per_tile,
        TILE_N=call.tile.key // STRIDE,
        BLOCK_X=launch.rows,
        BLOCK_N=launch.keys,
        STAGES=launch.stages,
        WINDOWED=call.window is not None,
        PRECISION="ieee",
        UPCAST=interpreting() and q_BHSD.dtype == torch.bfloat16,
        num_warps=launch.warps,
    )


def launch_for(device: torch.device, dtype: torch.dtype, block_d: int) -> Launch:
    """The launch for this GPU, dtype and padded head size; the interpreter takes the smallest, to have many steps."""
    return next(launch for limit, launch in _rows_of(device, dtype) if block_d <= limit)


def _rows_of(device: torch.device, dtype: torch.dtype) -> tuple[tuple[int, Launch], ...]:
    if device.type != "cuda" or dtype == torch.float32:
        return _FLOAT32
    major, _ = torch.cuda.get_device_capability(device)
    # 9 and 10 are the data centre parts; 12 has the shared memory of 8.6.
    return _HOPPER if major in (9, 10) and torch.version.hip is None else _AMPERE
