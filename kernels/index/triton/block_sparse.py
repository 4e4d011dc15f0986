"""Block-sparse indices built by Triton kernels (MInference 1.0, section 3.2).

    pool       mean queries of every row tile, and mean keys of every key tile, float32     two launches
    products   scores of a block of row tiles, as integers that order like them: the bits of a float32, those below 0
               turned round; mandatory tiles above all others, tiles that a window hides below
    choose     the best tiles of these rows, listed

The last two repeat for blocks of row tiles, whose scores take bounded memory: once up to 128K tokens of 32 heads with
128 x 128 tiles. The result is that of kernels/index/block_sparse.py, and the same run to run.

Shapes: as in layout.py; R row tiles of one block. In kernels X rows of a tile, T row tiles of a program, M key tiles of
a step, W listed tiles, D numbers of a head that are multiplied at once.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.device_cache import fields_on_device
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    IndexCall,
    IndexLayout,
    IndexWidths,
    PreparedIndex,
    ceil_div,
    flat,
    largest,
)
from sparsekv.kernels.index.triton.sizes import Sizes, sizes_for, takes_tensors
from sparsekv.kernels.tiles import TileIndex
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import interpreting

# Scores of row tiles by key tiles stored at once, in elements.
MOST_SCORES = 1 << 26


def takes(group: FamilyHeads, call: IndexCall) -> bool:
    return takes_tensors(call)


def prepare(group: FamilyHeads, call: IndexCall, sizes: Sizes | None = None) -> PreparedIndex:
    """All that the host knows about the index of these heads; arguments as in vertical_slash.py."""
    widths, fields = _plan(group, call.layout)
    return PreparedIndex(widths, partial(_fill, fields, call, sizes or sizes_for(call.layout.device)))


@lru_cache(maxsize=256)
def _plan(group: FamilyHeads, layout: IndexLayout) -> tuple[IndexWidths, tuple[tuple[int, ...], ...]]:
    """Widths, and past, length, zero, head, KV head, tiles a row: all follow from patterns and layout, not tensors."""
    keep = layout.tile_bounds([pattern.keep for pattern in group.patterns])
    rows = (layout.chunk.past, layout.chunk.lengths, (0,) * layout.batch)
    fields = (*rows, group.heads, tuple(range(layout.kv_heads)), flat(keep))
    return IndexWidths(layout.most_tiles(largest(keep)), 0), fields


def _fill(fields: tuple[tuple[int, ...], ...], call: IndexCall, sizes: Sizes, into: TileIndex) -> None:
    """Writes tiles and counts of these heads; `into` is contiguous and of all heads."""
    layout = call.layout
    with torch.cuda.device_of(call.q_BHSD):
        past_B, length_B, zero_B, head_h, kv_head_G, keep_Bh = fields_on_device(layout.device, fields)
        q_BhTD = _pool(call.q_BHSD, (past_B, length_B, head_h), layout.row_tiles, layout.tile.query, sizes)
        k_BGMD = _pool(call.k_BGKD, (zero_B, length_B, kv_head_G), layout.key_tiles, layout.tile.key, sizes)
        for part in blocks(layout.row_tiles, layout.batch * len(head_h) * layout.key_tiles, MOST_SCORES):
            _list_rows(part, q_BhTD, k_BGMD, (past_B, length_B, head_h), keep_Bh, call, sizes, into)


def _pool(
    x_BHSD: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tiles: int, size: int, sizes: Sizes
) -> torch.Tensor:
    """Mean rows of each tile of the heads in `where`, float32 [B, h, tiles, D]."""
    batch, _, _, head_dim = x_BHSD.shape
    h = len(where[2])
    mean_BhTD = torch.empty((batch, h, tiles, head_dim), dtype=torch.float32, device=x_BHSD.device)
    pool_kernel[(tiles, h, batch)](
        x_BHSD, mean_BhTD, *where, *x_BHSD.stride()[:3], tiles,
        TILE=size, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=sizes.pool_warps,
    )  # fmt: skip
    return mean_BhTD


def _list_rows(
    part: slice,
    q_BhTD: torch.Tensor,
    k_BGMD: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keep_Bh: torch.Tensor,
    call: IndexCall,
    sizes: Sizes,
    into: TileIndex,
) -> None:
    layout, h, rows = call.layout, q_BhTD.shape[1], part.stop - part.start
    shape: dict[str, Any] = {"QUERY": layout.tile.query, "KEY": layout.tile.key, "WINDOWED": layout.window is not None}
    order_BhRM = torch.empty((layout.batch, h, rows, layout.key_tiles), dtype=torch.int32, device=layout.device)
    reach = (layout.row_tiles, layout.key_tiles, part.start, part.stop)
    products_kernel[(ceil_div(rows, sizes.products_block), h, layout.batch)](
        q_BhTD, k_BGMD, order_BhRM, *where, call.scale, layout.window or 0, h, k_BGMD.shape[1], *reach,
        GROUP=layout.group_size, D=q_BhTD.shape[3], BLOCK_D=sizes.products_numbers, BLOCK_T=sizes.products_block,
        BLOCK_M=sizes.products_block,
        PRECISION="ieee" if interpreting() else "tf32x3", num_warps=sizes.products_warps, **shape,
    )  # fmt: skip
    choose_kernel[(ceil_div(rows, sizes.choose_block), h, layout.batch)](
        order_BhRM, into.tiles_BHTW, into.counts_BHT, *where, keep_Bh, layout.window or 0, h,
        into.tiles_BHTW.shape[1], *reach, into.tiles_BHTW.shape[3],
        BLOCK_T=sizes.choose_block, BLOCK_M=sizes.choose_tiles, num_warps=sizes.choose_warps, **shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def pool_kernel(
    x_ptr, mean_ptr, first_ptr, length_ptr, head_ptr, stride_B, stride_H, stride_S, tiles,
    TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles, heads, batch). Row r of x is token first + r; rows of tokens from `length` on are not read."""
    tile = tl.program_id(0)
    own = tl.program_id(1)
    batch = tl.program_id(2)
    rows = tl.load(length_ptr + batch) - tl.load(first_ptr + batch)
    lane_D = tl.arange(0, BLOCK_D)
    row_X = tile * TILE + tl.arange(0, TILE)
    x_base = x_ptr + batch.to(tl.int64) * stride_B + tl.load(head_ptr + own).to(tl.int64) * stride_H
    at_XD = x_base + row_X.to(tl.int64)[:, None] * stride_S + lane_D[None, :]
    x_XD = tl.load(at_XD, mask=(row_X < rows)[:, None] & (lane_D < D)[None, :], other=0.0).to(tl.float32)
    count = tl.minimum(tl.maximum(rows - tile * TILE, 1), TILE)
    mean_D = tl.sum(x_XD, 0) / count.to(tl.float32)
    at = ((batch * tl.num_programs(1) + own).to(tl.int64) * tiles + tile) * D
    tl.store(mean_ptr + at + lane_D, mean_D, mask=lane_D < D)


HIDDEN = tl.constexpr(-2147483648)
MANDATORY = tl.constexpr(2147483647)


@triton.jit
@no_type_check
def row_ends(tile_T, past, length, window, QUERY: tl.constexpr, KEY: tl.constexpr, WINDOWED: tl.constexpr):
    """Returns the ends of each row tile: key tile of its first row, its last key tile (-1: padding), and the first that
    it sees."""
    first_T = past + tile_T * QUERY
    end_T = tl.where(first_T < length, (tl.minimum(first_T + QUERY, length) - 1) // KEY, -1)
    seen_T = tile_T * 0
    if WINDOWED:
        seen_T = tl.maximum(first_T - window + 1, 0) // KEY
    return first_T // KEY, end_T, seen_T


@triton.jit(do_not_specialize=["window", "heads", "kv_heads", "row_tiles", "key_tiles", "first_tile", "last_tile"])
@no_type_check
def products_kernel(
    q_ptr, k_ptr, order_ptr, past_ptr, length_ptr, head_ptr,
    scale, window, heads, kv_heads, row_tiles, key_tiles, first_tile, last_tile,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of the row tiles first_tile .. last_tile - 1, heads, batch). Tiles behind a row are not written."""
    own = tl.program_id(1)
    batch = tl.program_id(2)
    tile_T = first_tile + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = tile_T < last_tile
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    base_T, end_T, seen_T = row_ends(tile_T, past, length, window, QUERY, KEY, WINDOWED)
    end_T = tl.where(real_T, end_T, -1)

    lane_M = tl.arange(0, BLOCK_M)
    q_row = (batch * heads + own).to(tl.int64) * row_tiles
    k_row = (batch * kv_heads + tl.load(head_ptr + own) // GROUP).to(tl.int64) * key_tiles
    line_T = (batch * heads + own).to(tl.int64) * (last_tile - first_tile) + tile_T - first_tile
    order_T = order_ptr + line_T * key_tiles
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        tile_M = start + lane_M
        score_TM = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        # A few numbers of the heads at a time: three products of halves each make one of float32.
        for first_number in tl.range(0, D, BLOCK_D):
            number_D = first_number + tl.arange(0, BLOCK_D)
            q_at = q_ptr + (q_row + tile_T)[:, None] * D + number_D[None, :]
            k_at = k_ptr + (k_row + tile_M)[:, None] * D + number_D[None, :]
            q_TD = tl.load(q_at, mask=real_T[:, None] & (number_D < D)[None, :], other=0.0)
            k_MD = tl.load(k_at, mask=(tile_M < key_tiles)[:, None] & (number_D < D)[None, :], other=0.0)
            score_TM = tl.dot(q_TD, tl.trans(k_MD), score_TM, input_precision=PRECISION)
        score_TM *= scale
        # What is not a number compares with nothing: it becomes the lowest number, as in the torch builder.
        score_TM = tl.where(score_TM == score_TM, score_TM, -3.4028234663852886e38)
        bits_TM = score_TM.to(tl.int32, bitcast=True)
        order_TM = tl.where(bits_TM < 0, bits_TM ^ 2147483647, bits_TM)
        mandatory_TM = (tile_M == 0)[None, :] | (tile_M[None, :] >= base_T[:, None] - 1)
        order_TM = tl.where(mandatory_TM, MANDATORY, order_TM)
        order_TM = tl.where(tile_M[None, :] >= seen_T[:, None], order_TM, HIDDEN)
        keep_TM = tile_M[None, :] <= end_T[:, None]
        tl.store(order_T[:, None] + tile_M[None, :], order_TM, mask=keep_TM)


@triton.jit
@no_type_check
def _load_order(order_T, tile_M, end_T):
    return tl.load(order_T[:, None] + tile_M[None, :], mask=tile_M[None, :] <= end_T[:, None], other=HIDDEN)


@triton.jit
@no_type_check
def _count_reaching(order_T, end_T, first_T, second_T, third_T, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr):
    """Counts the tiles of each row that are at least each of three bounds."""
    from_first_T = tl.zeros([BLOCK_T], tl.int32)
    from_second_T = tl.zeros([BLOCK_T], tl.int32)
    from_third_T = tl.zeros([BLOCK_T], tl.int32)
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        order_TM = _load_order(order_T, start + tl.arange(0, BLOCK_M), end_T)
        from_first_T += tl.sum((order_TM >= first_T[:, None]).to(tl.int32), 1)
        from_second_T += tl.sum((order_TM >= second_T[:, None]).to(tl.int32), 1)
        from_third_T += tl.sum((order_TM >= third_T[:, None]).to(tl.int32), 1)
    return from_first_T, from_second_T, from_third_T


@triton.jit
@no_type_check
def _threshold(order_T, end_T, count_T, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr):
    """A bound that `count_T` tiles reach, or the count-th largest number where equal ones straddle it; how many do.

    Two bits a pass, from the highest down, until the right number of tiles is left in every row.
    """
    bound_T = tl.full([BLOCK_T], -2147483648, tl.int32)
    found_T = tl.maximum(end_T + 1, 0)
    shift = 30
    while (shift >= 0) & (tl.max((found_T != count_T).to(tl.int32)) > 0):
        step = 1 << shift
        first_T = bound_T + step
        second_T = first_T + step
        third_T = second_T + step
        one_T, two_T, three_T = _count_reaching(order_T, end_T, first_T, second_T, third_T, BLOCK_T, BLOCK_M)
        # A row that has the right number keeps its bound.
        open_T = found_T != count_T
        found_T = tl.where(open_T & (one_T >= count_T), one_T, found_T)
        bound_T = tl.where(open_T & (one_T >= count_T), first_T, bound_T)
        found_T = tl.where(open_T & (two_T >= count_T), two_T, found_T)
        bound_T = tl.where(open_T & (two_T >= count_T), second_T, bound_T)
        found_T = tl.where(open_T & (three_T >= count_T), three_T, found_T)
        bound_T = tl.where(open_T & (three_T >= count_T), third_T, bound_T)
        shift -= 2
    return bound_T, found_T


@triton.jit(
    do_not_specialize=["window", "heads", "all_heads", "row_tiles", "key_tiles", "first_tile", "last_tile", "width"]
)
@no_type_check
def choose_kernel(
    order_ptr, tiles_ptr, counts_ptr, past_ptr, length_ptr, head_ptr, keep_ptr,
    window, heads, all_heads, row_tiles, key_tiles, first_tile, last_tile, width,
    QUERY: tl.constexpr, KEY: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of the row tiles first_tile .. last_tile - 1, heads, batch). Among equals the lower tile wins."""
    own = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch * heads + own
    tile_T = first_tile + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = tile_T < last_tile
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    _, end_T, seen_T = row_ends(tile_T, past, length, window, QUERY, KEY, WINDOWED)
    end_T = tl.where(real_T, end_T, -1)
    count_T = tl.minimum(tl.load(keep_ptr + row), tl.maximum(end_T + 1 - seen_T, 0))
    line_T = (batch * all_heads + tl.load(head_ptr + own)).to(tl.int64) * row_tiles + tile_T
    tl.store(counts_ptr + line_T, count_T, mask=real_T)

    order_T = order_ptr + (row.to(tl.int64) * (last_tile - first_tile) + tile_T - first_tile) * key_tiles
    bound_T, found_T = _threshold(order_T, end_T, count_T, BLOCK_T, BLOCK_M)
    # Where more reach the bound than may be taken, equal ones are left over: as many are taken as there is room for.
    above_T, _, _ = _count_reaching(order_T, end_T, bound_T + 1, bound_T + 1, bound_T + 1, BLOCK_T, BLOCK_M)
    room_T = tl.where(found_T == count_T, key_tiles, count_T - above_T)
    written_T = tl.zeros([BLOCK_T], tl.int32)
    equal_T = tl.zeros([BLOCK_T], tl.int32)
    for start in tl.range(0, tl.max(end_T) + 1, BLOCK_M):
        tile_M = start + tl.arange(0, BLOCK_M)
        order_TM = _load_order(order_T, tile_M, end_T)
        same_TM = ((order_TM == bound_T[:, None]) & (tile_M[None, :] <= end_T[:, None])).to(tl.int32)
        rank_TM = equal_T[:, None] + tl.cumsum(same_TM, 1)
        keep_TM = (order_TM > bound_T[:, None]) | ((same_TM != 0) & (rank_TM <= room_T[:, None]))
        slot_TM = written_T[:, None] + tl.cumsum(keep_TM.to(tl.int32), 1) - 1
        at_TM = tiles_ptr + line_T[:, None] * width + slot_TM
        tl.store(
            at_TM, tl.broadcast_to(tile_M[None, :], [BLOCK_T, BLOCK_M]), mask=keep_TM & (slot_TM < count_T[:, None])
        )
        written_T += tl.sum(keep_TM.to(tl.int32), 1)
        equal_T += tl.sum(same_TM, 1)
    for start in tl.range(tl.min(tl.where(real_T, count_T, width)), width, BLOCK_M):
        slot_TW = (start + tl.arange(0, BLOCK_M))[None, :]
        keep_TW = real_T[:, None] & (slot_TW >= count_T[:, None]) & (slot_TW < width)
        tl.store(tiles_ptr + line_T[:, None] * width + slot_TW, tl.full([BLOCK_T, BLOCK_M], -1, tl.int32), mask=keep_TW)
