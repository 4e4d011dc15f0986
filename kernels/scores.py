"""How much attention a window of queries pays to each key, and the tokens that get most of it.

The choice of a filter layer (OmniKV, section 3.2): softmax over the keys for each query of the window, maximum over
heads, weighted sum over the window, top-k.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, W window queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.topk import blocks
from sparsekv.plans.errors import ShapeError

HeadReduction = Literal["max", "per_kv_head"] | None


def scaled_scores(q_BGND: torch.Tensor, k_BGSD: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * q k^T in float32: [B, G, N, S]. Half precision inputs are never rounded on the way."""
    batch, groups, rows, _ = q_BGND.shape
    q_XND, kt_XDS = q_BGND.flatten(0, 1), k_BGSD.flatten(0, 1).transpose(1, 2)
    if q_BGND.is_cuda and q_BGND.dtype in (torch.float16, torch.bfloat16):
        scores_XNS = torch.bmm(q_XND, kt_XDS, out_dtype=torch.float32)
    else:
        scores_XNS = torch.bmm(q_XND.float(), kt_XDS.float())
    return scores_XNS.mul_(scale).view(batch, groups, rows, k_BGSD.shape[2])


def token_scores(
    q_BHWD: torch.Tensor,
    k_BGSD: torch.Tensor,
    positions: Sequence[int] | torch.Tensor,
    weights_W: torch.Tensor,
    *,
    scale: float,
    heads: HeadReduction = "max",
    reduce_max: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of a window of queries to every key, float32.

    Args:
        q_BHWD: the window's queries.
        k_BGSD: all keys up to the last position of the window, or more; the first one is finite, what no query sees may
            hold anything.
        positions: token position of each of the W queries, or [B, W] on the device where rows differ; a query sees the
            keys up to its own position, and one of a negative position does not count.
        weights_W: weight of each query of the window.
        scale: softmax scale.
        heads: "max" reduces all query heads to one row, "per_kv_head" the query heads of each KV head to one row,
            None keeps every query head.
        reduce_max: with "max", takes the maximum over heads that are elsewhere as well, [B, W, S] to [B, W, S].

    Returns:
        [B, 1, S], [B, G, S] or [B, H, S].

    Raises:
        ShapeError: tensors do not fit, or a position that the host knows lies beyond the keys.
    """
    _check_window(q_BHWD, k_BGSD, positions, weights_W)
    batch, groups, keys, _ = k_BGSD.shape
    window, per_group = q_BHWD.shape[2], q_BHWD.shape[1] // groups
    q_BGND = torch.unflatten(q_BHWD, 1, (groups, per_group)).flatten(2, 3)
    positions_BW = positions if isinstance(positions, torch.Tensor) else on_device([list(positions)], q_BHWD.device)
    counts_BW = positions_BW >= 0
    # A query that does not count sees the first key: its softmax stays finite whatever memory holds beyond a row.
    hidden_BWS = torch.arange(keys, device=q_BHWD.device) > positions_BW.clamp(min=0)[..., None]
    hidden_B11WS = hidden_BWS[:, None, None]
    weights_BW1 = (weights_W.to(q_BHWD.device, torch.float32, non_blocking=True) * counts_BW)[..., None]
    best_BWS: torch.Tensor | None = None
    rows: list[torch.Tensor] = []
    for part in blocks(groups, batch * per_group * window * keys):
        scores_BGNS = scaled_scores(q_BGND[:, part], k_BGSD[:, part], scale)
        scores_BGNWS = torch.unflatten(scores_BGNS, 2, (per_group, window))
        weights_BGNWS = scores_BGNWS.masked_fill_(hidden_B11WS, -torch.inf).softmax(-1)
        if heads is None:
            rows.append((weights_BGNWS * weights_BW1[:, None, None]).sum(-2).flatten(1, 2))
        elif heads == "per_kv_head":
            rows.append((weights_BGNWS.amax(2) * weights_BW1[:, None]).sum(-2))
        else:
            top_BWS = weights_BGNWS.amax((1, 2))
            best_BWS = top_BWS if best_BWS is None else torch.maximum(best_BWS, top_BWS)
    if best_BWS is None:
        return torch.cat(rows, 1)
    best_BWS = best_BWS if reduce_max is None else reduce_max(best_BWS)
    return (best_BWS * weights_BW1).sum(-2, keepdim=True)


def _check_window(
    q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, positions: Sequence[int] | torch.Tensor, weights_W: torch.Tensor
) -> None:
    batch, heads, window, size = q_BHWD.shape
    if k_BGSD.shape[0] != batch or heads % k_BGSD.shape[1] or k_BGSD.shape[3] != size:
        raise ShapeError(f"queries {tuple(q_BHWD.shape)} and keys {tuple(k_BGSD.shape)} do not fit together")
    described = positions.shape[-1] if isinstance(positions, torch.Tensor) else len(positions)
    if described != window or weights_W.shape != (window,):
        raise ShapeError(
            f"a window of {window} queries needs {window} positions and weights, "
            f"found {described} and {tuple(weights_W.shape)}"
        )
    if isinstance(positions, torch.Tensor):
        return
    if positions and not 0 <= min(positions) <= max(positions) < k_BGSD.shape[2]:
        raise ShapeError(f"positions must lie within the {k_BGSD.shape[2]} keys, found {tuple(positions)}")
