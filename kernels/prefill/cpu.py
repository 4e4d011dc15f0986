"""Sparse prefill with torch operations: a query tile gathers its key tiles and columns and multiplies them densely.

One KV head at a time is held in float32, padded to whole tiles. A query tile then costs a handful of calls: copy the
listed tiles and columns side by side (a run of neighbouring tiles is used where it lies), multiply, mask only what
the diagonal or the window cuts, exponentiate, multiply. Long rows are cut into pieces joined by an online softmax, so
that memory does not grow with the prompt.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size; M rows of a query tile, N gathered keys,
W listed tiles, C live columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex

# Keys of one product: the scores of 128 rows and this many keys (4 MiB) stay near the core.
PIECE_KEYS = 8192


@torch.no_grad()
def prefill(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    index: TileIndex,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
    want_lse: bool = False,
) -> AttentionOutput:
    """Attention over the index's tiles and columns; arguments as in `dispatch`. Softmax and sums are float32."""
    B, H, S, _ = q_BHSD.shape
    group = H // k_BGKD.shape[1]
    out_BHSD = torch.zeros_like(q_BHSD)
    lse_BHS = torch.full((B, H, S), -math.inf)
    for b, (past, length) in enumerate(zip(chunk.past, chunk.lengths, strict=True)):
        rows = length - past
        for g in range(k_BGKD.shape[1] if rows else 0):
            keys = _Keys.hold(k_BGKD[b, g, :length], v_BGKD[b, g, :length], index)
            for h in range(g * group, (g + 1) * group):
                for t, (tiles_W, columns_C) in enumerate(_rows_of_head(index, b, h, past, length)):
                    at = slice(t * index.tile.query, min((t + 1) * index.tile.query, rows))
                    q_MD = q_BHSD[b, h, at].float() * scale
                    out_MD, lse_M = _attend(q_MD, past + at.start, keys, tiles_W, columns_C, window)
                    out_BHSD[b, h, at] = out_MD
                    lse_BHS[b, h, at] = lse_M
    return AttentionOutput(out_BHSD, lse_BHS if want_lse else None)


def _rows_of_head(
    index: TileIndex, b: int, h: int, past: int, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tiles and the live columns of each query tile that holds a real row."""
    T = -(-(length - past) // index.tile.query)
    if index.dense_H[h]:
        none = torch.empty(0, dtype=torch.int32)
        for t in range(T):
            last = min(past + (t + 1) * index.tile.query, length) - 1
            yield torch.arange(last // index.tile.key + 1, dtype=torch.int32), none
        return
    columns_C = index.columns_BHC[b, h]
    bits_TN32 = index.live_BHTN[b, h, :, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    live_TC = bits_TN32.flatten(1)[:, : len(columns_C)].bool()
    for t, count in enumerate(index.counts_BHT[b, h, :T].tolist()):
        yield index.tiles_BHTW[b, h, t, :count], columns_C[live_TC[t]]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of one KV head, float32, padded with zeros to whole tiles; and room to gather a piece."""

    k_KD: torch.Tensor
    v_KD: torch.Tensor
    tile: int
    room_k_ND: torch.Tensor
    room_v_ND: torch.Tensor

    @classmethod
    def hold(cls, k_KD: torch.Tensor, v_KD: torch.Tensor, index: TileIndex) -> _Keys:
        tile = index.tile.key
        pad = (0, 0, 0, -k_KD.shape[0] % tile)
        room = k_KD.new_empty((PIECE_KEYS + index.columns_BHC.shape[-1], k_KD.shape[1]), dtype=torch.float32)
        k_KD, v_KD = (torch.nn.functional.pad(x_KD.float(), pad).contiguous() for x_KD in (k_KD, v_KD))
        return cls(k_KD, v_KD, tile, room, torch.empty_like(room))

    def gather(self, tiles_W: torch.Tensor, columns_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the tiles, then of the columns; valid until the next call."""
        W, C, D = len(tiles_W), len(columns_C), self.k_KD.shape[1]
        if not C and int(tiles_W[-1] - tiles_W[0]) == W - 1:
            run = slice(int(tiles_W[0]) * self.tile, (int(tiles_W[-1]) + 1) * self.tile)
            return self.k_KD[run], self.v_KD[run]
        split, total = W * self.tile, W * self.tile + C
        for held_KD, room_ND in ((self.k_KD, self.room_k_ND), (self.v_KD, self.room_v_ND)):
            whole = held_KD.view(-1, self.tile * D)
            torch.index_select(whole, 0, tiles_W, out=room_ND[:split].view(W, self.tile * D))
            torch.index_select(held_KD, 0, columns_C, out=room_ND[split:total])
        return self.room_k_ND[:total], self.room_v_ND[:total]


def _attend(
    q_MD: torch.Tensor,
    first: int,
    keys: _Keys,
    tiles_W: torch.Tensor,
    columns_C: torch.Tensor,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the rows `first` onwards; rows that see nothing are 0 and -inf."""
    m_M1 = q_MD.new_full((len(q_MD), 1), -math.inf)
    l_M1 = torch.zeros_like(m_M1)
    acc_MD = torch.zeros_like(q_MD)
    for piece_W, piece_C in _pieces(tiles_W, columns_C, keys.tile):
        k_ND, v_ND = keys.gather(piece_W, piece_C)
        scores_MN = q_MD @ k_ND.T
        _hide(scores_MN, first, piece_W, piece_C, keys.tile, window)
        new_m_M1 = torch.maximum(m_M1, scores_MN.amax(1, keepdim=True))
        base_M1 = new_m_M1.masked_fill(new_m_M1 == -math.inf, 0.0)
        p_MN = scores_MN.sub_(base_M1).exp_()
        decay_M1 = (m_M1 - base_M1).exp_()
        l_M1 = l_M1 * decay_M1 + p_MN.sum(1, keepdim=True)
        acc_MD = torch.addmm(acc_MD * decay_M1, p_MN, v_ND)
        m_M1 = new_m_M1
    out_MD = acc_MD / l_M1.masked_fill(l_M1 == 0, 1.0)
    return out_MD, (m_M1 + l_M1.log()).squeeze(1)


def _pieces(tiles_W: torch.Tensor, columns_C: torch.Tensor, tile: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts a row's tiles into pieces; the columns go with the last one."""
    if not len(tiles_W) + len(columns_C):
        return
    cut = tiles_W.split(PIECE_KEYS // tile)
    for piece_W in cut[:-1]:
        yield piece_W, columns_C[:0]
    yield cut[-1], columns_C


def _hide(
    scores_MN: torch.Tensor,
    first: int,
    tiles_W: torch.Tensor,
    columns_C: torch.Tensor,
    tile: int,
    window: int | None,
) -> None:
    """Sets keys after their row, or before its window, to -inf. Tiles ascend, so those to cut are the last ones."""
    free = 0 if window is not None else int((tiles_W < (first + 1) // tile).sum())
    cut_W1 = tiles_W[free:, None] * tile
    j_N = torch.cat([(cut_W1 + torch.arange(tile, dtype=torch.int32)).flatten(), columns_C])
    if not len(j_N) or (window is None and int(j_N.max()) <= first):
        return
    i_M1 = torch.arange(first, first + len(scores_MN), dtype=torch.int32)[:, None]
    hidden_MN = j_N > i_M1
    if window is not None:
        hidden_MN |= i_M1 - j_N >= window
    scores_MN[:, free * tile :].masked_fill_(hidden_MN, -math.inf)
