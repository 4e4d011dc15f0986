"""Decides which tokens the layers of a segment attend to: the filter layer's choice (OmniKV, ICLR 2025, context
selector); and which tokens of a complete prompt a layer evicts: those with the lowest scores, by the plan's `score`.

Softmax over the keys for each query of an observation window, maximum over heads, weighted sum over the window, top-k
among the tokens between sinks and recent ones.

Shapes: B batch, H query heads, G KV heads, S keys, W window queries, T scored tokens of all rows, D head size, K tokens
that stay cached; g is 1 (`heads: max`) or G.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sparsekv.kernels.decode.selection import Scoring, Selection, choose
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.methods import EvictionScore, Layer, method_of
from sparsekv.kernels.scores import observed_attention, token_scores
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import Eviction
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.core.state import DecodeState, Observed, Step


def selector_weights(selector: str, queries: int) -> tuple[float, ...]:
    """Weight of each query of the window, oldest first; only their ratios matter. `last` takes the newest alone,
    `uniform` all alike, `exponential` halves from one to the next older (the paper's three selectors)."""
    ages = range(queries - 1, -1, -1)
    if selector == "last":
        return tuple(float(age == 0) for age in ages)
    if selector == "uniform":
        return tuple(1.0 / queries for _ in ages)
    return tuple(2.0**-age for age in ages)


def scoring_for(segment: SegmentProgram, keys: KeyView, state: DecodeState, backend: str) -> Scoring:
    """The rows that a filter layer scores in this step, and where."""
    _, starts_B = state.budget(segment, backend)
    room = min(state.room(segment), keys.batch * keys.capacity)
    return Scoring(starts_B.to(keys.k.device), room, segment.lists, state.scratch)


def choose_tokens(
    segment: SegmentProgram, step: Step, keys: KeyView, scoring: Scoring, scores_gT: torch.Tensor | None
) -> None:
    """The choice of a filter layer for its segment, recorded in the state, which remembers the new queries.

    Args:
        scoring: where the scores lie.
        scores_gT: those of the new queries; None where the selector looks at older ones too: computed here.
    """
    state, backend = step.state, step.backend
    if scores_gT is None:
        scores_gT = _window_scores(segment, state.queries(segment, step.q_BHQD), keys, state, scoring, step.scale)
    counts_B = state.budget(segment, backend)[0].to(keys.k.device)
    best = partial(
        choose,
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
    chosen_BgN = best()
    if segment.across_ranks and segment.queries == 1:
        _merge_ranks(scores_gT, scoring.starts_B, chosen_BgN, state)
        chosen_BgN = best()
    state.choose(segment, Selection(chosen_BgN, counts_B, segment.sink, segment.recent))


def _merge_ranks(scores_1T: torch.Tensor, starts_B: torch.Tensor, own_B1N: torch.Tensor, state: DecodeState) -> None:
    """Leaves the scores of what any rank chose, the largest of each token, and zeros. A token of the best N over all
    heads is among the best N of the rank whose head gives it its score: so the best N of these are the best of all, and
    ranks exchange 8 N bytes a row, whatever the length."""
    assert state.gather is not None
    chosen_BN = own_B1N[:, 0]
    is_scored_BN = (chosen_BN >= 0) & (starts_B >= 0)[:, None]
    at_BN = torch.where(is_scored_BN, chosen_BN + starts_B[:, None], 0)
    score_BN = torch.where(is_scored_BN, scores_1T[0][at_BN.long()], 0.0)
    own_2BN = torch.stack((at_BN.int().view(torch.float32), score_BN))  # bits: not every backend gathers integers
    at_X, score_X = state.gather(own_2BN).transpose(0, 1).flatten(1)
    scores_1T.zero_()
    scores_1T[0].scatter_reduce_(0, at_X.view(torch.int32).long(), score_X, "amax")


def _window_scores(
    segment: SegmentProgram, q_BHWD: torch.Tensor, keys: KeyView, state: DecodeState, scoring: Scoring, scale: float
) -> torch.Tensor:
    """[g, T], float32: weighted over the newest queries, whose keys are read again."""
    queries, device, gather = q_BHWD.shape[2], q_BHWD.device, state.gather
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
        reduce_max=None if gather is None or not segment.across_ranks else lambda x: gather(x).amax(0),
    )
    j_S = torch.arange(longest, device=device)
    scored_BS = (j_S < keys.lengths_B[:, None]) & (scoring.starts_B >= 0)[:, None]
    at_BS = torch.where(scored_BS, scoring.starts_B[:, None] + j_S, scoring.tokens)  # the last place is cut off
    scores_gT = scores_BgS.new_empty((scoring.lists, scoring.tokens + 1))
    scores_gT[:, at_BS.flatten()] = scores_BgS.transpose(0, 1).flatten(1)
    return scores_gT[:, : scoring.tokens]


def selected_for(
    segment: SegmentProgram, kv_map: tuple[int, ...] | None, state: DecodeState, device: torch.device
) -> Selection | None:
    """The tokens that a layer of the segment attends to in this step, on the device of its keys; None is everything."""
    selection = state.chosen(segment, device)
    if selection is None or kv_map is None:
        return selection
    source = state.constant(kv_map, selection.chosen_BgN.device, torch.int64)
    chosen_BGN = selection.chosen_BgN.index_select(1, source)
    return Selection(chosen_BGN, selection.counts_B, selection.sink, selection.recent)


def eviction_scores(
    rule: Eviction, observed: Observed, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, layer: int, backend: str
) -> torch.Tensor:
    """float32 [B, g, S], higher for tokens that should stay cached: the attention of the observed queries, summed over
    neighbouring tokens and query heads (SnapKV, 2024), or a method from outside."""
    together = rule.heads == "max"
    if rule.is_built_in:
        return observed_attention(
            observed.q_BHWD, k_BGSD, scale=observed.scale, softmax=observed.softmax, together=together, backend=backend
        )
    batch, _, cached, _ = k_BGSD.shape
    chunk = Chunk.uniform(batch, cached - observed.q_BHWD.shape[2], cached)
    facts = Layer(layer, chunk, TileShape(), observed.scale, softmax=observed.softmax)
    scores_BGS = method_of(EvictionScore, rule.score or "").scores(observed.q_BHWD, k_BGSD, v_BGSD, facts, None)
    return scores_BGS.amax(1, keepdim=True) if together else scores_BGS


def rows_to_cache(
    rule: Eviction, length: int, observed: Observed, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, *, layer: int,
    backend: str, gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The rows in memory that stay cached where the others are evicted.

    Args:
        length: tokens so far, evicted ones included.
        observed: the last queries of the prompt, which end where the keys do.
        backend: of decode; "reference" is torch on any device.
        gather: gives the tensors of all ranks whose heads choose together, [ranks, ...].

    Returns:
        int64 [B, g, K] ascending; None where all stay.
    """
    (batch, _, cached, _), device = k_BGSD.shape, k_BGSD.device
    sink, recent, chosen = rule.sink or 0, rule.recent or 0, rule.chosen_tokens(length)
    if rule.kept_tokens(length) >= cached:
        return None
    scores_BgS = eviction_scores(rule, observed.before(None, cached), k_BGSD, v_BGSD, layer, backend)
    if rule.heads == "max" and gather is not None:
        scores_BgS = gather(scores_BgS).amax(0)
    starts_B = torch.arange(batch, dtype=torch.int32, device=device) * cached
    lengths_B, counts_B = (torch.full_like(starts_B, count) for count in (cached, chosen))
    chosen_BgN = choose(
        scores_BgS.transpose(0, 1).flatten(1).contiguous(),
        Scoring(starts_B, batch * cached, scores_BgS.shape[1]),
        lengths_B,
        counts_B,
        capacity=cached,
        most=chosen,
        sink=sink,
        recent=recent,
        backend=backend,
    )
    row_S = torch.arange(cached, device=device).expand(*scores_BgS.shape)
    # where scores are no numbers fewer are chosen
    return torch.cat((row_S[..., :sink], chosen_BgN.long().clamp(min=0), row_S[..., cached - recent :]), 2)
