"""The cuts of the index kernels' work: everything that is to be tuned, in one table.

Register and memory figures are what ptxas reports for head size 128. On an H200, 32 heads at 32K tokens, no size tried
instead was faster by more than two timings of the same sizes differ: 0.61 and
0.67 ms, of a build that the host bounds. No other GPU has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparsekv.kernels.index.layout import IndexCall
from sparsekv.kernels.triton_support import LONGEST_ROW_STRIDE, head_size_obstacle

LARGEST_SAMPLE = 256  # queries of a head: four strips of 64 rows
LARGEST_HEAD = 128  # with 256, four strips would fill the shared memory of most GPUs
LONGEST = 2_000_000  # tokens: choices.py counts in 21 bits
PADDING = 16  # rows of scores are padded to a multiple of this
MOST_RANGES = 64  # partial results of a row that the second pass joins


@dataclass(frozen=True, slots=True)
class Strips:
    """The sampled queries of a head: `count` strips of `rows`; a strip of several heads is one product."""

    rows: int
    count: int


@dataclass(frozen=True, slots=True)
class KeyPass:
    heads: int  # stacked in a product, at most
    keys: int  # of a step
    least_range: int  # keys of a program, at least
    stages: int  # of the pipeline that loads them
    warps: int = 4


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: a cheap key of caches
class Sizes:
    """One row of the table. Passes by number of strips; blocks in elements, with the warps that work on them."""

    stats: dict[int, KeyPass]
    lines: dict[int, KeyPass]
    lines_at_once: int = 4  # strips of a launch of the second pass, at most: where more would spill, launches follow
    select_block: int = 8192
    select_warps: int = 32
    crossings_block: int = 16  # tile diagonals
    crossings_warps: int = 4
    diagonals_block: int = 2048
    diagonals_warps: int = 8
    rows_block: int = 8  # row tiles
    rows_tiles: int = 64
    rows_words: int = 8
    rows_warps: int = 4
    pool_warps: int = 4
    products_block: int = 64  # row tiles and key tiles
    products_numbers: int = 32  # of a head
    products_warps: int = 4
    choose_block: int = 4  # row tiles
    choose_tiles: int = 512
    choose_warps: int = 4


# Four warps and at most 255 registers leave room for two programs on a multiprocessor, of which one computes while the
# other multiplies. The first pass stacks two heads of a KV head (166 registers, 80 KiB): each block of keys serves
# both. The second holds several blocks of weights, so one head is all that fits: 254 registers and 72 KiB; two strips
# spill 67 of 756 instructions a step, four would spill 180 of 1,340, and take eight warps, which spill none.
_HOPPER = Sizes(
    stats={1: KeyPass(2, 64, 1024, 3), 2: KeyPass(1, 64, 1024, 3), 4: KeyPass(1, 64, 1024, 3)},
    lines={1: KeyPass(1, 64, 2048, 3), 2: KeyPass(1, 64, 2048, 2), 4: KeyPass(1, 64, 2048, 2, warps=8)},
)

# Without wgmma the queries wait in registers, and several strips of them never fit: a launch takes one, with eight
# warps (185 registers). Nothing spills from 8.0 to 12.0 (tests/kernels/test_resources.py); none was timed.
_WITHOUT_WGMMA = Sizes(
    stats={1: KeyPass(1, 64, 1024, 2), 2: KeyPass(1, 64, 1024, 2), 4: KeyPass(1, 32, 1024, 2)},
    lines={1: KeyPass(1, 64, 2048, 2, warps=8)},
    lines_at_once=1,
    products_numbers=16,
    products_warps=8,
)


@lru_cache
def sizes_for(device: torch.device) -> Sizes:
    """The row for this GPU; any will do in the interpreter."""
    return table_of(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else _WITHOUT_WGMMA


def table_of(major: int) -> Sizes:
    """The row for a compute capability; 12 has the shared memory of 8.6, and 10 spills with the row of 9."""
    return _HOPPER if major == 9 else _WITHOUT_WGMMA


def strips_for(sampled: int) -> Strips:
    """Strips that hold this many rows: one of up to 64, or 2 or 4 of 64."""
    if sampled <= 64:
        return Strips(max(16, 1 << (sampled - 1).bit_length()), 1)
    return Strips(64, 2 if sampled <= 128 else 4)


def takes_tensors(call: IndexCall) -> bool:
    """Returns whether an index can be built of these tensors here; torch builds it elsewhere."""
    q_BHSD, k_BGKD = call.q_BHSD, call.k_BGKD
    dtypes = (torch.float16, torch.bfloat16, *(() if q_BHSD.is_cuda else (torch.float32,)))
    contiguous = q_BHSD.stride(3) == k_BGKD.stride(3) == 1 and k_BGKD.stride(2) < LONGEST_ROW_STRIDE
    size, anything = q_BHSD.shape[3], call.layout.row_tiles > 0 < call.layout.chunk.longest
    fits = size <= LARGEST_HEAD and head_size_obstacle(size) is None
    return q_BHSD.dtype in dtypes and k_BGKD.dtype == q_BHSD.dtype and contiguous and anything and fits
