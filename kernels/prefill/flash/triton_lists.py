"""Lowering an index to block lists on a GPU in one launch: what lists.py does with some thirty, each short but counted.

A program serves one query tile of one head. It counts how many entries of its list lie below each of four bounds, and
that says it all: where the masked entries before the whole ones end, where the whole ones end, and so on.

Shapes: B batch, H query heads, T query tiles, W listed key tiles, E masked tiles of a row.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.kept import on_device
from sparsekv.kernels.prefill.flash.lists import BlockLists
from sparsekv.kernels.prefill.triton_kernel import _count_entries_below
from sparsekv.kernels.tiles import Chunk, TileIndex


@triton.jit
@no_type_check
def _entries(list_ptr, at, listed, first, is_dense, keep):
    """Entries `at` of a row's list; the list of a dense head is `first`, `first` + 1, and so on."""
    return tl.where(
        is_dense != 0, first + at, tl.load(list_ptr + at, mask=keep & (at < listed) & (is_dense == 0), other=0)
    )


# Numbers that follow the prompt are not specialised on: a new length must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "heads", "rows", "listed", "width", "masked"])
@no_type_check
def lists_kernel(
    tiles_ptr, counts_ptr, dense_ptr, past_ptr, lengths_ptr, full_cnt_ptr, full_idx_ptr, mask_cnt_ptr, mask_idx_ptr,
    window, heads, rows, listed, width, masked,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    LIST_DENSE: tl.constexpr, WRITE_FULL: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Grid: (T, H, B)."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_row = (batch * heads + head).to(tl.int64) * rows + row
    list_ptr = tiles_ptr + at_row * listed
    length = tl.load(lengths_ptr + batch)
    first_row = tl.load(past_ptr + batch) + row * TILE_M
    last_row = tl.minimum(first_row + TILE_M, length) - 1

    # [start, stop) is what the rows see, and [whole_start, whole_stop) what every one of them sees.
    stop = tl.where(first_row < length, last_row // TILE_N + 1, 0)
    start = 0
    whole_start = 0
    if WINDOWED:
        start = tl.minimum(tl.maximum(first_row - window + 1, 0) // TILE_N, stop)
        whole_start = (tl.maximum(last_row - window + 1, 0) + TILE_N - 1) // TILE_N
    whole_stop = tl.minimum(tl.maximum((first_row + 1) // TILE_N, whole_start), stop)
    whole_start = tl.minimum(whole_start, whole_stop)

    # From bounds to places in the list.
    first = start
    is_dense = tl.load(dense_ptr + head).to(tl.int32)
    if is_dense == 0:
        start, whole_start, whole_stop, stop = _count_entries_below(
            list_ptr, tl.load(counts_ptr + at_row), start, whole_start, whole_stop, stop, SCAN
        )
    elif LIST_DENSE:
        whole_start -= first
        whole_stop -= first
        stop -= first
        start = 0
    else:
        start = 0
        whole_start = 0
        whole_stop = 0
        stop = 0

    before = whole_start - start
    whole = whole_stop - whole_start
    tl.store(full_cnt_ptr + at_row, whole)
    tl.store(mask_cnt_ptr + at_row, before + stop - whole_stop)
    slot_E = tl.arange(0, MASKED)
    at_E = start + slot_E + tl.where(slot_E < before, 0, whole)
    mask_E = _entries(list_ptr, at_E, listed, first, is_dense, slot_E < masked)
    tl.store(mask_idx_ptr + at_row * masked + slot_E, mask_E, mask=slot_E < masked)
    if WRITE_FULL:
        lanes = tl.arange(0, SCAN)
        for begin in range(0, whole, SCAN):
            slot_W = begin + lanes
            full_W = _entries(list_ptr, whole_start + slot_W, listed, first, is_dense, slot_W < whole)
            tl.store(full_idx_ptr + at_row * width + slot_W, full_W, mask=slot_W < whole)


def fill_in_one_launch(
    lists: BlockLists, index: TileIndex, chunk: Chunk, *, window: int | None, list_dense: bool
) -> None:
    """Fills `lists.empty_lists` of the same arguments; entries past the counts are left as they are."""
    B, H, T = index.counts_BHT.shape
    if not B * H * T:
        return
    device, masked = index.counts_BHT.device, lists.mask_block_idx_BHTE.shape[3]
    past_B = on_device(chunk.past, device, torch.int32)
    lengths_B = on_device(chunk.lengths, device, torch.int32)
    with torch.cuda.device_of(index.counts_BHT):
        lists_kernel[(T, H, B)](
            index.tiles_BHTW.contiguous(), index.counts_BHT.contiguous(), index.dense_H.contiguous(), past_B,
            lengths_B, lists.full_block_cnt_BHT, lists.full_block_idx_BHTW, lists.mask_block_cnt_BHT,
            lists.mask_block_idx_BHTE,
            window or 0, H, T, index.tiles_BHTW.shape[3], lists.full_block_idx_BHTW.shape[3], masked,
            TILE_M=index.tile.query, TILE_N=index.tile.key, MASKED=triton.next_power_of_2(masked),
            WINDOWED=window is not None, LIST_DENSE=list_dense,
            WRITE_FULL=lists.full_block_idx_BHTW is not index.tiles_BHTW, SCAN=128, num_warps=1,
        )  # fmt: skip
