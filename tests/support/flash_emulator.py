"""flash-attn-4 on the CPU, as far as its results go: executes the very lists that the GPU would be given, in float32.

It has the same eyes: whole tiles are taken without a mask whatever they hold, masked ones through the predicates of
`mask_mod`, rows and keys are counted from the launch's own tensors, nothing is read past a count, and the end of K is
only looked at in the last tile of each list. Slow. Lists are made by their definition.

Shapes: M rows of a query tile, N keys listed for it; else as in call.py.
"""

from __future__ import annotations

import math
from itertools import product

import torch

from sparsekv.kernels.prefill.flash.call import BlockLists, CallPart, causal, causal_in_window, empty_lists
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import TileShape


def attend_lists(part: CallPart, lists: BlockLists) -> None:
    """Every query tile of every head over its lists; writes `out` and `lse` of every row."""
    B, H, S, _ = part.q_BHSD.shape
    query = lists.tile.query
    for b in range(B):
        for h in range(H):
            for t in range(-(-S // query)):
                masked = _listed(lists.mask_block_idx_BHTE[b, h, t], lists.mask_block_cnt_BHT[b, h, t])
                whole = _listed(lists.full_block_idx_BHTW[b, h, t], lists.full_block_cnt_BHT[b, h, t])
                _attend_tile(part, b, h, slice(t * query, min((t + 1) * query, S)), masked, whole, lists.tile.key)


def attend_dense(part: CallPart) -> None:
    """These heads over every causal key of the window."""
    S, K = part.q_BHSD.shape[2], part.k_BGKD.shape[2]
    row_S1 = part.past + torch.arange(S)[:, None]
    keep_SK = _visible(row_S1, torch.arange(K), part.window)
    for b in range(part.q_BHSD.shape[0]):
        for h in range(part.q_BHSD.shape[1]):
            _attend(part, b, h, slice(0, S), torch.arange(K), keep_SK)


def _visible(row: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    return causal(row, key) if window is None else causal_in_window(row, key, window)


def _listed(tiles_W: torch.Tensor, count: torch.Tensor) -> list[int]:
    if int(count) > len(tiles_W):
        raise IndexError(f"a list of {len(tiles_W)} tiles is said to hold {int(count)}")
    return tiles_W[: int(count)].tolist()


def _attend_tile(part: CallPart, b: int, h: int, rows: slice, masked: list[int], whole: list[int], size: int) -> None:
    keys, keeps = [], []
    row_M1 = part.past + torch.arange(rows.start, rows.stop)[:, None]
    for tiles, is_masked in ((masked, True), (whole, False)):
        for entry, tile in enumerate(tiles):
            key_N = torch.arange(tile * size, (tile + 1) * size)
            keep_MN = torch.ones(len(row_M1), size, dtype=torch.bool)
            if is_masked:
                keep_MN &= _visible(row_M1, key_N, part.window)
            if entry == len(tiles) - 1:
                keep_MN &= key_N < part.k_BGKD.shape[2]
            keys.append(key_N)
            keeps.append(keep_MN)
    if keys:
        _attend(part, b, h, rows, torch.cat(keys), torch.cat(keeps, 1))
    else:
        part.out_BHSD[b, h, rows] = 0.0
        part.lse_BHS[b, h, rows] = -math.inf


def _attend(part: CallPart, b: int, h: int, rows: slice, key_N: torch.Tensor, keep_MN: torch.Tensor) -> None:
    group = part.q_BHSD.shape[1] // part.k_BGKD.shape[1]
    k_ND, v_ND = (_read(x_BGKD[b, h // group], key_N) for x_BGKD in (part.k_BGKD, part.v_BGKD))
    scores_MN = (part.q_BHSD[b, h, rows].float() @ k_ND.T * part.scale).masked_fill(~keep_MN, -math.inf)
    weights_MN = scores_MN.softmax(-1).masked_fill(~keep_MN.any(-1, keepdim=True), 0.0)
    part.out_BHSD[b, h, rows] = (weights_MN @ v_ND).to(part.out_BHSD.dtype)
    part.lse_BHS[b, h, rows] = scores_MN.logsumexp(-1)


def _read(x_KD: torch.Tensor, key_N: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; those past its end are zeros, as bulk copies have it."""
    real_N1 = (key_N < x_KD.shape[0])[:, None]
    return x_KD[key_N.clamp(max=x_KD.shape[0] - 1)].float().masked_fill(~real_N1, 0.0)


def lower(index: TileIndex, chunk: Chunk, *, window: int | None = None, list_dense: bool = False) -> BlockLists:
    """`call.lower` by its definition: every real row sees every key of a whole tile, some sees some of a masked one."""
    lists, tile = empty_lists(index, chunk, window=window, list_dense=list_dense), index.tile
    for b, h, t in product(*map(range, index.counts_BHT.shape)):
        listed = index.tiles_BHTW[b, h, t, : index.counts_BHT[b, h, t]].tolist()
        if index.dense_H[h]:
            listed = range(chunk.key_tiles(tile)) if list_dense else ()
        seen = {n: _seen(chunk, tile, b, t, n, window) for n in listed}
        whole = [n for n, seen_MN in seen.items() if len(seen_MN) and seen_MN.all()]
        masked = [n for n, seen_MN in seen.items() if seen_MN.any() and n not in whole]
        lists.full_block_cnt_BHT[b, h, t], lists.mask_block_cnt_BHT[b, h, t] = len(whole), len(masked)
        lists.full_block_idx_BHTW[b, h, t, : len(whole)] = torch.tensor(whole, dtype=torch.int32)
        lists.mask_block_idx_BHTE[b, h, t, : len(masked)] = torch.tensor(masked, dtype=torch.int32)
    return lists


def _seen(chunk: Chunk, tile: TileShape, b: int, t: int, n: int, window: int | None) -> torch.Tensor:
    """Which keys of a key tile the real rows of a query tile see, bool [M, N]."""
    first, length = chunk.past[b] + t * tile.query, chunk.lengths[b]
    row_M1 = torch.arange(first, max(first, min(first + tile.query, length)))[:, None]
    key_N = torch.arange(n * tile.key, (n + 1) * tile.key)
    return _visible(row_M1, key_N, window) & (key_N < length)
