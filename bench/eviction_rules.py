"""KV cache eviction by a plan's rules and by those of others, after one dense prefill: what stays is a mask.

* A plan's `kv_cache` keeps what the runtime keeps (`rows_to_cache`).
* SnapKV (2024, section 4): each KV head keeps the keys that the last 64 queries attend to most, and these.
* Expected attention (arXiv 2510.00636): by the mean and covariance of a head's queries before rotation, which future
  positions rotate on average; the expected weight of a key, averaged over the query heads of its KV head, times the
  norm of its value. Heads share a layer's budget as in AdaKV (arXiv 2407.11550).

Both take one share of every layer. Queries are unrotated by halves, as Llama and Qwen rotate them.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S tokens of a prompt, W observed queries, D head
size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from sparsekv.bench.baselines import Chosen, RuleSteps
from sparsekv.planner.evaluation.predictions import Prefilled, prefill
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import tokens
from sparsekv.plans.phases import Eviction
from sparsekv.runtime.core.select import rows_to_cache
from sparsekv.runtime.core.state import Observed
from sparsekv.runtime.hf.describe import config_of, decoder_of
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

_SINK, _FUTURE = 4, 512  # expected attention: tokens that are no statistics, positions that follow
_EPSILON, _SAFE = 0.02, 0.2  # of it: added to expected weights; share of its own budget that a head always has
_SNAP, _OBSERVED = 64, 256  # queries
_ROWS = 4096  # whose statistics are added at once
ROTATE_BY_HALVES = ("llama", "qwen2", "qwen3", "mistral")  # model types

EvictionRule = Literal["snapkv", "expected_attention"]
Masks = Mapping[int, torch.Tensor]
"""Masks of the cached tokens of a prompt by layer, bool [B, g, S]; layers that are not named keep all."""


@dataclass(slots=True)
class QueryStatistics:
    """Sums over the queries of a layer before rotation, sinks left out."""

    count: int
    sum_BHD: torch.Tensor
    square_BHDD: torch.Tensor

    @property
    def mean_BHD(self) -> torch.Tensor:  # noqa: N802
        return self.sum_BHD / self.count

    @property
    def covariance_BHDD(self) -> torch.Tensor:  # noqa: N802
        mean_BHD = self.mean_BHD
        return self.square_BHDD / self.count - mean_BHD[..., :, None] * mean_BHD[..., None, :]


@dataclass(slots=True)
class PromptObserver:
    """Remembers of every layer the last queries of a prompt and the statistics of all of them.

    Attributes:
        rotation: cosines and sines [S, D] of positions.
    """

    rotation: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    newest: dict[int, Observed] = field(default_factory=dict)
    statistics: dict[int, QueryStatistics] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, rules: tuple[str, ...]) -> PromptObserver:
        """Raises UnsupportedError where expected attention is asked for and the model rotates otherwise."""
        if "expected_attention" not in rules:
            return cls()
        if (kind := config_of(model).model_type) not in ROTATE_BY_HALVES:
            raise UnsupportedError(
                f"expected one of {', '.join(ROTATE_BY_HALVES)}, whose queries are unrotated by halves, for expected "
                f"attention, found {kind}; leave the method out"
            )
        rotary: Any = decoder_of(model).rotary_emb

        def rotation(like: torch.Tensor, at_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos_1SD, sin_1SD = rotary(like.float(), at_S[None])
            return cos_1SD[0].float(), sin_1SD[0].float()

        return cls(rotation)

    def __call__(self, call: AttentionCall) -> None:
        if call.window is not None:
            return
        new = Observed(call.q_BHSD[:, :, -_OBSERVED:], call.scale, call.softmax)
        self.newest[call.layer] = new.before(self.newest.get(call.layer), _OBSERVED)
        if self.rotation is None:
            return
        past, rows = call.chunk.past[0], call.q_BHSD.shape[2]
        for start in range(max(0, _SINK - past), rows, _ROWS):
            q_BHRD = call.q_BHSD[:, :, start : start + _ROWS].float()
            at_R = torch.arange(past + start, past + start + q_BHRD.shape[2], device=q_BHRD.device)
            cos_RD, sin_RD = self.rotation(call.q_BHSD, at_R)
            self._add(call.layer, q_BHRD * cos_RD - rotated_half(q_BHRD) * sin_RD)

    def _add(self, layer: int, q_BHRD: torch.Tensor) -> None:
        own = QueryStatistics(q_BHRD.shape[2], q_BHRD.sum(2), q_BHRD.mT @ q_BHRD)
        if (before := self.statistics.get(layer)) is not None:
            own.count += before.count
            own.sum_BHD += before.sum_BHD
            own.square_BHDD += before.square_BHDD
        self.statistics[layer] = own


def rotated_half(x: torch.Tensor) -> torch.Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@dataclass(frozen=True, slots=True, eq=False)
class ObservedPrompt:
    """Prompts that ran densely, and what was observed of them; made by `observed_prompt`."""

    prompts: Prefilled
    seen: PromptObserver

    @property
    def past(self) -> int:
        length: int = self.prompts.cache.get_seq_length()
        return length

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_BGSD, v_BGSD = self.prompts.cache.layers[layer].store.tensors
        return k_BGSD[:, :, : self.past], v_BGSD[:, :, : self.past]

    def by_plan(self, rules: Mapping[int, Eviction]) -> Masks:
        """Returns the masks of the evicting layers of a plan."""
        return {layer: self._by_rule(layer, rule) for layer, rule in rules.items() if layer in self.seen.newest}

    def by_rule(self, rule: EvictionRule, share: float) -> Masks:
        """Returns the masks of all layers with full attention by a rule of others: the same share of tokens in each."""
        return {layer: self._kept(layer, rule, share) for layer in self.seen.newest}

    def _kept(self, layer: int, rule: EvictionRule, share: float) -> torch.Tensor:
        """bool [B, G, S]: what one layer keeps."""
        count = min(self.past, max(1, round(share * self.past)))
        if rule == "expected_attention":
            return top_of_layer(self._expected(layer), count)
        keep, recent = tokens(max(0, count - _SNAP)), min(_SNAP, count)
        own: dict[str, Any] = {"observe": _SNAP, "recent": recent, "heads": "per_kv_head", "score": "attention_sum"}
        return self._by_rule(layer, Eviction(layers=(layer,), keep=keep, sink=0, generated=1, **own))

    def _by_rule(self, layer: int, rule: Eviction) -> torch.Tensor:
        k_BGSD, v_BGSD = self.keys_values(layer)
        newest = self.seen.newest[layer].before(None, rule.observe or 0)
        backend = "triton" if k_BGSD.is_cuda else "reference"
        kept_BgK = rows_to_cache(rule, self.past, newest, k_BGSD, v_BGSD, layer=layer, backend=backend)
        if kept_BgK is None:
            return k_BGSD.new_ones((len(k_BGSD), 1, self.past), dtype=torch.bool)
        mask_BgS = k_BGSD.new_zeros((*kept_BgK.shape[:2], self.past), dtype=torch.bool)
        return mask_BgS.scatter_(2, kept_BgK, True)

    def _expected(self, layer: int) -> torch.Tensor:
        """float32 [B, G, S]: expected weights times norms of values; sinks highest."""
        statistics, (k_BGSD, v_BGSD) = self.seen.statistics[layer], self.keys_values(layer)
        observed = self.seen.newest[layer]
        assert self.seen.rotation is not None, "observed for this rule"
        at_F = torch.arange(self.past, self.past + _FUTURE, device=k_BGSD.device)
        cos_D, sin_D = (part_FD.mean(0) for part_FD in self.seen.rotation(k_BGSD, at_F))
        turn_DD = torch.diag(cos_D) + rotated_half(torch.eye(len(cos_D), device=cos_D.device)) * sin_D  # x @ turn
        mean_BHD = statistics.mean_BHD @ turn_DD
        covariance_BHDD = turn_DD.T @ statistics.covariance_BHDD @ turn_DD
        groups, scale = k_BGSD.shape[1], observed.scale
        weights = []
        for group in range(groups):
            own = slice(group * mean_BHD.shape[1] // groups, (group + 1) * mean_BHD.shape[1] // groups)
            k_B1SD = k_BGSD[:, group : group + 1, _SINK:].float()
            scores_BNS = (k_B1SD @ mean_BHD[:, own, :, None])[..., 0] * scale
            scores_BNS += ((k_B1SD @ covariance_BHDD[:, own]) * k_B1SD).sum(-1) * (scale**2 / 2)
            weights.append(scores_BNS.softmax(-1).mean(1))
        norms_BGS = v_BGSD[:, :, _SINK:].float().norm(dim=-1)
        scores_BGS = (torch.stack(weights, 1) + _EPSILON) * norms_BGS
        return torch.nn.functional.pad(scores_BGS, (_SINK, 0), value=torch.inf)


def top_of_layer(scores_BGS: torch.Tensor, count: int) -> torch.Tensor:
    """bool [B, G, S]: the best keys of a layer, `count` times its KV heads in all, of which each head has its own best
    _SAFE (AdaKV, algorithm 1)."""
    least = scores_BGS.topk(round(_SAFE * count), -1).indices
    free_BGS = scores_BGS.scatter(-1, least, torch.inf)
    best_BK = free_BGS.flatten(1).topk(count * scores_BGS.shape[1], -1).indices
    kept_BX = torch.zeros_like(free_BGS, dtype=torch.bool).flatten(1)
    return kept_BX.scatter_(1, best_BK, True).view(scores_BGS.shape)


def cached_share(masks: Masks, layers: int) -> float:
    """The share of the cached tokens of so many layers that stays."""
    return 1.0 - sum(1.0 - float(mask_BgS.float().mean()) for mask_BgS in masks.values()) / layers


class Evicted:
    """A step rule: layers attend to what they kept, and to all tokens since."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.kept = {layer: round(float(mask_BgS.sum(-1).float().mean())) for layer, mask_BgS in masks.items()}

    def __call__(self, call: AttentionCall) -> Chosen | None:
        if (kept_BgS := self.masks.get(call.layer)) is None:
            return None
        new = call.k_BGKD.shape[2] - kept_BgS.shape[2]
        return Chosen(torch.nn.functional.pad(kept_BgS, (0, new), value=True), self.kept[call.layer] + new)


@contextmanager
def observed_prompt(
    model: PreTrainedModel, ids_BS: torch.Tensor, rules: tuple[str, ...], chunk: int | None = None
) -> Iterator[tuple[ObservedPrompt, RuleSteps]]:
    """Runs prompts densely and watches them, as far as these rules need it; the steps may follow any rule meanwhile."""
    seen = PromptObserver.of(model, rules)
    steps = RuleSteps(prompts=seen if rules else lambda call: None)
    with capture_attention(model, steps):
        yield ObservedPrompt(prefill(model, ids_BS, chunk), seen), steps
