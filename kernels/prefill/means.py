"""What a row tile does not compute, taken into its softmax as means: one mean key and value for each skipped key tile.

FlashPrefill's second version calls it mean correction. For a row i of query tile t and a head h that is compensated,
every key tile m that lies wholly before the rows of t and is not in tiles[h, t] takes part as one more key: the mean of
its keys that are no single columns of h, with the mean of their values, and the logarithm of their number n added to
its score, as n equal keys would have it. Single columns are outliers that are computed; a mean over them would move.

Works on the output and the log-sum-exp of any backend, in a second softmax over the means that is merged into the
first. A mean costs as much as one key: `tiles_with_means` counts them.

Shapes: B batch, H query heads, h compensated heads, G KV heads, S query rows, T query tiles, R row tiles of one block,
Y their rows, K keys, M whole key tiles, C single columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import mean_pool
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex, computed_tiles
from sparsekv.kernels.topk import BLOCK_ELEMENTS, blocks
from sparsekv.plans.patterns import Pattern, TileShape, VerticalSlash


def compensated_heads(patterns: Sequence[Pattern]) -> tuple[int, ...]:
    """The heads whose patterns ask for means."""
    return tuple(
        head
        for head, pattern in enumerate(patterns)
        if isinstance(pattern, VerticalSlash) and pattern.pattern == "vertical_slash_means"
    )


def attend_with_means(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    index: TileIndex,
    chunk: Chunk,
    heads: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    backend: str,
) -> torch.Tensor:
    """`prefill_attention` with means in these heads, which may be none: the output [B, H, S, D].

    Raises:
        ShapeError, BackendError: as `prefill_attention`.
    """
    found = prefill_attention(
        q_BHSD, k_BGKD, v_BGKD, index, chunk, scale=scale, window=window, want_lse=bool(heads), backend=backend
    )
    if heads:
        found = add_means(q_BHSD, k_BGKD, v_BGKD, found, index, chunk, heads, scale=scale, window=window)
    return found.out_BHSD


def add_means(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    found: AttentionOutput,
    index: TileIndex,
    chunk: Chunk,
    heads: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> AttentionOutput:
    """Attention with the means of what these heads skip; the other heads stay as they are.

    Args:
        q_BHSD, k_BGKD, v_BGKD, index, chunk, scale, window: of the call of `prefill_attention`. Key tiles that lie
            partly outside the window of a row of the tile are left out.
        found: what it returned, with the log-sum-exp; both tensors are written to.
        heads: ascending.
    """
    assert found.lse_BHS is not None, "compensation needs the log-sum-exp"
    means = _Means.of(k_BGKD, v_BGKD, index, chunk, heads)
    own, size, rows = list(heads), index.tile.query, q_BHSD.shape[2]
    if means.tiles == 0:
        return found
    rows_B111 = on_device(list(chunk.rows), q_BHSD.device)[:, None, None, None]
    for part in blocks(index.counts_BHT.shape[2], len(chunk.past) * len(own) * size * means.tiles):
        piece = slice(part.start * size, min(part.stop * size, rows))
        skipped_BhRM = _skipped(index, chunk, own, part, means.tiles, window)
        skipped_BhYM = skipped_BhRM.repeat_interleave(size, 2)[:, :, : piece.stop - piece.start]
        q_BhYD = q_BHSD[:, own, piece].float()
        scores_BhYM = (q_BhYD @ means.k_BhMD.mT).mul_(scale).add_(means.log_BhM[:, :, None])
        scores_BhYM.masked_fill_(~skipped_BhYM, -torch.inf)
        row_Y1 = torch.arange(piece.start, piece.stop, device=q_BHSD.device)[:, None]
        own_BhY1 = found.lse_BHS[:, own, piece, None]
        both_BhY1 = torch.logaddexp(own_BhY1, scores_BhYM.logsumexp(-1, keepdim=True))
        # Rows that see nothing, and padding, whose queries may hold anything.
        is_empty_BhY1 = (both_BhY1 == -torch.inf) | (row_Y1 >= rows_B111)
        weights_BhYM = (scores_BhYM - both_BhY1).exp_().masked_fill_(is_empty_BhY1, 0.0)
        share_BhY1 = (own_BhY1 - both_BhY1).exp_().masked_fill_(is_empty_BhY1, 0.0)
        out_BhYD = found.out_BHSD[:, own, piece].float() * share_BhY1 + weights_BhYM @ means.v_BhMD
        found.out_BHSD[:, own, piece] = out_BhYD.to(found.out_BHSD.dtype)
        found.lse_BHS[:, own, piece] = both_BhY1.masked_fill(is_empty_BhY1, -torch.inf)[..., 0]
    return found


def means_bytes(batch: int, heads: int, rows: int, keys: int, head_dim: int, tile: TileShape) -> int:
    """About the most that `add_means` holds beside its arguments, for so many heads and query rows a batch row."""
    tiles = keys // tile.key
    of_row_tile = batch * heads * tile.query * max(tiles, 1)
    block_rows = min(rows, max(1, BLOCK_ELEMENTS // of_row_tile) * tile.query)
    pooling, pooled = 4 * batch * heads * tiles * head_dim, 2 * batch * heads * tiles * head_dim
    scores = batch * heads * block_rows * (10 * tiles + 20 * head_dim)
    return 4 * pooled + max(4 * pooling, scores)


def tiles_with_means(index: TileIndex, chunk: Chunk, heads: Sequence[int], window: int | None = None) -> torch.Tensor:
    """`computed_tiles`, and a mean in these heads like one key of a row tile: float64 [B, H]."""
    tiles_BH = computed_tiles(index)
    if not heads:
        return tiles_BH
    own, whole = list(heads), chunk.longest // index.tile.key
    for part in blocks(index.counts_BHT.shape[2], len(chunk.past) * len(own) * whole):
        skipped_BhRM = _skipped(index, chunk, own, part, whole, window)
        tiles_BH[:, own] += skipped_BhRM.sum((2, 3)).double() / index.tile.key
    return tiles_BH


@dataclass(frozen=True, slots=True, eq=False)
class _Means:
    """Of each compensated head, over the keys of each whole key tile that are none of its single columns."""

    k_BhMD: torch.Tensor  # float32
    v_BhMD: torch.Tensor
    log_BhM: torch.Tensor  # of how many keys; -inf where all are columns

    @property
    def tiles(self) -> int:
        return self.log_BhM.shape[2]

    @classmethod
    def of(
        cls, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, index: TileIndex, chunk: Chunk, heads: Sequence[int]
    ) -> _Means:
        size, tiles = index.tile.key, chunk.longest // index.tile.key
        group = index.counts_BHT.shape[1] // k_BGKD.shape[1]
        own, groups, device = list(heads), [head // group for head in heads], k_BGKD.device
        row_B11, group_h1 = torch.arange(len(k_BGKD), device=device)[:, None, None], on_device(groups, device)[:, None]
        column_BhC = index.columns_BHC[:, own].long()
        is_column_BhC = (column_BhC >= 0) & (column_BhC < tiles * size)
        tile_BhC = torch.where(is_column_BhC, column_BhC // size, tiles)
        taken_BhM = torch.zeros((*column_BhC.shape[:2], tiles + 1), device=column_BhC.device)
        taken_BhM.scatter_add_(2, tile_BhC, torch.ones_like(tile_BhC, dtype=torch.float32))
        count_BhM = size - taken_BhM[..., :tiles]
        pooled, valid = [], [min(length, tiles * size) for length in chunk.lengths]
        for x_BGKD in (k_BGKD, v_BGKD):
            sums_BhMD = mean_pool(x_BGKD[:, :, : tiles * size], size, valid)[:, groups] * size
            at_BhCD = tile_BhC.clamp(max=max(tiles - 1, 0))[..., None].expand(-1, -1, -1, x_BGKD.shape[3])
            columns_BhCD = x_BGKD[row_B11, group_h1, column_BhC.clamp(min=0)].float() * is_column_BhC[..., None]
            sums_BhMD = sums_BhMD.scatter_add(2, at_BhCD, -columns_BhCD) if tiles else sums_BhMD
            pooled.append(sums_BhMD / count_BhM.clamp(min=1.0)[..., None])
        return cls(pooled[0], pooled[1], count_BhM.log())


def _skipped(
    index: TileIndex, chunk: Chunk, heads: list[int], part: slice, tiles: int, window: int | None
) -> torch.Tensor:
    """Key tiles wholly before a row tile, inside the window of its rows, that it does not list: bool [B, h, R, M]."""
    device, tile = index.tiles_BHTW.device, index.tile
    past_B1 = on_device(list(chunk.past), device)[:, None]
    first_BR1 = (past_B1 + torch.arange(part.start, part.stop, device=device) * tile.query)[..., None]
    tile_M = torch.arange(tiles, device=device)
    before_BRM = (tile_M + 1) * tile.key <= first_BR1
    if window is not None:
        before_BRM &= first_BR1 + tile.query - 1 - tile_M * tile.key < window
    slot_BhRW = index.tiles_BHTW[:, heads, part].long()
    slots_W = torch.arange(slot_BhRW.shape[3], device=device)
    valid_BhRW = slots_W < index.counts_BHT[:, heads, part, None]
    slot_BhRW = torch.where(valid_BhRW & (slot_BhRW < tiles), slot_BhRW, tiles)
    listed_BhRM = torch.zeros((*slot_BhRW.shape[:3], tiles + 1), dtype=torch.bool, device=device)
    listed_BhRM.scatter_(3, slot_BhRW, True)
    return before_BRM[:, None] & ~listed_BhRM[..., :tiles]
