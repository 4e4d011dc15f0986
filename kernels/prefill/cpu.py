"""Sparse prefill with torch operations: each query tile gathers its keys and hands them to torch's CPU flash kernel.

What a query tile computes is cut in two. Its whole part, tiles and columns that all of its rows see, needs no mask: one
call a query tile over the gathered rows (adjacent tiles are read where they lie). Its edge, the tiles on the diagonal
or on the window's rim, is small and alike for all query tiles: one masked call for many of them at once. The two are
joined by their log-sum-exp. Heads run side by side, each on one thread (cpu_threads.py).

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size; T query tiles of M rows, X those of one
block, N gathered keys, E edge keys, W listed tiles, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.kernels.cpu_threads import for_each
from sparsekv.kernels.keys import capped_
from sparsekv.kernels.tiles import AttentionOutput, PrefillCall, TileIndex, unpack_bits
from sparsekv.kernels.topk import blocks

# Elements of the mask of one call over the edges of many query tiles (16 MiB).
EDGE_ELEMENTS = 1 << 22
_HIDDEN = 2**31 - 1  # a token after every row


@torch.no_grad()
def prefill(call: PrefillCall, index: TileIndex, want_lse: bool = False) -> AttentionOutput:
    """Attention over the index's tiles and columns, in float32."""
    out_BHSD = torch.zeros_like(call.q_BHSD)
    lse_BHS = torch.full(out_BHSD.shape[:3], -math.inf, dtype=torch.float32, device=out_BHSD.device)
    for b, (past, length) in enumerate(zip(call.chunk.past, call.chunk.lengths, strict=True)):
        if length > past:
            rows, known = slice(0, length - past), slice(0, length)
            qkv = call.q_BHSD[b, :, rows], call.k_BGKD[b, :, known], call.v_BGKD[b, :, known]
            row = _BatchRow(*qkv, b, past, index, call.window, call.scale, call.cap)
            row.attend(out_BHSD[b, :, rows], lse_BHS[b, :, rows])
    return AttentionOutput(out_BHSD, lse_BHS if want_lse else None)


@dataclass(frozen=True, slots=True, eq=False)
class _BatchRow:
    q_HSD: torch.Tensor
    k_GKD: torch.Tensor
    v_GKD: torch.Tensor
    b: int
    past: int
    index: TileIndex
    window: int | None
    scale: float
    cap: float

    def attend(self, out_HSD: torch.Tensor, lse_HS: torch.Tensor) -> None:
        """Writes the result, for as many KV heads at once as there are threads."""
        heads, at_once = len(self.k_GKD), torch.get_num_threads()
        group = len(self.q_HSD) // heads
        for first in range(0, heads, at_once):
            at_work = range(first, min(first + at_once, heads))
            keys = {g: self._keys(g) for g in at_work}

            def fill(h: int, keys: Mapping[int, _Keys] = keys) -> None:
                out_HSD[h], lse_HS[h] = self._head(h, keys[h // group])

            for_each(fill, range(at_work.start * group, at_work.stop * group))

    def _keys(self, g: int) -> _Keys:
        k_KD, v_KD = self.k_GKD[g].float(), self.v_GKD[g].float()
        if missing := -len(k_KD) % self.index.tile.key:
            k_KD, v_KD = (torch.nn.functional.pad(x_KD, (0, 0, 0, missing)) for x_KD in (k_KD, v_KD))
        return _Keys(k_KD.contiguous(), v_KD.contiguous(), self.index.tile.key)

    def _head(self, h: int, keys: _Keys) -> tuple[torch.Tensor, torch.Tensor]:
        q_SD, length = self.q_HSD[h].float(), self.k_GKD.shape[1]
        if self.past == 0 and self.window is None and self.index.dense_H[h] and not self.cap:
            return _flash(q_SD[None], keys.k_KD[None, :length], keys.v_KD[None, :length], self.scale, causal=True)
        rows = head_rows(self.index, self.b, h, self.past, length, self.window)
        return _sparse(q_SD, keys, rows, partial(_capped, cap=self.cap) if self.cap else _flash, self.scale)


_Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # as _flash


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of one KV head, float32, padded with zeros to whole tiles."""

    k_KD: torch.Tensor
    v_KD: torch.Tensor
    tile: int

    def gather(
        self, tiles_W: torch.Tensor, columns_C: torch.Tensor, scratch_2ND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the tiles, then of the columns: where adjacent tiles lie, else in the buffer."""
        W, C = len(tiles_W), len(columns_C)
        if not C and (first := int(tiles_W[0])) + W - 1 == int(tiles_W[-1]):
            at = slice(first * self.tile, (first + W) * self.tile)
            return self.k_KD[at], self.v_KD[at]
        split, total = W * self.tile, W * self.tile + C
        for x_KD, scratch_ND in zip((self.k_KD, self.v_KD), scratch_2ND, strict=True):
            by_tile = x_KD.view(-1, self.tile * x_KD.shape[1])
            torch.index_select(by_tile, 0, tiles_W, out=scratch_ND[:split].view(W, by_tile.shape[1]))
            torch.index_select(x_KD, 0, columns_C, out=scratch_ND[split:total])
        return scratch_2ND[0, :total], scratch_2ND[1, :total]


def _sparse(
    q_SD: torch.Tensor, keys: _Keys, rows: HeadRows, attend: _Attend, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one head; rows that see nothing are 0 and -inf."""
    S, D = q_SD.shape
    q_TMD = torch.nn.functional.pad(q_SD, (0, 0, 0, -S % rows.query)).view(-1, rows.query, D)
    out_TMD, lse_TM = torch.zeros_like(q_TMD), q_TMD.new_full(q_TMD.shape[:2], -math.inf)
    most_keys = int((rows.listed_TW.sum(1) * rows.key + rows.whole_TC.sum(1)).max())
    edge_keys = int((rows.edge_TW.sum(1) * rows.key + rows.edge_TC.sum(1)).max())
    scratch_2ND = q_SD.new_empty((2, most_keys, D))  # one query tile after the other gathers into it
    for part in blocks(len(q_TMD), rows.query * max(rows.key, edge_keys), EDGE_ELEMENTS):
        for t, (tiles_W, columns_C) in enumerate(rows.whole(part), part.start):
            if len(tiles_W) or len(columns_C):
                k_ND, v_ND = keys.gather(tiles_W, columns_C, scratch_2ND)
                out_TMD[t], lse_TM[t] = attend(q_TMD[t, None], k_ND[None], v_ND[None], scale)
        edge = rows.edge(part)
        if edge is not None:
            of_edge = _attend_edge(q_TMD[part], keys, *edge, attend, scale)
            out_TMD[part], lse_TM[part] = _join(out_TMD[part], lse_TM[part], *of_edge)
    return out_TMD.view(-1, D)[:S], lse_TM.view(-1)[:S]


def _attend_edge(
    q_XMD: torch.Tensor, keys: _Keys, tokens_XE: torch.Tensor, seen_XME: torch.Tensor, attend: _Attend, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    at = tokens_XE.clamp(max=len(keys.k_KD) - 1).flatten()
    k_XED, v_XED = (x_KD.index_select(0, at).view(*tokens_XE.shape, -1) for x_KD in (keys.k_KD, keys.v_KD))
    out_XMD, lse_XM = attend(q_XMD, k_XED, v_XED, scale, seen_XME=seen_XME)
    return out_XMD.view_as(q_XMD), lse_XM.view(q_XMD.shape[:2]).masked_fill_(~seen_XME.any(-1), -math.inf)


def _flash(
    q_XMD: torch.Tensor,
    k_XND: torch.Tensor,
    v_XND: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    seen_XME: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's blocked kernel, with the log-sum-exp that the public function keeps to itself: [X M, D] and [X M]. A row
    that sees nothing gets 0, and a log-sum-exp that means nothing."""
    mask_X1ME = None
    if seen_XME is not None:
        mask_X1ME = q_XMD.new_zeros(seen_XME.shape).masked_fill_(~seen_XME, -math.inf)[:, None]
    out_X1MD, lse_X1M = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_XMD[:, None], k_XND[:, None], v_XND[:, None], 0.0, causal, attn_mask=mask_X1ME, scale=scale
    )
    return out_X1MD.reshape(-1, q_XMD.shape[2]), lse_X1M.reshape(-1)


def _capped(
    q_XMD: torch.Tensor,
    k_XND: torch.Tensor,
    v_XND: torch.Tensor,
    scale: float,
    *,
    cap: float,
    seen_XME: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_flash` under a soft cap, which torch's kernel does not know."""
    scores_XMN = capped_((q_XMD @ k_XND.mT).mul_(scale), cap)
    if seen_XME is not None:
        scores_XMN.masked_fill_(~seen_XME, -math.inf)
    out_XMD = scores_XMN.softmax(-1).nan_to_num_(nan=0.0) @ v_XND
    return out_XMD.flatten(0, 1), scores_XMN.logsumexp(-1).flatten()


def _join(
    out_XMD: torch.Tensor, lse_XM: torch.Tensor, other_XMD: torch.Tensor, other_lse_XM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions over disjoint keys as one."""
    joint_XM = torch.logaddexp(lse_XM, other_lse_XM)
    base_XM = joint_XM.masked_fill(joint_XM == -math.inf, 0.0)
    weight_XM1, other_XM1 = ((x_XM - base_XM).exp_().unsqueeze(-1) for x_XM in (lse_XM, other_lse_XM))
    return out_XMD * weight_XM1 + other_XMD * other_XM1, joint_XM


@dataclass(frozen=True, slots=True)
class HeadRows:
    query: int  # M
    key: int
    first_T: torch.Tensor  # token of each query tile's first row
    window: int | None
    tiles_TW: torch.Tensor
    listed_TW: torch.Tensor  # bool: entries that count
    edge_TW: torch.Tensor  # bool: of those, the ones on the edge
    columns_C: torch.Tensor
    whole_TC: torch.Tensor  # bool
    edge_TC: torch.Tensor  # bool

    def whole(self, part: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tiles and columns that every row of a query tile sees, for each of a block."""
        inner_XW, columns_XC = self.listed_TW[part] & ~self.edge_TW[part], self.whole_TC[part]
        tiles = self.tiles_TW[part][inner_XW].split(inner_XW.sum(1).tolist())
        columns = self.columns_C.expand_as(columns_XC)[columns_XC].split(columns_XC.sum(1).tolist())
        return zip(tiles, columns, strict=True)

    def edge(self, part: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys that only some rows of their query tile see, [X, E], and the rows that see them, [X, M, E]; padding is
        seen by none. None without any."""
        offset = torch.arange(self.key, dtype=torch.int32, device=self.first_T.device)
        tiles_XE1 = _compact(self.tiles_TW[part], self.edge_TW[part]).unsqueeze(-1)
        of_tiles_XE = torch.where(tiles_XE1 < 0, _HIDDEN, tiles_XE1 * self.key + offset).flatten(1)
        of_columns_XE = _compact(self.columns_C.expand_as(self.edge_TC[part]), self.edge_TC[part])
        tokens_XE = torch.cat((of_tiles_XE, torch.where(of_columns_XE < 0, _HIDDEN, of_columns_XE)), 1)
        if not tokens_XE.shape[1]:
            return None
        row_M = torch.arange(self.query, dtype=torch.int32, device=self.first_T.device)
        i_XM1 = (self.first_T[part, None] + row_M).unsqueeze(-1)
        seen_XME = tokens_XE[:, None] <= i_XM1
        if self.window is not None:
            seen_XME &= tokens_XE[:, None] > i_XM1 - self.window
        return tokens_XE, seen_XME


def head_rows(index: TileIndex, b: int, h: int, past: int, length: int, window: int | None) -> HeadRows:
    """The rows of query head h in batch row b, whose queries are the tokens past to length."""
    query, key = index.tile.query, index.tile.key
    first_T = torch.arange(past, length, query, dtype=torch.int32, device=index.tiles_BHTW.device)
    last_T = (first_T + query).clamp(max=length) - 1
    tiles_TW, counts_T = _lists(index, b, h, last_T)
    listed_TW = torch.arange(tiles_TW.shape[1], device=tiles_TW.device) < counts_T[:, None]
    start_TW = tiles_TW * key
    inner_TW = start_TW + key - 1 <= first_T[:, None]
    live_TC, columns_C = _columns(index, b, h, len(first_T))
    inside_TC = columns_C <= first_T[:, None]
    if window is not None:
        inner_TW &= last_T[:, None] - start_TW < window
        inside_TC &= last_T[:, None] - columns_C < window
    return HeadRows(
        query=query,
        key=key,
        first_T=first_T,
        window=window,
        tiles_TW=tiles_TW,
        listed_TW=listed_TW,
        edge_TW=listed_TW & ~inner_TW,
        columns_C=columns_C,
        whole_TC=live_TC & inside_TC,
        edge_TC=live_TC & ~inside_TC,
    )


def _lists(index: TileIndex, b: int, h: int, last_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles and how many of each row count; a dense head has all up to its row's last."""
    if not index.dense_H[h]:
        return index.tiles_BHTW[b, h, : len(last_T)], index.counts_BHT[b, h, : len(last_T)]
    counts_T = last_T // index.tile.key + 1
    return torch.arange(int(counts_T[-1]), dtype=torch.int32, device=last_T.device).expand(len(last_T), -1), counts_T


def _columns(index: TileIndex, b: int, h: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags of live columns in each query tile, and the columns."""
    columns_C = index.columns_BHC[b, h]
    if index.dense_H[h]:
        columns_C = columns_C[:0]
    live_TC = unpack_bits(index.live_BHTN[b, h, :rows], columns_C.shape[0])
    return live_TC & (columns_C >= 0), columns_C


def _compact(values_XN: torch.Tensor, keep_XN: torch.Tensor) -> torch.Tensor:
    """The values of each row that `keep` marks, side by side: [X, most marked], padded with -1."""
    most = int(keep_XN.sum(1).max()) if keep_XN.numel() else 0
    packed_XK = values_XN.new_full((len(keep_XN), most), -1)
    row, entry = keep_XN.nonzero(as_tuple=True)
    packed_XK[row, keep_XN.cumsum(1)[row, entry] - 1] = values_XN[row, entry]
    return packed_XK
