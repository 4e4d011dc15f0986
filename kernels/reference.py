"""The oracle: float32, dense, with an explicit mask. The measure of every kernel in tests, never used for work.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, T query tiles, W listed tiles, C single columns,
M key tiles, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sparsekv.kernels.keys import capped_
from sparsekv.kernels.tiles import AttentionOutput, Chunk, PrefillCall, TileIndex, unpack_bits


def mask_of(index: TileIndex, chunk: Chunk, queries: int, window: int | None = None) -> torch.Tensor:
    """bool [B, H, S, K]: the keys that each query row sees, padding included, by the definition in tiles.py."""
    device, keys = index.tiles_BHTW.device, chunk.longest
    past_B1 = torch.tensor(chunk.past, device=device)[:, None]
    length_B1 = torch.tensor(chunk.lengths, device=device)[:, None]
    i_BS1 = (past_B1 + torch.arange(queries, device=device)).unsqueeze(-1)
    j_K = torch.arange(keys, device=device)
    causal_BSK = (j_K <= i_BS1) & (j_K < length_B1.unsqueeze(-1)) & (i_BS1 < length_B1.unsqueeze(-1))
    if window is not None:
        causal_BSK &= i_BS1 - j_K < window
    chosen_BHTK = index.dense_H[:, None, None] | _in_tiles(index, keys) | _live(index, keys)
    chosen_BHSK = chosen_BHTK.repeat_interleave(index.tile.query, dim=2)[:, :, :queries]
    return chosen_BHSK & causal_BSK[:, None]


def reference_attention(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    mask_BHSK: torch.Tensor,
    *,
    scale: float,
    cap: float = 0.0,
) -> AttentionOutput:
    """Softmax attention in float32 over the keys that the mask names.

    Args:
        q_BHSD: queries, G KV heads serving H / G query heads each.
        k_BGKD: keys, or more of them than the mask has; what no row sees may hold anything.
        mask_BHSK: bool; a row without any key gives 0 and a log-sum-exp of -inf.
    """
    groups, keys = k_BGKD.shape[1], mask_BHSK.shape[3]
    k_BHKD, v_BHKD = (x[:, :, :keys].float().repeat_interleave(q_BHSD.shape[1] // groups, 1) for x in (k_BGKD, v_BGKD))
    scores_BHSK = capped_(q_BHSD.float() @ k_BHKD.mT * scale, cap).masked_fill(~mask_BHSK, -torch.inf)
    lse_BHS = scores_BHSK.logsumexp(-1)
    weights_BHSK = scores_BHSK.softmax(-1).masked_fill(~mask_BHSK, 0.0)
    unseen_BHK1 = ~mask_BHSK.any(2).unsqueeze(-1)
    out_BHSD = weights_BHSK @ v_BHKD.masked_fill(unseen_BHK1, 0.0)
    return AttentionOutput(out_BHSD.to(q_BHSD.dtype), lse_BHS)


def _in_tiles(index: TileIndex, keys: int) -> torch.Tensor:
    """bool [B, H, T, K]: keys of the listed tiles; the last slot takes what is not listed."""
    tiles = -(-keys // index.tile.key)
    slots_W = torch.arange(index.tiles_BHTW.shape[3], device=index.tiles_BHTW.device)
    valid_BHTW = (slots_W < index.counts_BHT.unsqueeze(-1)) & ~index.dense_H[:, None, None]
    slot_BHTW = torch.where(valid_BHTW, index.tiles_BHTW, tiles).long().clamp(max=tiles)
    chosen_BHTM = index.dense_H.new_zeros((*index.counts_BHT.shape, tiles + 1)).scatter_(-1, slot_BHTW, True)
    return chosen_BHTM[..., :tiles].repeat_interleave(index.tile.key, dim=3)[..., :keys]


def _live(index: TileIndex, keys: int) -> torch.Tensor:
    """bool [B, H, T, K]: single columns that are live in the row; the last slot takes what is not."""
    live_BHTC = unpack_bits(index.live_BHTN, index.columns_BHC.shape[2])
    slot_BHTC = torch.where(live_BHTC, index.columns_BHC[:, :, None].long(), keys).clamp(max=keys)
    chosen_BHTK = index.dense_H.new_zeros((*index.counts_BHT.shape, keys + 1)).scatter_(-1, slot_BHTC, True)
    return chosen_BHTK[..., :keys]


@torch.no_grad()
def prefill(call: PrefillCall, index: TileIndex, want_lse: bool = False) -> AttentionOutput:
    """The oracle as a backend, under the mask that the index stands for."""
    mask_BHSK = mask_of(index, call.chunk, call.q_BHSD.shape[2], call.window)
    attended = reference_attention(call.q_BHSD, call.k_BGKD, call.v_BGKD, mask_BHSK, scale=call.scale, cap=call.cap)
    return attended if want_lse else replace(attended, lse_BHS=None)
