"""A plan by brute force: a model whose attention follows the definitions of a plan, in plain float32.

Nothing is shared with kernels, index builders and runtime: masks of prefill come from masks.py, the choices of filter
layers from `choose` here, and both run as an attention function of transformers over a DynamicCache that drops nothing.

Shapes: B batch, H query heads, G KV heads, S queries, K keys, D head size.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from masks import best, brute_computed_tiles, brute_heads, brute_mask
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import Dense
from sparsekv.plans.phases import Eviction, Segment
from sparsekv.plans.schema import Plan

_NAME = "brute_force"


class RoundedCache(DynamicCache):
    """Keys and values in e4m3: the first tokens of a head fix its scale, by which the largest number becomes 4 to 8."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._scales: dict[int, list[torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        both = key_states, value_states
        scales = self._scales.setdefault(layer_idx, [(x.abs().amax((0, 2, 3)).log2().floor() - 2).exp2() for x in both])
        rounded = [_in_e4m3(x, scale_G) for x, scale_G in zip(both, scales, strict=True)]
        return super().update(*rounded, layer_idx, *rest, **more)


def _in_e4m3(x_BGSD: torch.Tensor, scale_G: torch.Tensor) -> torch.Tensor:
    scale_G11 = scale_G[:, None, None]
    return (x_BGSD / scale_G11).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale_G11


class BruteForce:
    """Runs `model` by the plan inside its `with` block. One token behind a past is a decode step, all else prefill.

    Attributes:
        tiles, causal: computed in prefill, and of dense attention in the same layers.
        attended, cached: tokens of decode steps, summed over layers and rows; keys that are only scored count half.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._chosen: dict[int, torch.Tensor] = {}  # by filter layer, of the step under way
        self._kept = {layer: Kept(rule) for layer, rule in plan.evicting.items()}
        self._queries: dict[int, torch.Tensor] = {}  # all so far, of filter layers that look back, over one cache
        self.tiles, self.causal, self.attended, self.cached = 0.0, 0.0, 0, 0

    def kept_rows(self, layer: int) -> int:
        """Tokens that an evicting layer has in the end."""
        kept_BGK = self._kept[layer].kept_BGK
        (rows,) = set(kept_BGK.sum(2).flatten().tolist())
        return rows

    def __enter__(self) -> BruteForce:
        self._before = self._model.config._attn_implementation
        AttentionInterface.register(_NAME, self._attend)
        self._model.set_attn_implementation(_NAME)
        return self

    def __exit__(self, *raised: object) -> None:
        self._model.set_attn_implementation(self._before)

    def _attend(
        self, module: Any, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor,
        attention_mask: None, *,
        scaling: float, sliding_window: int | None = None, s_aux: torch.Tensor | None = None,
        softcap: float | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert attention_mask is None
        self._remember(module.layer_idx, q_BHSD)
        self._sinks, self._cap = s_aux, softcap or 0.0
        steps = q_BHSD.shape[2] == 1 < k_BGKD.shape[2]
        mask_of = self._decode_mask if steps else self._prefill_mask
        visible_BHSK = mask_of(module.layer_idx, q_BHSD, k_BGKD, scaling, sliding_window)
        if kept := self._kept.get(module.layer_idx):
            visible_BHSK = kept.mask(q_BHSD, k_BGKD, scaling, self._cap, s_aux, visible_BHSK)
        if steps:
            self._count_step(module.layer_idx, visible_BHSK, sliding_window)
        k_BHKD, v_BHKD = (x.repeat_interleave(q_BHSD.shape[1] // x.shape[1], 1) for x in (k_BGKD, v_BGKD))
        scores_BHSK = capped(q_BHSD @ k_BHKD.mT * scaling, self._cap).masked_fill(~visible_BHSK, -math.inf)
        return (softmax(scores_BHSK, s_aux) @ v_BHKD).transpose(1, 2).contiguous(), None

    def _remember(self, layer: int, q_BHSD: torch.Tensor) -> None:
        plan = self._plan.decode
        segments = [one for bucket in plan.lengths for one in bucket.segments] if plan else []
        if any(one.filter == layer and one.selector != "last" for one in segments):
            self._queries[layer] = torch.cat((self._queries.get(layer, q_BHSD[:, :, :0]), q_BHSD), 2)

    def _count_step(self, layer: int, visible_BH1K: torch.Tensor, window: int | None) -> None:
        batch, _, _, length = visible_BH1K.shape
        plan, attended_B = self._plan.decode, visible_BH1K[:, 0].sum((1, 2))
        for segment in plan.bucket(length).segments if plan else ():
            if segment.filter == layer in segment.layers:
                attended_B = (attended_B + length // 2).clamp(max=length)
        self.attended += int(attended_B.sum())
        self.cached += batch * min(length, window or length)

    def _prefill_mask(
        self, layer: int, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        batch, heads, rows, _ = q_BHSD.shape
        length, plan = k_BGKD.shape[2], self._plan.prefill
        chunk = Chunk.uniform(batch, length - rows, length)
        i_S1, j_K = torch.arange(length - rows, length)[:, None], torch.arange(length)
        if plan is None:
            return (j_K <= i_S1) & (i_S1 - j_K < (window or length))
        patterns = plan.bucket(length).patterns(layer, heads)
        tiles_of = partial(brute_heads, chunk=chunk, tile=plan.tile, scale=scale, window=window, cap=self._cap)
        computed = tiles_of(patterns, q_BHSD, k_BGKD)
        self.tiles += sum(map(sum, brute_computed_tiles(computed, plan.tile)))
        self.causal += sum(map(sum, brute_computed_tiles(tiles_of((Dense(),) * heads, q_BHSD, k_BGKD), plan.tile)))
        return brute_mask(computed, chunk, plan.tile, rows, window)

    def _decode_mask(
        self, layer: int, q_BH1D: torch.Tensor, k_BGKD: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        (batch, heads), (groups, length) = q_BH1D.shape[:2], k_BGKD.shape[1:3]
        visible_BGK = torch.ones(batch, groups, length, dtype=torch.bool)
        plan = self._plan.decode
        for segment in plan.bucket(length).segments if plan else ():
            if segment.filter == layer:
                newest, rest = self._queries.get(layer, q_BH1D), (self._sinks, self._cap)
                self._chosen[layer] = choose(segment, newest, k_BGKD, scale, *rest)
            if layer in segment.layers:
                visible_BGK = self._chosen[segment.filter]
                if isinstance(segment.heads, dict):
                    visible_BGK = visible_BGK[:, list(segment.heads[layer])]
        in_window_K = torch.arange(length) > length - 1 - (window or length)
        return (visible_BGK & in_window_K).repeat_interleave(heads // groups, 1)[:, :, None]


class Kept:
    """Which tokens of one cache an evicting layer still has, over a cache that drops nothing."""

    def __init__(self, rule: Eviction) -> None:
        self._rule, self.kept_BGK, self._queries, self._generated = rule, None, None, 0

    def mask(self, q_BHSD, k_BGKD, scale, cap, sinks_H, visible_BHSK):
        """bool [B, H, S, K]: `visible_BHSK` without the tokens that are dropped by now."""
        (batch, groups, length, _), rows = k_BGKD.shape, q_BHSD.shape[2]
        if self.kept_BGK is None:
            self.kept_BGK = torch.ones(batch, groups, 0, dtype=torch.bool)
        if rows == 1 < length:
            self._complete(k_BGKD[:, :, :-1], scale, cap, sinks_H)
            self._generated += 1
            self._grow(1)
            if self._generated > self._rule.generated:
                self.kept_BGK[:, :, length - self._rule.generated - 1] = False
        else:
            self._generated = 0
            self._queries = q_BHSD if self._queries is None else torch.cat((self._queries, q_BHSD), 2)
            if not self.kept_BGK.all():
                visible_BHSK = torch.arange(length) <= torch.arange(length - rows, length)[:, None]
            self._grow(rows)
        return visible_BHSK & self.kept_BGK.repeat_interleave(q_BHSD.shape[1] // groups, 1)[:, :, None]

    def _grow(self, rows):
        self.kept_BGK = torch.cat((self.kept_BGK, torch.ones(*self.kept_BGK.shape[:2], rows, dtype=torch.bool)), 2)

    def _complete(self, k_BGKD, scale, cap, sinks_H):
        """The prompt is: drops what the rule does not keep, one KV head of one batch row at a time."""
        if self._queries is None:
            return
        observed, self._queries = self._queries[:, :, -self._rule.observe :], None
        scores_BGK = torch.zeros(self.kept_BGK.shape, dtype=torch.float64)
        per_group = observed.shape[1] // k_BGKD.shape[1]
        for b, g in product(range(len(k_BGKD)), range(k_BGKD.shape[1])):
            held = self.kept_BGK[b, g].nonzero()[:, 0]
            attention = torch.zeros(len(held), dtype=torch.float64)
            for h, w in product(range(g * per_group, (g + 1) * per_group), range(observed.shape[2])):
                seen = held[: len(held) - observed.shape[2] + w + 1]
                logits = capped(k_BGKD[b, g, seen].double() @ observed[b, h, w].double() * scale, cap)
                sink = 0.0 if sinks_H is None else sinks_H[h].double().exp()
                attention[: len(seen)] += logits.exp() / (logits.exp().sum() + sink)
            near = [attention[max(0, j - 2) : j + 3].sum() for j in range(len(held))]
            scores_BGK[b, g, held] = torch.stack(near)
        if self._rule.heads == "max":
            scores_BGK = scores_BGK.amax(1, keepdim=True).expand_as(scores_BGK)
        for b, g in product(range(len(k_BGKD)), range(k_BGKD.shape[1])):
            self.kept_BGK[b, g] = self._choose(self.kept_BGK[b, g], scores_BGK[b, g])

    def _choose(self, kept_K, scores_K):
        rule, held = self._rule, kept_K.nonzero()[:, 0].tolist()
        count = rule.keep.resolve(len(kept_K))
        if rule.sink + count + rule.recent >= len(held):
            return kept_K
        free = held[rule.sink : len(held) - rule.recent]
        chosen = best({j: scores_K[j].item() for j in free}, count)
        return torch.zeros_like(kept_K).index_fill_(0, torch.tensor(held), True) & ~torch.isin(
            torch.arange(len(kept_K)), torch.tensor(sorted(set(free) - set(chosen)))
        )


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scores under a soft cap."""
    return cap * torch.tanh(scores / cap) if cap else scores


def softmax(scores_BHSK: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Attention weights; a sink is one more key, whose weight is left out."""
    if sinks_H is None:
        return scores_BHSK.softmax(-1)
    sinks_BHS1 = sinks_H[:, None, None].expand(*scores_BHSK.shape[:3], 1)
    return torch.cat((scores_BHSK, sinks_BHS1), -1).softmax(-1)[..., :-1]


def choose(
    segment: Segment,
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """The tokens that the layers of a segment attend to, by the newest queries of its filter layer: bool [B, G, K]."""
    (batch, groups, length, _), budget = k_BGKD.shape, segment.budget.resolve(k_BGKD.shape[2])
    visible_BGK = torch.ones(batch, groups, length, dtype=torch.bool)
    if segment.sink + budget + segment.recent >= length:
        return visible_BGK
    scores_BGK, k_BHKD = torch.zeros(visible_BGK.shape), k_BGKD.repeat_interleave(q_BHSD.shape[1] // groups, 1)
    for age in range(1 if segment.selector == "last" else min(segment.window, q_BHSD.shape[2])):
        logits_BH1K = q_BHSD[:, :, -1 - age, None] @ k_BHKD[:, :, : length - age].mT * scale
        weights_BGK = softmax(capped(logits_BH1K, cap), sinks_H)[:, :, 0].unflatten(1, (groups, -1)).amax(2)
        weights_BGK = weights_BGK.amax(1, keepdim=True) if segment.heads == "max" else weights_BGK
        scores_BGK[:, :, : length - age] += weights_BGK * (0.5**age if segment.selector == "exponential" else 1.0)
    free = range(segment.sink, length - segment.recent)
    visible_BGK[:, :, free.start : free.stop] = False
    for visible_K, scores_K in zip(visible_BGK.flatten(0, 1), scores_BGK.flatten(0, 1).tolist(), strict=True):
        visible_K[best({j: scores_K[j] for j in free}, budget)] = True
    return visible_BGK
