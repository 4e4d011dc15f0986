"""An index lowered to the block lists of flash-attn-4: tiles that need no mask, and tiles that do.

flash-attn-4 walks, for each query tile of each query head, first `mask_block_idx[:mask_block_cnt]` with the mask
function, then `full_block_idx[:full_block_cnt]` without any mask, each from its last entry to its first. Only the first
tile it walks of each list is checked against the end of K, so lists must ascend: the one tile that may reach past the
end is the last of its list. Entries beyond the counts are never read, which is why lists need not be wider than the
widest row, and why the whole tiles of an index without a window are its own list: not even copied.

Shapes: B batch, H query heads, T query tiles, W listed key tiles, E masked tiles of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.prefill.triton import _count_entries_below
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Key tiles of every query tile, in the two lists of flash-attn-4; both ascend and they share no tile."""

    tile: TileShape
    full_block_cnt_BHT: torch.Tensor  # int32
    full_block_idx_BHTW: torch.Tensor  # int32; every key of these is visible to every row of the query tile
    mask_block_cnt_BHT: torch.Tensor  # int32
    mask_block_idx_BHTE: torch.Tensor  # int32; the diagonal, the ragged end, the edge of the window

    def at(self, batch_rows: slice, queries: int, keys: int) -> BlockLists:
        """The lists of these batch rows, for that many query rows and keys: flash-attn-4 refuses lists that are wider
        than the keys or longer than the queries."""
        here = (batch_rows, slice(None), slice(0, -(-queries // self.tile.query)))
        width = slice(0, -(-keys // self.tile.key))
        return replace(
            self,
            full_block_cnt_BHT=self.full_block_cnt_BHT[here],
            full_block_idx_BHTW=self.full_block_idx_BHTW[(*here, width)],
            mask_block_cnt_BHT=self.mask_block_cnt_BHT[here],
            mask_block_idx_BHTE=self.mask_block_idx_BHTE[(*here, width)],
        )


def lower(index: TileIndex, chunk: Chunk, *, window: int | None = None, list_dense: bool = False) -> BlockLists:
    """Sorts the listed tiles of every row by whether they need a mask.

    One launch, in which a program serves one query tile of one head: it counts how many entries of its list lie below
    each of four bounds, which says where the masked entries before the whole ones end, where the whole ones end, and so
    on. A tile that no row sees is in no list; entries past the counts are not written.

    Args:
        index: tiles of each head; single columns are not looked at.
        chunk: where the queries lie.
        window: the layer's own sliding window.
        list_dense: gives dense heads lists of every tile they see (then W may have to grow up to `widest`); without it
            their lists are empty, for launches of their own.
    """
    lists = empty_lists(index, chunk, window=window, list_dense=list_dense)
    B, H, T = index.counts_BHT.shape
    if not B * H * T:
        return lists
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
    return lists


def empty_lists(index: TileIndex, chunk: Chunk, *, window: int | None, list_dense: bool) -> BlockLists:
    """Memory for what `lower` finds; the whole tiles may be the index's own list."""
    shape, new = index.counts_BHT.shape, index.counts_BHT.new_empty
    listed, masked = index.tiles_BHTW.shape[3], most_masked(chunk, index.tile, window)
    width = max(1, listed, widest(chunk, index.tile, window) if list_dense else 0)
    # Without a window and without dense heads in it, the whole tiles of a row are the first of its list as it stands.
    as_it_stands = window is None and not list_dense and listed > 0
    return BlockLists(
        tile=index.tile,
        full_block_cnt_BHT=new(shape),
        full_block_idx_BHTW=index.tiles_BHTW if as_it_stands else new((*shape, width)),
        mask_block_cnt_BHT=new(shape),
        mask_block_idx_BHTE=new((*shape, min(masked, width))),
    )


def widest(chunk: Chunk, tile: TileShape, window: int | None) -> int:
    """The most key tiles that a dense row sees."""
    tiles = chunk.key_tiles(tile)
    return tiles if window is None else min(tiles, -(-(tile.query + window - 2) // tile.key) + 1)


def most_masked(chunk: Chunk, tile: TileShape, window: int | None) -> int:
    """The most tiles of a row that need a mask: those the diagonal crosses, and as many on the edge of a window."""
    aligned = all(past % tile.key == 0 for past in chunk.past)
    crossed = -(-tile.query // tile.key) + (not aligned or tile.query % tile.key != 0)
    return crossed if window is None else crossed + -(-tile.query // tile.key) + 1


@triton.jit
@no_type_check
def _entries(list_ptr, at, listed, first, is_dense, keep):
    """Entries `at` of a row's list; the list of a dense head is `first`, `first` + 1, and so on."""
    return tl.where(
        is_dense != 0, first + at, tl.load(list_ptr + at, mask=keep & (at < listed) & (is_dense == 0), other=0)
    )


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

    # From bounds to positions in the list.
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
