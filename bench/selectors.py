"""Decode selectors at work, behind a dense prefill and in plain torch: what a layer attends to in a step; and three of
them.

* `TopK`, `TopKByHead`: the keys with the most attention of this very step, one choice a layer or one a KV head. All
  keys are read to know them, which is not counted: an oracle of what choosing can save, not a method.
* `Quest` (ICML 2024, section 3.3): pages of 16 tokens with the least and the largest value of each key channel; those
  are read whose bound on the scores of the query is highest. The bounds of a page count as one token, since two vectors
  are what a token has. The first two layers are dense, as in the paper.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S queries or keys, P pages, L new keys, D head
size; g is 1 or G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from sparsekv.kernels.methods import DecodeSelector, Layer
from sparsekv.kernels.scores import scaled_scores
from sparsekv.planner.evaluation.results import Spent
from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import RECENT, SINK
from sparsekv.runtime.hf.observe import AttentionCall, Observer


class TopK(DecodeSelector):
    name, sink, recent = "top_k", SINK, RECENT
    heads: Any = "max"

    def scores(self, q_BHD: torch.Tensor, k_BGKD: torch.Tensor, state: Any, layer: Layer) -> torch.Tensor:
        q_BGND = q_BHD.unflatten(1, (k_BGKD.shape[1], -1))
        best_BGK: torch.Tensor = scaled_scores(q_BGND, k_BGKD, layer.scale).softmax(-1).amax(2)
        return best_BGK.amax(1, keepdim=True) if self.heads == "max" else best_BGK


class TopKByHead(TopK):
    name, heads = "top_k_by_head", "per_kv_head"


class Quest(DecodeSelector):
    name, page, dense_layers, reads = "quest", 16, 2, 1.0

    def append(self, state: Any, k_BGLD: torch.Tensor) -> Any:
        """How many keys there are, and the bounds of their pages; new keys first fill the last page."""
        k_BGLD = k_BGLD.float()
        count, low_BGPD, high_BGPD = state or (0, k_BGLD[:, :, :0], k_BGLD[:, :, :0])
        if room := -count % self.page:
            last_BG1D = k_BGLD[:, :, :room].amin(2, True), k_BGLD[:, :, :room].amax(2, True)
            low_BGPD[:, :, -1:] = torch.minimum(low_BGPD[:, :, -1:], last_BG1D[0])
            high_BGPD[:, :, -1:] = torch.maximum(high_BGPD[:, :, -1:], last_BG1D[1])
        new_BGLD = k_BGLD[:, :, room:]
        missing = -new_BGLD.shape[2] % self.page
        pages = (new_BGLD.shape[2] + missing) // self.page

        def of_pages(reduce: Any, fill: float) -> torch.Tensor:
            filled_BGLD = pad(new_BGLD, (0, 0, 0, missing), value=fill)
            bound_BGPD: torch.Tensor = reduce(torch.unflatten(filled_BGLD, 2, (pages, self.page)), 3)
            return bound_BGPD

        low_BGPD = torch.cat((low_BGPD, of_pages(torch.amin, torch.inf)), 2)
        return count + k_BGLD.shape[2], low_BGPD, torch.cat((high_BGPD, of_pages(torch.amax, -torch.inf)), 2)

    def scores(self, q_BHD: torch.Tensor, k_BGKD: torch.Tensor, state: Any, layer: Layer) -> torch.Tensor:
        _, low_BGPD, high_BGPD = state
        q_BGND = q_BHD.float().unflatten(1, (k_BGKD.shape[1], -1))
        bound_BGNP: torch.Tensor = q_BGND.clamp(min=0) @ high_BGPD.mT + q_BGND.clamp(max=0) @ low_BGPD.mT
        return bound_BGNP.amax(2)


# --- at work ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """The keys that one layer attends to in a step.

    Attributes:
        seen_BGS: of every KV head, or of all alike where G is 1.
        read: tokens read of each row, summaries included.
    """

    seen_BGS: torch.Tensor
    read: int


StepRule = Callable[[AttentionCall], Chosen | None]
"""The keys that a layer attends to, from the new query; None is everything."""


class Selecting:
    """A step rule: the best pages of a selector, so that a layer reads so many tokens in all, scoring included.

    Args:
        share: of the cached tokens; 1 reads everything.
    """

    def __init__(self, selector: DecodeSelector, share: float) -> None:
        self.selector, self.share = selector, share
        self._states: dict[int, tuple[int, Any]] = {}

    def __call__(self, call: AttentionCall) -> Chosen | None:
        one, length = self.selector, call.k_BGKD.shape[2]
        if call.layer < one.dense_layers:
            return None
        state, pages = self._appended(call), math.ceil(length / one.page)
        recent = max(one.recent, length - (pages - 1) * one.page) if one.page > 1 else one.recent
        first, end = math.ceil(one.sink / one.page), max(0, length - recent) // one.page
        recent = length - end * one.page
        count = round((self.share * length - one.reads * pages - one.sink - recent) / one.page)
        if count >= end - first:
            return None
        facts = Layer(call.layer, call.chunk, TileShape(), call.scale, call.window, call.softmax)
        scores_BgP = one.scores(call.q_BHSD[:, :, 0], call.k_BGKD, state, facts)
        if scores_BgP.shape[-1] != pages:
            raise ShapeError(f"expected {pages} scores of pages of {one.name}, found {scores_BgP.shape[-1]}")
        best_BgN = scores_BgP[..., first:end].topk(max(0, count)).indices + first
        seen_BgP = torch.zeros_like(scores_BgP, dtype=torch.bool).scatter_(-1, best_BgN, True)
        seen_BgS = seen_BgP.repeat_interleave(one.page, -1)[..., :length]
        seen_BgS[..., : one.sink] = seen_BgS[..., length - recent :] = True
        return Chosen(seen_BgS, one.sink + max(0, count) * one.page + recent + round(one.reads * pages))

    def _appended(self, call: AttentionCall) -> Any:
        length = call.k_BGKD.shape[2]
        count, state = self._states.get(call.layer, (0, None))
        if length <= count:  # the same prompt once more
            count, state = 0, None
        state = self.selector.append(state, call.k_BGKD[:, :, count:])
        self._states[call.layer] = length, state
        return state


class RuleSteps:
    """An observer of `capture_attention` that counts what is read.

    Args:
        rule: what decode steps follow; None is dense.
        prompts: sees what is no decode step.
    """

    def __init__(self, rule: StepRule | None = None, prompts: Observer = lambda call: None) -> None:
        self.rule, self.prompts = rule, prompts
        self.spent = Spent()

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        if call.q_BHSD.shape[2] > 1 or not call.chunk.past[0]:
            return self.prompts(call)
        batch, length = call.q_BHSD.shape[0], call.k_BGKD.shape[2]
        visible = length if call.window is None else min(length, call.window)
        found = self.rule(call) if self.rule and call.window is None else None
        read = visible if found is None else min(visible, found.read)
        self.spent += Spent(attended=float(batch * read), cached=float(batch * visible))
        return None if found is None else _attend(call, found.seen_BGS)


def _attend(call: AttentionCall, seen_BGS: torch.Tensor) -> torch.Tensor:
    q_BGND = call.q_BHSD[:, :, 0].unflatten(1, (call.k_BGKD.shape[1], -1))
    scores_BGNS = scaled_scores(q_BGND, call.k_BGKD, call.scale)
    weights_BGNS = scores_BGNS.masked_fill_(~seen_BGS.unsqueeze(2), -torch.inf).softmax(-1)
    return (weights_BGNS @ call.v_BGKD.float()).flatten(1, 2).unsqueeze(2).to(call.q_BHSD.dtype)
