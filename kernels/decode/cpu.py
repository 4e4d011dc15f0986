"""Decode attention with torch operations, in float32.

Shapes: B batch, H query heads, G KV heads, g the KV heads that share a list, N query heads of a KV head, D head size,
T attended tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sparsekv.kernels.decode.selection import ALL, Scoring, Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.prefill.dense import attend_newest
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
    scoring: Scoring | None = None,
) -> AttentionOutput:
    """One query token a batch row; arguments as in `decode_attention`."""
    lengths = keys.lengths_B.tolist()
    if selection is None and scoring is None and not want_lse and keys.table_BP is None and len(set(lengths)) == 1:
        k_BGSD, v_BGSD = keys.contiguous(lengths[0])
        return AttentionOutput(attend_newest(q_BHQD, k_BGSD, v_BGSD, scale=scale, window=window), None)
    B, H = q_BHQD.shape[:2]
    per_kv = H // keys.kv_heads
    out_BHQD = torch.empty_like(q_BHQD)
    lse_BHQ = torch.empty((B, H, 1), device=q_BHQD.device)
    scores_gT = None if scoring is None else torch.empty((scoring.lists, scoring.tokens), device=q_BHQD.device)
    for b in range(B):
        for kv, tokens_T in _attended(keys, selection, window, b):
            at = slice(kv.start * per_kv, kv.stop * per_kv)
            k_gTD, v_gTD = (x_gTD.float() for x_gTD in keys.heads(kv).row(b, tokens_T))
            q_gND = q_BHQD[b, at, 0].float().unflatten(0, (-1, per_kv)) * scale
            scores_gNT = q_gND @ k_gTD.mT
            lse_gN1 = scores_gNT.logsumexp(2, keepdim=True)
            p_gNT = (scores_gNT - lse_gN1.masked_fill(lse_gN1 == -math.inf, 0.0)).exp_()
            if scoring is not None and scores_gT is not None and (start := int(scoring.starts_B[b])) >= 0:
                weights_gNT = p_gNT.flatten(0, 1)[None] if scoring.lists == 1 else p_gNT
                scores_gT[:, start : start + len(tokens_T)] = weights_gNT.amax(1)
            out_BHQD[b, at, 0] = (p_gNT @ v_gTD).flatten(0, 1).to(out_BHQD.dtype)
            lse_BHQ[b, at] = lse_gN1.flatten(0, 1)
    return AttentionOutput(out_BHQD, lse_BHQ if want_lse else None, scores_gT)


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
