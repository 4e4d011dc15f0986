"""What the flash backend's calls are made of, timed part by part; `check_kernels.py` calls it.

Every row of a head holds so many whole tiles, drawn at random below the diagonal, and the diagonal tile where it says
so; tiles count whole, the diagonal's too. What a goal is held against is dense flash-attn-4 in the same process. On a
CPU the emulator stands in for flash-attn-4: then numbers mean nothing, and this only shows that the script runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import attention_cases
import torch
from attention_cases import Seen
from kernel_timing import TILE, Shape, Timing, median_ms, runs

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.flash import backend as flash_backend
from sparsekv.kernels.prefill.flash import call, emulator
from sparsekv.kernels.prefill.flash.call import Part
from sparsekv.kernels.prefill.flash.limits import device_obstacle, shape_obstacle
from sparsekv.kernels.prefill.flash.lists import lower
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex
from sparsekv.planner.bench.timing import measure
from sparsekv.plans.patterns import TileShape

ROUNDS = 3  # of calls timed in turn: the clock of a GPU that is hot is not what it was a second before
# (rows, columns at once, warps, pipeline depth, registers) of the pass over single columns.
COLUMN_LAUNCHES = (
    (128, 64, 8, 2, 128), (128, 64, 8, 3, 128), (128, 64, 8, 3, None), (128, 64, 8, 2, None), (128, 32, 8, 3, 128),
    (128, 32, 8, 4, 128), (128, 128, 8, 2, None), (128, 128, 8, 3, None), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168),
    (64, 128, 4, 2, None), (64, 32, 4, 3, 128),
)  # fmt: skip


def flash_obstacle(device: str, dtype: torch.dtype, dim: int, tile: TileShape) -> str | None:
    """Why the flash backend does not run such tensors; the emulator on a CPU takes any of its tiles."""
    if device == "cpu":
        return None if tile.query == TILE.query else "query tiles of 128 rows only"
    return device_obstacle(torch.device(device)) or shape_obstacle(dtype, dim, tile)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: TileIndex, chunk: Chunk, **how: object
) -> AttentionOutput:
    """The flash backend through the public call, or its emulator on a CPU."""
    if q.is_cuda:
        return prefill_attention(q, k, v, index, chunk, backend="flash", **how)
    return emulator.prefill(q, k, v, index, chunk, **how)


def row_index(shape: Shape, whole: int, columns: int, device: str, *, diagonal: bool = True) -> TileIndex:
    """`whole` tiles in every row that has as many below the diagonal, and single columns outside of them."""
    T = shape.tokens // TILE.query
    t_T = torch.arange(T, device=device)
    below_TN = t_T[None, :] < t_T[:, None]
    luck_HTN = torch.rand((shape.heads, T, T), device=device).masked_fill_(~below_TN, -1.0)
    least_HT1 = luck_HTN.topk(min(whole, T), -1).values[..., -1:]
    marked_HTN = (luck_HTN >= least_HT1) & below_TN
    if diagonal:
        marked_HTN |= t_T[None, :] == t_T[:, None]
    column_HC = torch.rand((shape.heads, shape.tokens), device=device).topk(columns).indices.sort().values
    inside_HTC = marked_HTN.gather(2, (column_HC // TILE.key)[:, None].expand(-1, T, -1))
    live_HTC = ~inside_HTC & (column_HC[:, None] // TILE.key < t_T[:, None])
    dense_H = torch.zeros(shape.heads, dtype=torch.bool, device=device)
    index = attention_cases.pack(TILE, Seen(marked_HTN[None], column_HC[None], live_HTC[None]), dense_H)
    return TileIndex(
        index.tile, index.tiles_BHTW, index.counts_BHT, index.columns_BHC, index.live_BHTN, dense_H, dense_heads=()
    )


def time_parts(shape: Shape, device: str) -> list[Timing]:
    """What a call of the flash backend is made of beside the columns: lists and tiles."""
    if flash_obstacle(device, shape.dtype, shape.dim, TILE):
        return []
    q, k, v = shape.tensors(device)
    chunk, part = Chunk((0,), (shape.tokens,)), part_of(q, k, v, shape.dim**-0.5)
    index = row_index(shape, 32, 0, device)
    found = [Timing("flash: lists", shape.tokens, median_ms(lambda: lower(index, chunk), device))]
    found.append(Timing("flash: tiles", shape.tokens, median_ms(over_lists(part, index, chunk), device)))
    return found


def time_orders(shape: Shape, device: str, whole: int = 16, waves: tuple[int, ...] = (66, 132, 264)) -> list[Timing]:
    """The same tiles with each row's list ascending, turned round for every other wave of rows, and shuffled."""
    if flash_obstacle(device, shape.dtype, shape.dim, TILE):
        return []
    q, k, v = shape.tensors(device)
    chunk, part, index = (
        Chunk((0,), (shape.tokens,)),
        part_of(q, k, v, shape.dim**-0.5),
        row_index(shape, whole, 0, device),
    )
    rows_T = torch.arange(index.tiles_BHTW.shape[2], device=device)
    indices = {"ascending": index, "shuffled": _reordered(index, shuffled=True, rows_T=rows_T >= 0)} | {
        f"turned for every other {wave} rows": _reordered(index, shuffled=False, rows_T=rows_T // wave % 2 == 1)
        for wave in waves
    }
    calls = {name: over_lists(part, one, chunk) for name, one in indices.items()}
    times = measure(calls, torch.device(device), ROUNDS)
    return [Timing(f"flash, {whole} whole tiles a row, {name}", shape.tokens, ms) for name, ms in times.items()]


def _reordered(index: TileIndex, *, shuffled: bool, rows_T: torch.Tensor) -> TileIndex:
    """The whole tiles of these rows in another order; the diagonal, the last of every list, stays where it is."""
    tiles_BHTW = index.tiles_BHTW
    lane_W = torch.arange(tiles_BHTW.shape[3], device=tiles_BHTW.device)
    whole_BHT1 = index.counts_BHT[..., None] - 1
    if shuffled:
        luck_BHTW = torch.rand(tiles_BHTW.shape, device=tiles_BHTW.device)
        place_BHTW = luck_BHTW.masked_fill_(lane_W >= whole_BHT1, 2.0).argsort(-1)
    else:
        place_BHTW = (whole_BHT1 - 1 - lane_W).clamp_(min=0).long()
    other_BHTW = torch.where(lane_W < whole_BHT1, tiles_BHTW.gather(3, place_BHTW), tiles_BHTW)
    return replace(index, tiles_BHTW=torch.where(rows_T[:, None], other_BHTW, tiles_BHTW).contiguous())


def time_columns(shape: Shape, device: str, columns: int = 1024) -> list[Timing]:
    """The pass over single columns at every launch that fits; it needs no flash-attn-4."""
    from sparsekv.kernels.prefill.columns import ColumnLaunch, add_columns

    q, k, v = shape.tensors(device)
    chunk, part = Chunk((0,), (shape.tokens,)), part_of(q, k, v, shape.dim**-0.5)
    index = row_index(shape, 32, columns, device)
    part.out_BHSD.zero_()
    part.lse_BHS.zero_()  # as if of the tiles: a pass that goes on from its own result stays finite
    found = []
    tiles = AttentionOutput(part.out_BHSD, part.lse_BHS)
    for numbers in COLUMN_LAUNCHES[:1] if device == "cpu" else COLUMN_LAUNCHES:
        launch = ColumnLaunch(*numbers)

        def columns_pass(launch: ColumnLaunch = launch) -> None:
            add_columns(tiles, q, k, v, index, chunk, scale=part.scale, launch=launch)

        m, c, warps, stages, registers = numbers
        name = f"columns {m} x {c}, {warps} warps, {stages} stages, {registers or 'any'} registers"
        if runs(name, columns_pass):
            found.append(Timing(name, shape.tokens, median_ms(columns_pass, device)))
    return found


def time_dense_heads(shape: Shape, device: str) -> list[Timing]:
    """A quarter of the heads dense: within the one launch, or in launches of their own (LISTED_TILES decides)."""
    if flash_obstacle(device, shape.dtype, shape.dim, TILE):
        return []
    q, k, v = shape.tensors(device)
    chunk, index = Chunk((0,), (shape.tokens,)), row_index(shape, 8, 0, device)
    dense = tuple(range(0, shape.heads, 4))
    index.dense_H[list(dense)] = True
    index = TileIndex(
        index.tile, index.tiles_BHTW, index.counts_BHT, index.columns_BHC, index.live_BHTN, index.dense_H, dense
    )
    found, kept = [], flash_backend.LISTED_TILES
    try:
        for name, most in (("listed", 1 << 20), ("alone", 0)):
            flash_backend.LISTED_TILES = most
            ms = median_ms(lambda: flash(q, k, v, index, chunk, scale=shape.dim**-0.5), device)
            found.append(Timing(f"flash: a quarter of the heads dense, {name}", shape.tokens, ms))
    finally:
        flash_backend.LISTED_TILES = kept
    return found


def part_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """All heads as one call of flash-attn-4, with room for its output."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return Part(q, k, v, torch.empty_like(q), lse, scale, None)


def over_lists(part: Part, index: TileIndex, chunk: Chunk) -> Callable[[], object]:
    """The tiles alone, their lists made before."""
    lists = lower(index, chunk).at(slice(0, 1), part.q_BHSD.shape[2], part.k_BGKD.shape[2])
    attend = call.attend_lists if part.q_BHSD.is_cuda else emulator.attend_lists
    return lambda: attend(part, lists)
