"""Sparse prefill with torch operations: each query tile gathers its keys and hands them to torch's CPU flash kernel.

What a query tile computes is cut in two. Its whole part, tiles and columns that all of its rows see, needs no mask: one
call a query tile over the gathered rows (a run of neighbouring tiles is used where it lies). Its edge, the tiles on the
diagonal or on the window's rim, is small and alike for all query tiles: one masked call for many of them at once (see
cpu_rows.py). The two are joined by their log-sum-exp. Heads run side by side, each on one thread (cpu_threads.py).

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size; T query tiles of M rows, X those of one
block, N gathered keys, E edge keys, W listed tiles, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.kernels.cpu_threads import for_each
from sparsekv.kernels.prefill.cpu_rows import Edge, HeadRows, Whole, head_rows
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex
from sparsekv.kernels.topk import blocks

# Elements of the mask of one call over the edges of many query tiles (16 MiB).
EDGE_ELEMENTS = 1 << 22


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
        rows, at_once = slice(0, length - past), torch.get_num_threads()
        row = _BatchRow(
            b, past, length, q_BHSD[b, :, rows], index, scale, window, out_BHSD[b, :, rows], lse_BHS[b, :, rows]
        )
        for first in range(0, k_BGKD.shape[1] if length > past else 0, at_once):
            own = range(first, min(first + at_once, k_BGKD.shape[1]))
            keys = {g: _Keys.hold(k_BGKD[b, g, :length], v_BGKD[b, g, :length], index.tile.key) for g in own}
            for_each(partial(row.attend, keys, group), range(own.start * group, own.stop * group))
    return AttentionOutput(out_BHSD, lse_BHS if want_lse else None)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of one KV head, float32, padded with zeros to whole tiles."""

    k_KD: torch.Tensor
    v_KD: torch.Tensor
    length: int
    tile: int

    @classmethod
    def hold(cls, k_KD: torch.Tensor, v_KD: torch.Tensor, tile: int) -> _Keys:
        pad = (0, 0, 0, -k_KD.shape[0] % tile)
        whole = (torch.nn.functional.pad(x_KD.float(), pad) if pad[3] else x_KD.float() for x_KD in (k_KD, v_KD))
        padded_k_KD, padded_v_KD = (x_KD.contiguous() for x_KD in whole)
        return cls(padded_k_KD, padded_v_KD, length=k_KD.shape[0], tile=tile)

    def room(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that one query tile after the other gathers into."""
        room_2ND = self.k_KD.new_empty((2, keys, self.k_KD.shape[1]))
        return room_2ND[0], room_2ND[1]

    def gather(self, whole: Whole, room: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the tiles, then of the columns; valid until the room is used again."""
        W, C = len(whole.tiles_W), len(whole.columns_C)
        if whole.run is not None and not C:
            at = slice(whole.run * self.tile, (whole.run + W) * self.tile)
            return self.k_KD[at], self.v_KD[at]
        split, total = W * self.tile, W * self.tile + C
        for held_KD, room_ND in zip((self.k_KD, self.v_KD), room, strict=True):
            by_tile = held_KD.view(-1, self.tile * held_KD.shape[1])
            torch.index_select(by_tile, 0, whole.tiles_W, out=room_ND[:split].view(W, by_tile.shape[1]))
            torch.index_select(held_KD, 0, whole.columns_C, out=room_ND[split:total])
        return room[0][:total], room[1][:total]


@dataclass(frozen=True, slots=True, eq=False)
class _BatchRow:
    """One batch row, and where its result goes."""

    b: int
    past: int
    length: int
    q_HSD: torch.Tensor
    index: TileIndex
    scale: float
    window: int | None
    out_HSD: torch.Tensor
    lse_HS: torch.Tensor

    def attend(self, keys: Mapping[int, _Keys], group: int, h: int) -> None:
        """One query head, over the keys of its KV head."""
        q_SD, held = self.q_HSD[h].float(), keys[h // group]
        if self.past == 0 and self.window is None and self.index.dense_H[h]:
            out_SD, lse_S = _dense(q_SD, held, self.scale)
        else:
            rows = head_rows(self.index, self.b, h, self.past, self.length, self.window)
            out_SD, lse_S = _sparse(q_SD, held, rows, self.scale)
        self.out_HSD[h], self.lse_HS[h] = out_SD, lse_S


def _dense(q_SD: torch.Tensor, keys: _Keys, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A head that computes every causal tile of a whole prompt."""
    k_KD, v_KD = keys.k_KD[: keys.length], keys.v_KD[: keys.length]
    return _flash(q_SD[None], k_KD[None], v_KD[None], scale, causal=True)


def _sparse(q_SD: torch.Tensor, keys: _Keys, rows: HeadRows, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one head; rows that see nothing are 0 and -inf."""
    S, D = q_SD.shape
    q_TMD = torch.nn.functional.pad(q_SD, (0, 0, 0, -S % rows.query)).view(-1, rows.query, D)
    out_TMD, lse_TM = torch.zeros_like(q_TMD), q_TMD.new_full(q_TMD.shape[:2], -math.inf)
    room = keys.room(rows.most_keys)
    for part in blocks(len(q_TMD), rows.query * max(rows.key, rows.edge_keys), EDGE_ELEMENTS):
        for t, whole in enumerate(rows.whole(part), part.start):
            if len(whole.tiles_W) or len(whole.columns_C):
                k_ND, v_ND = keys.gather(whole, room)
                out_TMD[t], lse_TM[t] = _flash(q_TMD[t, None], k_ND[None], v_ND[None], scale)
        edge = rows.edge(part)
        if edge is not None:
            found = _attend_edge(q_TMD[part], keys, edge, scale)
            out_TMD[part], lse_TM[part] = _join(out_TMD[part], lse_TM[part], *found)
    return out_TMD.view(-1, D)[:S], lse_TM.view(-1)[:S]


def _attend_edge(q_XMD: torch.Tensor, keys: _Keys, edge: Edge, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    X, E = edge.tokens_XE.shape
    at = edge.tokens_XE.clamp(max=len(keys.k_KD) - 1).flatten()
    k_XED, v_XED = (x_KD.index_select(0, at).view(X, E, -1) for x_KD in (keys.k_KD, keys.v_KD))
    out_XMD, lse_XM = _flash(q_XMD, k_XED, v_XED, scale, seen_XME=edge.seen_XME)
    return out_XMD.view_as(q_XMD), lse_XM.view(q_XMD.shape[:2]).masked_fill_(~edge.seen_XME.any(-1), -math.inf)


def _flash(
    q_XMD: torch.Tensor,
    k_XND: torch.Tensor,
    v_XND: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    seen_XME: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's blocked kernel, with the log-sum-exp that the public function keeps to itself: [X M, D] and [X M].

    A row that sees nothing gets 0, and a log-sum-exp that means nothing.
    """
    mask_X1ME = None
    if seen_XME is not None:
        mask_X1ME = q_XMD.new_zeros(seen_XME.shape).masked_fill_(~seen_XME, -math.inf)[:, None]
    out_X1MD, lse_X1M = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_XMD[:, None], k_XND[:, None], v_XND[:, None], 0.0, causal, attn_mask=mask_X1ME, scale=scale
    )
    return out_X1MD.reshape(-1, q_XMD.shape[2]), lse_X1M.reshape(-1)


def _join(
    out_XMD: torch.Tensor, lse_XM: torch.Tensor, other_XMD: torch.Tensor, other_lse_XM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two attentions over disjoint keys as one."""
    joint_XM = torch.logaddexp(lse_XM, other_lse_XM)
    base_XM = joint_XM.masked_fill(joint_XM == -math.inf, 0.0)
    weight_XM1, other_XM1 = ((x_XM - base_XM).exp_().unsqueeze(-1) for x_XM in (lse_XM, other_lse_XM))
    return out_XMD * weight_XM1 + other_XMD * other_XM1, joint_XM
