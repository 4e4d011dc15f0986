"""Which tokens the layers of a segment attend to: the filter layer's choice (OmniKV, ICLR 2025, context selector).

Softmax over the keys for each query of an observation window, maximum over heads, weighted sum over the window, top-k
among the tokens between sinks and recent ones.

Shapes: B batch, H query heads, G KV heads, S keys, W window queries, T scored tokens of all rows, D head size; g is 1
(`heads: max`) or G.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.choose import choose
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.scores import token_scores
from sparsekv.runtime.core.program import LayerProgram, SegmentProgram
from sparsekv.runtime.core.state import DecodeState, lists_of


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


def scoring_for(layer: LayerProgram, keys: KeyView, state: DecodeState, backend: str) -> Scoring:
    """Which rows a filter layer scores in this step, and where."""
    segment = layer.filters
    assert segment is not None
    _, starts_B = state.budget(segment, backend)
    room = min(state.room(layer), keys.batch * keys.capacity)
    return Scoring(starts_B.to(keys.k.device), room, lists_of(layer), state.scratch)


def choose_tokens(
    layer: LayerProgram,
    q_BH1D: torch.Tensor,
    keys: KeyView,
    state: DecodeState,
    scoring: Scoring,
    scores_gT: torch.Tensor | None,
    *,
    scale: float,
    backend: str,
) -> None:
    """The choice of a filter layer for its segment, recorded in the state.

    Args:
        layer: a filter layer.
        q_BH1D: the new queries; `state.remember` has seen them.
        keys: all keys, the new ones included.
        state: of the step.
        scoring: where the scores lie.
        scores_gT: those of the new queries; None where the selector looks at older ones too: computed here.
        scale: softmax scale.
        backend: of the attention.
    """
    segment = layer.filters
    assert segment is not None
    if scores_gT is None:
        scores_gT = _window_scores(segment, state.queries(layer, q_BH1D), keys, state, scoring, scale)
    elif segment.across_ranks:
        assert state.reduce_max is not None
        scores_gT = state.reduce_max(scores_gT)
    counts_B = state.budget(segment, backend)[0].to(keys.k.device)
    chosen_BgN = choose(
        scores_gT,
        scoring,
        keys.lengths_B,
        counts_B,
        capacity=keys.capacity,
        most=segment.most,
        sink=segment.sink,
        recent=segment.recent,
        backend=backend,
    )
    state.choose(segment, Selection(chosen_BgN, counts_B, segment.sink, segment.recent))


def _window_scores(
    segment: SegmentProgram, q_BHWD: torch.Tensor, keys: KeyView, state: DecodeState, scoring: Scoring, scale: float
) -> torch.Tensor:
    """[g, T], float32: weighted over the newest queries, whose keys are read again."""
    queries, device = q_BHWD.shape[2], q_BHWD.device
    longest = max(state.lengths) if state.lengths else keys.capacity
    ages_W = state.constant(tuple(range(-queries, 0)), device, torch.int32)
    scores_BgS = token_scores(
        q_BHWD,
        keys.contiguous_keys(longest),
        keys.lengths_B[:, None] + ages_W,
        state.constant(selector_weights(segment.selector, queries), device, torch.float32),
        scale=scale,
        softmax=keys.softmax,
        heads="max" if segment.heads == "max" else "per_kv_head",
        reduce_max=state.reduce_max if segment.across_ranks else None,
    )
    j_S = torch.arange(longest, device=device)
    scored_BS = (j_S < keys.lengths_B[:, None]) & (scoring.starts_B >= 0)[:, None]
    at_BS = torch.where(scored_BS, scoring.starts_B[:, None] + j_S, scoring.tokens)  # the last place is cut off
    scores_gT = scores_BgS.new_empty((scoring.lists, scoring.tokens + 1))
    scores_gT[:, at_BS.flatten()] = scores_BgS.transpose(0, 1).flatten(1)
    return scores_gT[:, : scoring.tokens]


def selected_for(layer: LayerProgram, state: DecodeState, device: torch.device) -> Selection | None:
    """What the layer of a segment, whose keys are on `device`, attends to in this step; None is everything."""
    assert layer.follows is not None
    selection = state.chosen(layer.follows, device)
    if selection is None or layer.kv_map is None:
        return selection
    source = state.constant(layer.kv_map, selection.chosen_BgN.device, torch.int64)
    chosen_BGN = selection.chosen_BgN.index_select(1, source)
    return Selection(chosen_BGN, selection.counts_B, selection.sink, selection.recent)
