"""Scores of keys by which tokens are evicted: the mean attention over the last queries and over the query heads of a KV
head, summed over neighbouring keys, as single keys of a phrase stand out by chance (SnapKV, 2024, section 4; PyramidKV,
2024).

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, W window queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

from sparsekv.kernels.keys import PLAIN, Softmax, capped_
from sparsekv.kernels.topk import blocks


def scaled_scores(q_BGND: torch.Tensor, k_BGSD: torch.Tensor, scale: float, cap: float = 0.0) -> torch.Tensor:
    """scale * q k^T in float32, under a soft cap: [B, G, N, S]. Half precision inputs are never rounded on the way."""
    batch, groups, rows, _ = q_BGND.shape
    q_XND, kt_XDS = q_BGND.flatten(0, 1), k_BGSD.flatten(0, 1).transpose(1, 2)
    if q_BGND.is_cuda and q_BGND.dtype in (torch.float16, torch.bfloat16):
        scores_XNS = torch.bmm(q_XND, kt_XDS, out_dtype=torch.float32)
    else:
        scores_XNS = torch.bmm(q_XND.float(), kt_XDS.float())
    return capped_(scores_XNS.mul_(scale), cap).view(batch, groups, rows, k_BGSD.shape[2])


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
