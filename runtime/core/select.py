"""Which tokens the layers of a segment attend to: the filter layer's choice (OmniKV, ICLR 2025, context selector).

Softmax over the keys for each query of an observation window, maximum over heads, weighted sum over the window,
top-k. Only tokens before the tail are chosen from; the tail is attended to anyway.

Shapes: B batch, H query heads, G KV heads, S keys, W window queries, N chosen tokens, D head size.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.kept import on_device
from sparsekv.kernels.scores import HeadReduction, token_scores, top_tokens
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.phases import Segment


def window_queries(segment: Segment) -> int:
    """How many of the last queries the selector of `segment` looks at."""
    return 1 if segment.selector == "last" else segment.window


def selector_weights(selector: str, queries: int) -> tuple[float, ...]:
    """Weight of each query of the window, oldest first; only their ratios matter.

    `last` takes the newest alone, `uniform` all alike, `exponential` halves from one to the next older (the paper's
    three selectors).
    """
    ages = range(queries - 1, -1, -1)
    if selector == "last":
        return tuple(float(age == 0) for age in ages)
    if selector == "uniform":
        return tuple(1.0 / queries for _ in ages)
    return tuple(2.0**-age for age in ages)


def choose_tokens(
    segment: Segment, q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, tail_start: int, *, scale: float
) -> torch.Tensor | None:
    """The filter layer's choice for its segment.

    Args:
        segment: budget, selector and head sharing.
        q_BHWD: the last queries, the newest being token S - 1; fewer than the window when the context is shorter.
        k_BGSD: all keys.
        tail_start: tokens before it are chosen from.
        scale: softmax scale.

    Returns:
        int32 [B, 1, N] (`heads: max`) or [B, G, N], ascending; None when the budget covers all tokens to choose from.
    """
    length, queries = k_BGSD.shape[2], q_BHWD.shape[2]
    budget = segment.budget.resolve(length)
    if budget >= tail_start:
        return None
    positions = range(length - queries, length)
    weights_W = torch.tensor(selector_weights(segment.selector, queries), dtype=torch.float32)
    heads: HeadReduction = "max" if segment.heads == "max" else "per_kv_head"
    scores_BgS = token_scores(q_BHWD, k_BGSD, positions, weights_W, scale=scale, heads=heads)
    return top_tokens(scores_BgS, budget, tail_start)


def tokens_for_layer(segment: Segment, layer: int, tokens_BgN: torch.Tensor) -> torch.Tensor:
    """The choice as KV heads of `layer` use it: through the layer's head map where the segment has one."""
    if isinstance(segment.heads, str):
        return tokens_BgN
    return tokens_BgN.index_select(1, on_device(segment.heads[layer], tokens_BgN.device))


def within_window(tokens_BgN: torch.Tensor, first: int) -> torch.Tensor:
    """Drops the tokens before `first`, which a sliding layer cannot see."""
    return torch.where(tokens_BgN >= first, tokens_BgN, NO_TOKEN)
