"""flash-attn-4 on the CPU, as far as its results go: executes the very lists that the GPU would be given, in float32.

It has the same eyes: whole tiles are taken without a mask whatever they hold, masked ones through the predicates of
`mask_mod`, rows and keys are counted from the launch's own tensors, nothing is read past a count, and the end of K is
only looked at in the last tile of each list. Slow. Lists are made by torch operations, as call.py makes them on a GPU.

Shapes: M rows of a query tile, N keys listed for it; else as in call.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.prefill.flash.backend import Passes, run
from sparsekv.kernels.prefill.flash.call import BlockLists, Part, causal, causal_in_window, empty_lists
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.kernels.topk import blocks


def attend_lists(part: Part, lists: BlockLists) -> None:
    """Every query tile of every head over its lists; writes `out` and `lse` of every row."""
    B, H, S, _ = part.q_BHSD.shape
    query = lists.tile.query
    for b in range(B):
        for h in range(H):
            for t in range(-(-S // query)):
                masked = _listed(lists.mask_block_idx_BHTE[b, h, t], lists.mask_block_cnt_BHT[b, h, t])
                whole = _listed(lists.full_block_idx_BHTW[b, h, t], lists.full_block_cnt_BHT[b, h, t])
                _attend_tile(part, b, h, slice(t * query, min((t + 1) * query, S)), masked, whole, lists.tile.key)


def attend_dense(part: Part) -> None:
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


def _attend_tile(part: Part, b: int, h: int, rows: slice, masked: list[int], whole: list[int], size: int) -> None:
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


def _attend(part: Part, b: int, h: int, rows: slice, key_N: torch.Tensor, keep_MN: torch.Tensor) -> None:
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
    """`lists.lower` by torch operations."""
    lists, bounds = empty_lists(index, chunk, window=window, list_dense=list_dense), _bounds(chunk, index, window)
    batch, heads, rows, width = lists.full_block_idx_BHTW.shape
    for part in blocks(rows, batch * heads * width):
        row_lists = _RowLists.of(index, bounds, part, list_dense)
        lists.full_block_cnt_BHT[:, :, part] = row_lists.full_counts()
        lists.mask_block_cnt_BHT[:, :, part] = row_lists.mask_counts()
        lists.mask_block_idx_BHTE[:, :, part] = row_lists.masked_tiles(lists.mask_block_idx_BHTE.shape[3])
        if lists.full_block_idx_BHTW is not index.tiles_BHTW:
            lists.full_block_idx_BHTW[:, :, part] = row_lists.whole_tiles(width)
    return lists


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Key tiles that the rows of a query tile see, int32 [B, T]: [start, stop), and those whole in it."""

    start_BT: torch.Tensor
    whole_start_BT: torch.Tensor
    whole_stop_BT: torch.Tensor
    stop_BT: torch.Tensor
    windowed: bool


def _bounds(chunk: Chunk, index: TileIndex, window: int | None) -> _Bounds:
    device, query, key = index.counts_BHT.device, index.tile.query, index.tile.key
    past_B1, length_B1 = on_device([chunk.past, chunk.lengths], device, torch.int32).unsqueeze(-1)
    rows_T = torch.arange(index.counts_BHT.shape[2], device=device, dtype=torch.int32)
    first_BT = past_B1 + rows_T * query
    last_BT = torch.minimum(first_BT + query, length_B1) - 1
    stop_BT = (last_BT // key + 1).masked_fill_(first_BT >= length_B1, 0)
    start_BT = whole_start_BT = torch.zeros_like(stop_BT)
    if window is not None:
        start_BT = torch.minimum((first_BT - window + 1).clamp_(min=0) // key, stop_BT)
        whole_start_BT = ((last_BT - window + 1).clamp_(min=0) + key - 1) // key
    whole_stop_BT = torch.minimum(torch.maximum((first_BT + 1) // key, whole_start_BT), stop_BT)
    whole_start_BT = torch.minimum(whole_start_BT, whole_stop_BT)
    return _Bounds(start_BT, whole_start_BT, whole_stop_BT, stop_BT, window is not None)


@dataclass(frozen=True, slots=True)
class _RowLists:
    """Some rows, each one ascending list of tiles cut in three: masked [start, whole_start), whole, masked up to stop.

    The cuts are positions in the list. The list of a dense head is `first`, `first` + 1, and so on.
    """

    tiles_BHTW: torch.Tensor
    first_BHT: torch.Tensor | None
    dense_1H11: torch.Tensor
    start_BHT: torch.Tensor
    whole_start_BHT: torch.Tensor
    whole_stop_BHT: torch.Tensor
    stop_BHT: torch.Tensor

    @classmethod
    def of(cls, index: TileIndex, bounds: _Bounds, part: slice, list_dense: bool) -> _RowLists:
        tiles_BHTW, counts_BHT = index.tiles_BHTW[:, :, part], index.counts_BHT[:, :, part]
        dense_1H1 = index.dense_H[:, None]
        first_B1T = bounds.start_BT[:, None, part]

        def position(bound_BT: torch.Tensor) -> torch.Tensor:
            bound_B1T = bound_BT[:, None, part]
            # Padding of a list is below every bound, so what is not below is counted.
            sparse_BHT = counts_BHT - (tiles_BHTW >= bound_B1T.unsqueeze(-1)).sum(-1, dtype=torch.int32)
            return torch.where(dense_1H1, bound_B1T - first_B1T if list_dense else 0, sparse_BHT)

        whole_stop_BHT, stop_BHT = position(bounds.whole_stop_BT), position(bounds.stop_BT)
        start_BHT = whole_start_BHT = torch.zeros_like(stop_BHT)
        if bounds.windowed:
            start_BHT, whole_start_BHT = position(bounds.start_BT), position(bounds.whole_start_BT)
        first_BHT = first_B1T.expand_as(stop_BHT) if list_dense else None
        return cls(tiles_BHTW, first_BHT, dense_1H1.unsqueeze(-1), start_BHT, whole_start_BHT, whole_stop_BHT, stop_BHT)

    def full_counts(self) -> torch.Tensor:
        return self.whole_stop_BHT - self.whole_start_BHT

    def mask_counts(self) -> torch.Tensor:
        return self.whole_start_BHT - self.start_BHT + self.stop_BHT - self.whole_stop_BHT

    def whole_tiles(self, width: int) -> torch.Tensor:
        slot_W = torch.arange(width, device=self.stop_BHT.device)
        return self._tiles_at(self.whole_start_BHT.unsqueeze(-1) + slot_W)

    def masked_tiles(self, width: int) -> torch.Tensor:
        slot_E = torch.arange(width, device=self.stop_BHT.device)
        edge_BHT1 = (self.whole_start_BHT - self.start_BHT).unsqueeze(-1)
        skipped_BHTE = torch.where(slot_E < edge_BHT1, 0, self.full_counts().unsqueeze(-1))
        return self._tiles_at(self.start_BHT.unsqueeze(-1) + skipped_BHTE + slot_E)

    def _tiles_at(self, at_BHTX: torch.Tensor) -> torch.Tensor:
        listed = self.tiles_BHTW.shape[3]
        sparse_BHTX = torch.zeros_like(at_BHTX, dtype=torch.int32)
        if listed:
            sparse_BHTX = self.tiles_BHTW.gather(-1, at_BHTX.clamp(max=listed - 1).long())
        if self.first_BHT is None:
            return sparse_BHTX
        return torch.where(self.dense_1H11, (self.first_BHT.unsqueeze(-1) + at_BHTX).int(), sparse_BHTX)


PASSES = Passes(lower, attend_lists, attend_dense)
prefill = partial(run, passes=PASSES)
