"""Scores of keys: the attention that a window of queries pays to each.

A filter layer chooses by it (OmniKV, section 3.2): softmax over the keys for each query of the window, maximum over
heads, weighted sum over the window. Eviction chooses by the mean over the last queries and over the query heads of a KV
head, summed over neighbouring keys, as single keys of a phrase stand out by chance (SnapKV, 2024, section 4; PyramidKV,
2024).

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, W window queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.functional import avg_pool1d

from sparsekv.kernels.keys import PLAIN, Softmax, capped_
from sparsekv.kernels.topk import blocks

HeadReduction = Literal["max", "per_kv_head"]


def scaled_scores(q_BGND: torch.Tensor, k_BGSD: torch.Tensor, scale: float, cap: float = 0.0) -> torch.Tensor:
    """scale * q k^T in float32, under a soft cap: [B, G, N, S]. Half precision inputs are never rounded on the way."""
    batch, groups, rows, _ = q_BGND.shape
    q_XND, kt_XDS = q_BGND.flatten(0, 1), k_BGSD.flatten(0, 1).transpose(1, 2)
    if q_BGND.is_cuda and q_BGND.dtype in (torch.float16, torch.bfloat16):
        scores_XNS = torch.bmm(q_XND, kt_XDS, out_dtype=torch.float32)
    else:
        scores_XNS = torch.bmm(q_XND.float(), kt_XDS.float())
    return capped_(scores_XNS.mul_(scale), cap).view(batch, groups, rows, k_BGSD.shape[2])


def token_scores(
    q_BHWD: torch.Tensor,
    k_BGSD: torch.Tensor,
    positions_BW: torch.Tensor,
    weights_W: torch.Tensor,
    *,
    scale: float,
    softmax: Softmax = PLAIN,
    heads: HeadReduction = "max",
    reduce_max: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of a window of queries to every key, float32.

    Args:
        k_BGSD: all keys up to the last position of the window, or more; the first one is finite, what no query sees may
            hold anything.
        positions_BW: token position of each query; it sees the keys up to its own position, and one of a negative
            position does not count.
        heads: "max" reduces all query heads to one row, "per_kv_head" the query heads of each KV head to one row.
        reduce_max: with "max", takes the maximum over heads that are elsewhere as well, [B, 1, W, S] to [B, 1, W, S].

    Returns:
        [B, 1, S] or [B, G, S].
    """
    batch, groups, keys, _ = k_BGSD.shape
    window, per_group = q_BHWD.shape[2], q_BHWD.shape[1] // groups
    q_BGND = torch.unflatten(q_BHWD, 1, (groups, per_group)).flatten(2, 3)
    # A query that does not count sees the first key: its softmax stays finite whatever memory holds beyond a row.
    hidden_BWS = torch.arange(keys, device=q_BHWD.device) > positions_BW.clamp(min=0)[..., None]
    weights_BW1 = (weights_W * (positions_BW >= 0))[..., None]
    best_BWS: torch.Tensor | None = None
    rows: list[torch.Tensor] = []
    for part in blocks(groups, batch * per_group * window * keys):
        scores_BGNS = scaled_scores(q_BGND[:, part], k_BGSD[:, part], scale, softmax.cap)
        scores_BGNWS = torch.unflatten(scores_BGNS, 2, (per_group, window))
        scores_BHWS = scores_BGNWS.masked_fill_(hidden_BWS[:, None, None], -torch.inf).flatten(1, 2)
        heads_of_part = slice(part.start * per_group, part.stop * per_group)
        weights_BGNWS = softmax.weights(scores_BHWS, heads_of_part).unflatten(1, (-1, per_group))
        if heads == "per_kv_head":  # summed here: the windows of all heads together would be as large as the scores
            rows.append((weights_BGNWS.amax(2) * weights_BW1[:, None]).sum(-2))
        else:
            top_BWS = weights_BGNWS.amax((1, 2))
            best_BWS = top_BWS if best_BWS is None else torch.maximum(best_BWS, top_BWS)
    if best_BWS is None:
        return torch.cat(rows, 1)
    best_B1WS = best_BWS[:, None] if reduce_max is None else reduce_max(best_BWS[:, None])
    return (best_B1WS * weights_BW1[:, None]).sum(-2)


NEIGHBOURS = 2  # keys on either side whose attention counts for a key


def observed_attention(
    q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, *, scale: float, softmax: Softmax = PLAIN, together: bool = False,
    backend: str,
) -> torch.Tensor:  # fmt: skip
    """The attention of the last W of S tokens to each of them and its neighbours.

    Args:
        q_BHWD: queries of the last W tokens; W is at most S.
        together: the most of all KV heads.

    Returns:
        float32 [B, g, S], from 0 to 1; g is 1 if `together`, else G.
    """
    factor = k_BGSD.shape[1] / (q_BHWD.shape[1] * q_BHWD.shape[2])
    if not k_BGSD.is_cuda or backend == "reference":
        return near_by_torch(sums_by_torch(q_BHWD, k_BGSD, scale, softmax), factor, together)
    from sparsekv.kernels.observed_triton import attention_sums, near_sums  # loads Triton

    return near_sums(attention_sums(q_BHWD, k_BGSD, scale, softmax), factor, NEIGHBOURS, together)


def sums_by_torch(q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, scale: float, softmax: Softmax) -> torch.Tensor:
    """Attention weights summed over queries and the query heads of a KV head, float32 [B, G, S]."""
    (batch, groups, keys, _), (heads, window) = k_BGSD.shape, q_BHWD.shape[1:3]
    per_group = heads // groups
    sums_BGS = torch.zeros((batch, groups, keys), dtype=torch.float32, device=k_BGSD.device)
    key_S, position_W = (torch.arange(start, keys, device=k_BGSD.device) for start in (0, keys - window))
    for group in range(groups):
        heads_of_group = slice(group * per_group, (group + 1) * per_group)
        for part in blocks(window, batch * per_group * keys):
            q_B1XD = q_BHWD[:, heads_of_group, part].flatten(1, 2)[:, None]
            scores_B1XS = scaled_scores(q_B1XD, k_BGSD[:, group : group + 1], scale, softmax.cap)
            scores_BNWS = scores_B1XS[:, 0].unflatten(1, (per_group, -1))
            scores_BNWS.masked_fill_(key_S > position_W[part, None], -torch.inf)
            sums_BGS[:, group] += softmax.weights(scores_BNWS, heads_of_group).sum((1, 2))
    return sums_BGS


def near_by_torch(sums_BGS: torch.Tensor, factor: float, together: bool) -> torch.Tensor:
    """[B, g, S]: scores of each key and its neighbours, times a factor: of each KV head, or the most of them."""
    near = 2 * NEIGHBOURS + 1
    near_BGS = avg_pool1d(sums_BGS, near, stride=1, padding=NEIGHBOURS) * (factor * near)
    return near_BGS.amax(1, keepdim=True) if together else near_BGS
