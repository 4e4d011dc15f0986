"""Rules of other methods, each a mode of `evaluate`: what curves show beside our plans.

Of prefill, the same in every head, patterns that plans have anyway run as plans, through the kernels: StreamingLLM's
mask, and vertical_slash at one density. Rules of others over tiles stand in tile_rules.py.

Of decode: what every layer attends to in a step; prompts are prefilled densely. Two rules choose in each layer for
itself and are computed here, in plain torch, as no plan expresses them:

* `ExactTopK`: the keys with the most attention of this very step. It reads all keys to know them, which is not counted:
  an oracle of what choosing can save, not a method.
* `QuestPages` (Quest, ICML 2024, section 3.3): pages of 16 tokens with the least and the largest value of each key
  channel; those are read whose bound on the scores of the query is highest. The bounds of a page count as one token,
  since two vectors are what a token has. The first two layers are dense, as in the paper.

Rules that choose filter layers (OmniKV, Kascade, even distances) are segments, and run as plans.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S queries or keys, P pages, D head size, J
layers that attend, I layers that choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.scores import scaled_scores, token_scores
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner.decode_search import anchor_layers
from sparsekv.planner.evaluation import PlanMode
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.filter_layers import Segments, segments_of
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.profile_data import LengthProfile, Profile, Reuse
from sparsekv.planner.profile.search_space import CommonPrefix, Patterns, fit_to_target
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern, PatternRange, TileShape
from sparsekv.plans.phases import (
    RECENT,
    SINK,
    DecodeBucket,
    DecodePlan,
    HeadGroup,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, Observer, capture_attention


def prefill_plan(model: ModelInfo, tile: TileShape, patterns: Mapping[int, Patterns]) -> Plan:
    """A plan for every length."""
    groups = tuple(
        HeadGroup(layer=layer, heads=(head,), pattern=pattern)
        for layer, own in patterns.items()
        for head, pattern in enumerate(own)
    )
    bucket = PrefillBucket(up_to=None, heads=groups)
    return Plan(status="unverified", model=model, prefill=PrefillPlan(tile=tile, lengths=(bucket,)))


def static_at_density(patterns: PatternRange, length: int, density: float, tile: TileShape) -> Pattern:
    """The largest pattern of a static range within a density at a length."""
    nothing_11SD = torch.empty(1, 1, length, 1)  # a static pattern reads neither queries nor keys
    prefix = CommonPrefix(nothing_11SD, nothing_11SD, Chunk.uniform(1, 0, length), tile, 1.0)
    return fit_to_target(prefix, [patterns], [density * prefix.causal_tiles])[0]


def fitted_at_densities(
    loaded: LoadedModel, ids_1S: torch.Tensor, patterns: PatternRange, densities: Sequence[float], tile: TileShape
) -> tuple[dict[int, Patterns], ...]:
    """Patterns of one range that come to a density in every head, on one prompt.

    Args:
        ids_1S: the prompt, on the device of the model.

    Returns:
        For each density the patterns of every layer with full attention, one a head.
    """
    found: tuple[dict[int, Patterns], ...] = tuple({} for _ in densities)

    def fit(call: AttentionCall) -> None:
        if call.window is not None:
            return
        prefix = CommonPrefix(call.q_BHSD, call.k_BGKD, call.chunk, tile, call.scale)
        prefix = prefix.with_lines([patterns.last_q] if patterns.last_q else [])
        for density, by_layer in zip(densities, found, strict=True):
            targets = [density * prefix.causal_tiles] * prefix.heads
            by_layer[call.layer] = fit_to_target(prefix, [patterns] * prefix.heads, targets)

    model: Any = loaded.model
    with capture_attention(model, fit), torch.no_grad():
        model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
    return found


@dataclass(frozen=True, slots=True)
class SamePattern:
    """One pattern in every head of the layers with full attention."""

    pattern: Pattern
    tile: TileShape

    def index(self, call: AttentionCall) -> TileIndex:
        patterns = (self.pattern,) * call.q_BHSD.shape[1]
        return build_index(patterns, call.q_BHSD, call.k_BGKD, call.chunk, self.tile, scale=call.scale)

    def mode(self, info: ModelInfo) -> PlanMode:
        patterns = {layer: (self.pattern,) * info.by_layer[layer].heads for layer in info.full_layers}
        return PlanMode(prefill_plan(info, self.tile, patterns), "prefill")


PAGE = 16
QUEST_DENSE = 2  # layers
_ANCHORS_A_LAYER = 5 / 32  # Kascade's choice for 32 layers


@dataclass(frozen=True, slots=True)
class Chosen:
    """Holds what one layer attends to in a step.

    Attributes:
        seen_BGS: which keys, of every KV head, or of all alike where G is 1.
        read: tokens read of each row, summaries included.
    """

    seen_BGS: torch.Tensor
    read: int


StepRule = Callable[[AttentionCall], Chosen | None]
"""What a layer attends to, from the new query; None is everything."""


@dataclass(frozen=True, slots=True)
class ExactTopK:
    """The best keys between sinks and recent ones, by this step's own attention.

    Attributes:
        heads: "max" makes one choice a layer, by the largest share over its heads, as filter layers do; "per_kv_head"
            one a KV head.
    """

    budget: Budget
    heads: Literal["max", "per_kv_head"] = "max"
    sink: int = SINK
    recent: int = RECENT

    def __call__(self, call: AttentionCall) -> Chosen | None:
        length = call.k_BGKD.shape[2]
        count = self.budget.resolve(length)
        if self.sink + count + self.recent >= length:
            return None
        one_1 = torch.ones(1, device=call.q_BHSD.device)
        newest_11 = one_1[None].long() * (length - 1)
        scores_BgS = token_scores(call.q_BHSD, call.k_BGKD, newest_11, one_1, scale=call.scale, heads=self.heads)
        best_BgK = scores_BgS[..., self.sink : length - self.recent].topk(count).indices + self.sink
        seen_BgS = torch.zeros_like(scores_BgS, dtype=torch.bool).scatter_(-1, best_BgK, True)
        seen_BgS[..., : self.sink] = seen_BgS[..., length - self.recent :] = True
        return Chosen(seen_BgS, self.sink + count + self.recent)


@dataclass(frozen=True, slots=True)
class QuestPages:
    """The pages of highest upper bound, for each KV head; the newest page is always among them."""

    budget: Budget

    def __call__(self, call: AttentionCall) -> Chosen | None:
        length, groups = call.k_BGKD.shape[2], call.k_BGKD.shape[1]
        pages = math.ceil(length / PAGE)
        count = math.ceil(self.budget.resolve(length) / PAGE)
        if call.layer < QUEST_DENSE or count >= pages:
            return None
        bound_BGP = _upper_bounds(call.q_BHSD.float().unflatten(1, (groups, -1))[:, :, :, 0], call.k_BGKD.float())
        bound_BGP[..., -1] = torch.inf
        best_BGK = bound_BGP.topk(count).indices
        seen_BGP = torch.zeros_like(bound_BGP, dtype=torch.bool).scatter_(-1, best_BGK, True)
        newest = length - (pages - 1) * PAGE
        return Chosen(seen_BGP.repeat_interleave(PAGE, -1)[..., :length], (count - 1) * PAGE + newest + pages)


def _upper_bounds(q_BGND: torch.Tensor, k_BGSD: torch.Tensor) -> torch.Tensor:
    """[B, G, P]: what no score of the page exceeds, the largest over the query heads."""
    missing = -k_BGSD.shape[2] % PAGE
    low_BGPD, high_BGPD = (
        reduce(pad(k_BGSD, (0, 0, 0, missing), value=fill).unflatten(2, (-1, PAGE)), 3)
        for reduce, fill in ((torch.amin, torch.inf), (torch.amax, -torch.inf))
    )
    bound_BGNP = q_BGND.clamp(min=0) @ high_BGPD.mT + q_BGND.clamp(max=0) @ low_BGPD.mT
    return bound_BGNP.amax(2)


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


@dataclass(frozen=True, slots=True)
class StepwiseRule:
    """A mode of `compare` in which every decode step follows a rule."""

    rule: StepRule

    stepwise = True
    dense_prefill = True

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        steps = RuleSteps(self.rule)
        with capture_attention(model, steps):
            yield lambda: steps.spent


def _attend(call: AttentionCall, seen_BGS: torch.Tensor) -> torch.Tensor:
    q_BGND = call.q_BHSD[:, :, 0].unflatten(1, (call.k_BGKD.shape[1], -1))
    scores_BGNS = scaled_scores(q_BGND, call.k_BGKD, call.scale)
    weights_BGNS = scores_BGNS.masked_fill_(~seen_BGS.unsqueeze(2), -torch.inf).softmax(-1)
    return (weights_BGNS @ call.v_BGKD.float()).flatten(1, 2).unsqueeze(2).to(call.q_BHSD.dtype)


# --- filter layers by the rules of others -----------------------------------------------------------------------------

FilterRuleName = Literal["omnikv", "kascade", "even"]
_FIRST_DENSE = 2
_LAYERS_A_FILTER = 32 / 3  # OmniKV's choice for 32 layers has three filters


def segments_by_rule(profile: Profile, entry: LengthProfile, rule: FilterRuleName, budget: Budget) -> Segments:
    """Segments of one length whose filter layers are chosen by a rule of others.

    `omnikv`: its reading of inter-layer similarity, with its wait layer. `kascade`: its anchor layers, five of 32, one
    choice for all heads. `even`: as many as these at even distances, from the second layer on.

    Args:
        entry: of the profile, with decode statistics.
        budget: what filters choose; similarities are those of the largest profiled budget within it, or the least.
    """
    reuse, full = entry.reuse, profile.model.full_layers
    assert reuse is not None
    kept_JI = _similarities(profile, reuse, budget, entry.length)
    count = max(1, round(_ANCHORS_A_LAYER * len(full)))
    even = [full[1 + (len(full) - 1) * number // count] for number in range(count)]
    filters: Sequence[int] = even
    if rule == "omnikv":
        filters = similar_layers(kept_JI, full)
    elif rule == "kascade":
        filters = anchor_layers(kept_JI, reuse.importance, full[1:], count)
    segments = segments_of(filters, full, reuse, budget, entry.length)
    return _after_wait(segments) if rule == "omnikv" else segments


def _after_wait(segments: Segments) -> Segments:
    """With the first layer after each filter left dense."""
    rests = [tuple(layer for layer in one.layers if layer != one.filter + 1) for one in segments]
    return tuple(one.model_copy(update={"layers": rest}) for one, rest in zip(segments, rests, strict=True) if rest)


def similar_layers(kept_JI: Floats, full: Sequence[int] | None = None) -> tuple[int, ...]:
    """Filter layers by OmniKV's similarity.

    Args:
        kept_JI: share of layer j's attention mass that the choice of layer i holds.
        full: the layers with full attention, which alone choose and are served; all of them when None.

    Returns:
        For every 32 layers three, each the best server of the stretch of layers after it, at least half a stretch
        apart, the first two layers excepted.
    """
    layers = len(kept_JI)
    count = max(1, round(layers / _LAYERS_A_FILTER))
    stretch = max(1, layers // (count + 1))
    among = range(layers) if full is None else full
    stretches = {i: [j for j in among if i < j <= i + stretch] for i in among if i >= min(_FIRST_DENSE, layers - 2)}
    served = {i: float(np.mean(kept_JI[after, i])) for i, after in stretches.items() if after}
    chosen: list[int] = []
    for layer in sorted(served, key=lambda i: (-served[i], i)):
        if len(chosen) < count and all(abs(layer - other) >= max(2, stretch // 2) for other in chosen):
            chosen.append(layer)
    return tuple(sorted(chosen))


def _similarities(profile: Profile, reuse: Reuse, budget: Budget, length: int) -> Floats:
    sizes = [one.resolve(length) for one in reuse.budgets]
    within = [number for number, size in enumerate(sizes) if size <= budget.resolve(length)]
    number = max(within, key=sizes.__getitem__) if within else sizes.index(min(sizes))
    kept_JI, full = np.zeros((profile.model.layers,) * 2), profile.model.full_layers
    for layer in full:
        row = reuse.kept[number][layer]
        kept_JI[layer, : len(row)] = np.minimum(row, 1.0)
    kept_JI[:, sorted(set(range(profile.model.layers)).difference(full))] = 0.0
    return kept_JI


def decode_plan(model: ModelInfo, segments: tuple[Segment, ...]) -> Plan:
    """A plan with these segments at every length."""
    bucket = DecodeBucket(up_to=None, segments=segments)
    return Plan(status="unverified", model=model, decode=DecodePlan(lengths=(bucket,)))


class Rounded:
    """Dense in bfloat16, as a mode of `compare`."""

    stepwise = True
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """Weights that are stored in bfloat16 come back as they were."""
        weights: Any = model
        weights.to(torch.bfloat16)
        try:
            yield lambda: Spent()
        finally:
            weights.to(torch.float32)
