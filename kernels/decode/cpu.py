"""Decode attention over chosen tokens with torch operations, in float32.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S tokens in memory, D head size, T chosen.
"""

from __future__ import annotations

import math

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.kernels.tiles import AttentionOutput


@torch.no_grad()
def decode(
    q_BHQD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    rows: DecodeRows,
    *,
    scale: float,
    want_lse: bool = False,
) -> AttentionOutput:
    """One query token a batch row; arguments as in `dispatch`."""
    B, H = q_BHQD.shape[:2]
    G = k_BGSD.shape[1]
    out_BHQD = torch.empty_like(q_BHQD)
    lse_BHQ = torch.empty((B, H, 1), device=q_BHQD.device)
    heads = H // G
    for b in range(B):
        for g in range(G):
            at = slice(g * heads, (g + 1) * heads)
            tokens_T = _chosen(rows, b, g)
            k_TD, v_TD = (x[b, g].index_select(0, tokens_T).float() for x in (k_BGSD, v_BGSD))
            scores_NT = q_BHQD[b, at, 0].float() * scale @ k_TD.T
            lse_N1 = scores_NT.logsumexp(1, keepdim=True)
            p_NT = (scores_NT - lse_N1.masked_fill(lse_N1 == -math.inf, 0.0)).exp_()
            out_BHQD[b, at, 0] = (p_NT @ v_TD).to(out_BHQD.dtype)
            lse_BHQ[b, at] = lse_N1
    return AttentionOutput(out_BHQD, lse_BHQ if want_lse else None)


def _chosen(rows: DecodeRows, b: int, g: int) -> torch.Tensor:
    """The listed tokens of a KV head that are not padding and not in the tail, then the tail."""
    listed_N = rows.tokens_BGN[b, g if rows.tokens_BGN.shape[1] > 1 else 0]
    in_tail_N = (listed_N >= rows.tail_start) & (listed_N < rows.tail_stop)
    tail_T = torch.arange(rows.tail_start, rows.tail_stop, dtype=torch.int32, device=listed_N.device)
    return torch.cat([listed_N[(listed_N >= 0) & ~in_tail_N], tail_T])
