"""KV cache eviction by scores, after one dense prefill: what stays is a mask.

* `SnapKV` (2024, section 4): each KV head keeps the keys that the last 64 queries attend to most, and these.
* `ExpectedAttention` (arXiv 2510.00636): the expected weight of a key by the queries to come, averaged over the query
  heads of its KV head, times the norm of its value. Heads share a layer's budget as in AdaKV (arXiv 2407.11550).

Scores are held to one share in every layer. Queries are unrotated by halves, as Llama and Qwen rotate them.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S tokens of a prompt, W observed queries, D head
size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sparsekv.bench.selectors import Chosen, RuleSteps
from sparsekv.kernels.methods import EvictionScore, Layer, QueryStatistics
from sparsekv.kernels.scores import observed_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.evaluation.predictions import Prefilled, prefill
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.core.state import Observed
from sparsekv.runtime.hf.describe import config_of, decoder_of
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

_SINK, _FUTURE = 4, 512  # of statistics: tokens that do not count, positions that follow
_EPSILON = 0.02  # expected attention: added to expected weights
_SAFE = 0.2  # AdaKV: share of its own budget that a head always has
_OBSERVED = 256  # queries, at most
_ROWS = 4096  # whose statistics are added at once
ROTATE_BY_HALVES = ("llama", "qwen2", "qwen3", "mistral")  # model types

Masks = Mapping[int, torch.Tensor]
"""Masks of the cached tokens of a prompt by layer, bool [B, g, S]; layers that are not named keep all."""


class SnapKV(EvictionScore):
    name, observe, keeps_observed = "snapkv", 64, True

    def scores(
        self,
        q_BHWD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        layer: Layer,
        statistics: QueryStatistics | None,
    ) -> torch.Tensor:
        backend = "triton" if k_BGKD.is_cuda else "reference"
        how: dict[str, Any] = {"softmax": layer.softmax, "together": False, "backend": backend}
        return observed_attention(q_BHWD, k_BGKD, scale=layer.scale, **how)


class ExpectedAttention(EvictionScore):
    name, needs_statistics, shares_budget = "expected_attention", True, True

    def scores(
        self,
        q_BHWD: torch.Tensor,
        k_BGKD: torch.Tensor,
        v_BGKD: torch.Tensor,
        layer: Layer,
        statistics: QueryStatistics | None,
    ) -> torch.Tensor:
        """Sinks are highest."""
        assert statistics is not None
        groups, weights = k_BGKD.shape[1], []
        mean_BGND, covariance_BGNDD = (
            x.unflatten(1, (groups, -1)) for x in (statistics.mean_BHD, statistics.covariance_BHDD)
        )
        for group in range(groups):
            k_B1SD = k_BGKD[:, group : group + 1, _SINK:].float()
            scores_BNS = (k_B1SD @ mean_BGND[:, group, :, :, None])[..., 0] * layer.scale
            scores_BNS += ((k_B1SD @ covariance_BGNDD[:, group]) * k_B1SD).sum(-1) * (layer.scale**2 / 2)
            weights.append(scores_BNS.softmax(-1).mean(1))
        norms_BGS = v_BGKD[:, :, _SINK:].float().norm(dim=-1)
        return pad((torch.stack(weights, 1) + _EPSILON) * norms_BGS, (_SINK, 0), value=torch.inf)


# --- what is observed of a prompt -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    """Over the queries of a layer before rotation, sinks left out."""

    count: int
    sum_BHD: torch.Tensor
    square_BHDD: torch.Tensor

    def add(self, other: _Sums) -> None:
        self.count += other.count
        self.sum_BHD += other.sum_BHD
        self.square_BHDD += other.square_BHDD


@dataclass(slots=True)
class PromptObserver:
    """Remembers of every layer the last queries of a prompt and the statistics of all of them.

    Attributes:
        rotation: cosines and sines [S, D] of positions; None where no method needs statistics.
    """

    rotation: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    newest: dict[int, Observed] = field(default_factory=dict)
    sums: dict[int, _Sums] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, with_statistics: bool) -> PromptObserver:
        """Raises UnsupportedError where statistics are asked for and the model rotates otherwise."""
        if not with_statistics:
            return cls()
        if (kind := config_of(model).model_type) not in ROTATE_BY_HALVES:
            raise UnsupportedError(
                f"expected one of {', '.join(ROTATE_BY_HALVES)}, whose queries are unrotated by halves, for statistics "
                f"of queries, found {kind}; leave expected attention out"
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
            q_BHRD = q_BHRD * cos_RD - rotated_half(q_BHRD) * sin_RD
            new_sums = _Sums(q_BHRD.shape[2], q_BHRD.sum(2), q_BHRD.mT @ q_BHRD)
            if (sums := self.sums.setdefault(call.layer, new_sums)) is not new_sums:
                sums.add(new_sums)

    def statistics(self, layer: int, past: int) -> QueryStatistics | None:
        """The mean and covariance of queries behind a prompt of that length."""
        if self.rotation is None:
            return None
        sums = self.sums[layer]
        at_F = torch.arange(past, past + _FUTURE, device=sums.sum_BHD.device)
        cos_D, sin_D = (part_FD.mean(0) for part_FD in self.rotation(sums.sum_BHD, at_F))
        turn_DD = torch.diag(cos_D) + rotated_half(torch.eye(len(cos_D), device=cos_D.device)) * sin_D  # x @ turn
        mean_BHD = sums.sum_BHD / sums.count
        covariance_BHDD = sums.square_BHDD / sums.count - mean_BHD[..., :, None] * mean_BHD[..., None, :]
        return QueryStatistics(mean_BHD @ turn_DD, turn_DD.T @ covariance_BHDD @ turn_DD)


def rotated_half(x: torch.Tensor) -> torch.Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


# --- what stays -------------------------------------------------------------------------------------------------------


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

    def by_score(self, score: EvictionScore, share: float) -> Masks:
        """Masks of all layers with full attention: the same share of tokens in each."""
        count = min(self.past, max(1, round(share * self.past)))
        return {layer: self._by_score(layer, score, count) for layer in self.seen.newest}

    def _by_score(self, layer: int, score: EvictionScore, count: int) -> torch.Tensor:
        """bool [B, G, S]"""
        newest = self.seen.newest[layer].before(None, min(score.observe, self.past))
        (k_BGSD, v_BGSD), rows = self.keys_values(layer), newest.q_BHWD.shape[2]
        chunk = Chunk.uniform(len(k_BGSD), self.past - rows, self.past)
        facts = Layer(layer, chunk, TileShape(), newest.scale, softmax=newest.softmax)
        statistics = self.seen.statistics(layer, self.past) if score.needs_statistics else None
        scores_BGS = score.scores(newest.q_BHWD, k_BGSD, v_BGSD, facts, statistics)
        if score.keeps_observed:
            scores_BGS[..., -rows:] = torch.inf
        if score.shares_budget:
            return top_of_layer(scores_BGS, count)
        best_BGN = scores_BGS.topk(count, -1).indices
        return torch.zeros_like(scores_BGS, dtype=torch.bool).scatter_(-1, best_BGN, True)


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
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    chunk: int | None = None,
    *,
    observed: bool = True,
    with_statistics: bool = False,
) -> Iterator[tuple[ObservedPrompt, RuleSteps]]:
    """Runs prompts densely and watches them where that is asked for; the steps may follow any rule meanwhile."""
    seen = PromptObserver.of(model, with_statistics)
    steps = RuleSteps(prompts=seen if observed else lambda call: None)
    with capture_attention(model, steps):
        yield ObservedPrompt(prefill(model, ids_BS, chunk), seen), steps
