"""Which tokens the layers of a segment attend to: the filter layer's choice (OmniKV, ICLR 2025, context selector).

Softmax over the keys for each query of an observation window, maximum over heads, weighted sum over the window, top-k
among the tokens between sinks and recent ones.

Shapes: B batch, H query heads, G KV heads, S keys, W window queries, D head size; g is 1 (`heads: max`) or G.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.scores import token_scores
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.kernels.topk import top_ascending
from sparsekv.runtime.core.program import LayerProgram, SegmentProgram
from sparsekv.runtime.core.state import DecodeState


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
    layer: LayerProgram, q_BH1D: torch.Tensor, keys: KeyView, state: DecodeState, *, scale: float
) -> None:
    """The choice of a filter layer for its segment, recorded in the state.

    Args:
        layer: a filter layer.
        q_BH1D: the new queries; `state.remember` has seen them.
        keys: all keys, the new ones included.
        state: of the step.
        scale: softmax scale.
    """
    segment = layer.filters
    assert segment is not None
    if state.lengths is not None and all(segment.count(length) == ALL for length in state.lengths):
        state.choose(segment, None)
        return
    longest = max(state.lengths) if state.lengths else keys.capacity
    k_BGSD = keys.contiguous_keys(longest)
    room = state.lists(segment, 1 if segment.heads == "max" else layer.kv_heads)
    counts_B = segment.counts(keys.lengths_B)
    scores_BgS = _scores(segment, state.queries(layer, q_BH1D), k_BGSD, keys.lengths_B[:, None], state, scale)
    most = min(segment.most, longest)
    counts_Bg = counts_B.clamp(min=0)[:, None].expand(-1, scores_BgS.shape[1])
    room.counts_B.copy_(counts_B)
    room.chosen_BgN[:, :, :most] = top_ascending(scores_BgS, counts_Bg, most, NO_TOKEN)
    state.choose(segment, room)


def _scores(
    segment: SegmentProgram, q_BHWD: torch.Tensor, k_BGSD: torch.Tensor, lengths_B1: torch.Tensor, state: DecodeState,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """[B, g, S], float32; -inf for sinks, recent tokens and whatever is no token."""
    queries, device = q_BHWD.shape[2], q_BHWD.device
    positions_BW = lengths_B1 + on_device(tuple(range(-queries, 0)), device, torch.int32)
    weights_W = on_device(selector_weights(segment.selector, queries), device, torch.float32)
    scores_BgS = token_scores(
        q_BHWD,
        k_BGSD,
        positions_BW,
        weights_W,
        scale=scale,
        heads="max" if segment.heads == "max" else "per_kv_head",
        reduce_max=state.reduce_max if segment.across_ranks else None,
    )
    j_S = torch.arange(k_BGSD.shape[2], dtype=torch.int32, device=device)
    free_BS = (j_S >= segment.sink) & (j_S < lengths_B1 - segment.recent)
    return scores_BgS.masked_fill(~free_BS[:, None], -torch.inf)


def selected_for(layer: LayerProgram, state: DecodeState) -> Selection | None:
    """What the layer of a segment attends to in this step; None is everything."""
    assert layer.follows is not None
    selection = state.chosen(layer.follows)
    if selection is None or layer.kv_map is None:
        return selection
    source = on_device(layer.kv_map, selection.chosen_BgN.device)
    chosen_BGN = selection.chosen_BgN.index_select(1, source)
    return Selection(chosen_BGN, selection.counts_B, selection.sink, selection.recent)
