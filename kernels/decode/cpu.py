"""Decode attention with torch operations, in float32.

Shapes: B batch, H query heads, G KV heads, g the KV heads that share a list, N query heads of a KV head, D head size,
T attended tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import AttentionOutput


@torch.no_grad()
def decode(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None = None,
    want_lse: bool = False,
) -> AttentionOutput:
    """One query token a batch row; arguments as in `decode_attention`."""
    B, H = q_BHQD.shape[:2]
    per_kv = H // keys.kv_heads
    out_BHQD = torch.empty_like(q_BHQD)
    lse_BHQ = torch.empty((B, H, 1), device=q_BHQD.device)
    for b in range(B):
        for kv, tokens_T in _attended(keys, selection, window, b):
            at = slice(kv.start * per_kv, kv.stop * per_kv)
            k_gTD, v_gTD = (x_gTD.float() for x_gTD in keys.heads(kv).row(b, tokens_T))
            q_gND = q_BHQD[b, at, 0].float().unflatten(0, (-1, per_kv)) * scale
            scores_gNT = q_gND @ k_gTD.mT
            lse_gN1 = scores_gNT.logsumexp(2, keepdim=True)
            p_gNT = (scores_gNT - lse_gN1.masked_fill(lse_gN1 == -math.inf, 0.0)).exp_()
            out_BHQD[b, at, 0] = (p_gNT @ v_gTD).flatten(0, 1).to(out_BHQD.dtype)
            lse_BHQ[b, at] = lse_gN1.flatten(0, 1)
    return AttentionOutput(out_BHQD, lse_BHQ if want_lse else None)


def _attended(
    keys: KeyView, selection: Selection | None, window: int | None, b: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tokens of one row, ascending by part: KV heads, and what they attend to (int64 [T])."""
    length, device = int(keys.lengths_B[b]), keys.k.device
    first = 0 if window is None else max(0, length - window)
    count = ALL if selection is None else int(selection.counts_B[b])
    if selection is None or count == ALL:
        yield slice(0, keys.kv_heads), torch.arange(first, length, device=device)
        return
    lists = selection.chosen_BgN.shape[1]
    sink_T = torch.arange(selection.sink, device=device)
    recent_T = torch.arange(length - selection.recent, length, device=device)
    for g in range(lists):
        tokens_T = torch.cat((sink_T, selection.chosen_BgN[b, g, :count].long(), recent_T))
        kv = slice(0, keys.kv_heads) if lists == 1 else slice(g, g + 1)
        yield kv, tokens_T[tokens_T >= first]
