"""Published prefill rules that look at more than a row tile's shares of key tiles, the same in every head.

* `FlexPrefill` (arXiv 2502.20766, algorithms 1 to 4): its test picks, head by head, blocks by pooled attention or
  vertical and slash blocks. Lines are taken in blocks of a key tile, and every head takes `_LEAST` tokens of either
  kind, as its authors' code does.
* `SkipSoftmax` (BLASST, arXiv 2512.12087; as TensorRT-LLM, FlashInfer and ModelOpt ship it): a tile is left out whose
  largest score lies below the running maximum of every row by more than a threshold that is inverse to the length. It
  computes all scores to know them: its share of tiles is of softmax and values alone.
* `Stem` (arXiv 2603.06274, as its authors' AngelSlim has it): the tiles with the highest mean score along
  antidiagonals, fewer for later row tiles, and all in the first two layers. A rule sees no values, so that the bonus
  of large ones is left out.

Shapes as in kernels/index/layout.py; N heads of one KV head, R rows, S keys, T row tiles, M key tiles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from sparsekv.bench.tile_rules import ByKVHead, Heads, LineRatio, means
from sparsekv.kernels.index.layout import ceil_div
from sparsekv.kernels.methods import PrefillRule
from sparsekv.planner.allocate import allocate
from sparsekv.planner.job import head_shape, job_of
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.prices import shipped_prices
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.plans.patterns import AShape, BlockSparse, Pattern, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import PrefillBucket, PrefillPlan
from sparsekv.runtime.hf.load import LoadedModel

_TAU, _LEAST = 0.1, 512  # FlexPrefill: the largest distance of a query-aware head, tokens of lines
# Stem: first layers that are dense, of antidiagonals, the last budget over the first, first and last tokens.
_DENSE, _STRIDE, _DECAY, _EDGES = 2, 8, 0.7, 512


class FlexPrefill(ByKVHead):
    name = "flexprefill"

    @staticmethod
    def gamma(budget: float) -> float:
        """The share of attention to hold: from 0.05 to 0.9995, in steps of the share left out; 1 takes all."""
        return math.inf if budget == 1.0 else 1.0 - 0.95 * (0.0005 / 0.95) ** budget

    def setting(self, budget: float) -> str:
        return f"gamma {min(1.0, self.gamma(budget)):.4g}, tau {_TAU}"

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        gamma, query, key = self.gamma(budget), heads.layer.tile.query, heads.layer.tile.key
        rows, length, tiles = heads.q_NRD.shape[1], len(heads.k_SD), heads.sees_TM.shape[1]
        last = slice(max(0, rows - query), rows)
        weights_NRS = heads.scores(last).softmax(-1)
        at_RO = heads.back(last)  # the key so many tokens back
        back_NRO = weights_NRS.gather(-1, at_RO.clamp(min=0).expand_as(weights_NRS)).masked_fill_(at_RO < 0, 0.0)
        lines = [weights_NRS.mean(1), back_NRO.mean(1)]  # of keys, and of distances back
        summed = [pad(x_NS, (0, tiles * key - length)).unflatten(1, (tiles, key)).sum(-1) for x_NS in lines]
        k_MD, least = means(heads.k_SD, key).squeeze(-2), min(tiles, ceil_div(_LEAST, key))
        estimated_NM = (heads.q_NRD[:, last].float().mean(1) @ k_MD.T * heads.layer.scale).softmax(-1)
        query_aware_N = distance(estimated_NM, summed[0]) < _TAU
        kept = [
            best(x_NM.index_fill(1, x_NM.new_zeros(1, dtype=torch.long), torch.inf), count_N)
            for x_NM, line_NS in zip(summed, lines, strict=True)
            for count_N in [(fewest(line_NS, gamma) // key + 1).clamp(least, tiles).masked_fill(query_aware_N, least)]
        ]
        first_T, end_T = heads.row_tiles
        back_TM = first_T[:, None] - torch.arange(tiles, device=k_MD.device)
        by_pool_NTM = means(heads.q_NRD, query).squeeze(-2) @ k_MD.T * heads.layer.scale
        by_pool_NTM.masked_fill_(back_TM < (first_T - end_T)[:, None], -torch.inf)
        shares_NE = by_pool_NTM.softmax(-1).flatten(1)
        pooled_NTM = best(shares_NE, fewest(shares_NE, gamma * len(first_T))).view_as(by_pool_NTM)
        taken_NTM = kept[0][:, None] | (pooled_NTM & query_aware_N[:, None, None])
        for step in range(ceil_div(query, key) + 1):  # a row tile lies in so many key tiles
            on_NTM = kept[1][:, (back_TM + step).clamp(0, tiles - 1)] & (back_TM + step >= 0)
            taken_NTM |= on_NTM & (first_T + step <= end_T)[:, None]
        return taken_NTM


def fewest(shares_NE: torch.Tensor, mass: float) -> torch.Tensor:
    """[N]: entries that hold a mass together, the largest first."""
    ranked_NE = shares_NE.sort(dim=-1, descending=True).values
    return (ranked_NE.cumsum(-1) - ranked_NE < mass).sum(-1)


def best(shares_NE: torch.Tensor, count_N: torch.Tensor) -> torch.Tensor:
    ranks_NE = shares_NE.argsort(stable=True, dim=-1, descending=True).argsort(-1)
    return ranks_NE < count_N[:, None]


def distance(p_NM: torch.Tensor, q_NM: torch.Tensor) -> torch.Tensor:
    """The square root of the Jensen-Shannon divergence."""
    middle_NM = (p_NM + q_NM) / 2
    one_N, other_N = (torch.special.xlogy(x_NM, x_NM / middle_NM).nan_to_num(0.0).sum(-1) for x_NM in (p_NM, q_NM))
    return torch.sqrt(((one_N + other_N) / 2).clamp(min=0.0))


class SkipSoftmax(ByKVHead):
    name, pairs = "skip_softmax", 1

    @staticmethod
    def factor(budget: float) -> float:
        """The threshold times the length: a model has one; 0 leaves out nothing."""
        return 0.0 if budget == 1.0 else 1e5 * 1e-10**budget

    def setting(self, budget: float) -> str:
        return f"threshold {self.factor(budget):.3g} / length, all scores computed"

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        query, key, threshold = heads.layer.tile.query, heads.layer.tile.key, self.factor(budget) / heads.length
        far = min(0.0, math.log(threshold)) if threshold else -math.inf  # a new maximum is never left out
        scores_NRS = heads.scores(slice(0, heads.q_NRD.shape[1]))
        missing = (0, -scores_NRS.shape[2] % key, 0, -scores_NRS.shape[1] % query)
        best_NRM = pad(scores_NRS, missing, value=-torch.inf).unflatten(2, (-1, key)).amax(-1)
        near_NRM = (best_NRM - best_NRM.cummax(-1).values >= far) & (best_NRM > -torch.inf)
        return torch.unflatten(near_NRM, 1, (-1, query)).any(2)


class Stem(ByKVHead):
    name = "stem"

    def setting(self, budget: float) -> str:
        return f"{budget:.4g} of the tiles, {_DECAY} of that at the end, without values"

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        key, tiles, end_T = heads.layer.tile.key, heads.sees_TM.shape[1], heads.row_tiles[1]
        if heads.layer.number < _DENSE:
            return heads.sees_TM.expand(len(heads.q_NRD), -1, -1)
        q_NTE = means(heads.q_NRD, heads.layer.tile.query, _STRIDE).flatten(-2)
        k_ME = means(heads.k_SD, key, _STRIDE).flip(-2).flatten(-2)
        ahead_TM = torch.arange(tiles, device=k_ME.device) - end_T[:, None]
        scores_NTM = (q_NTE @ k_ME.T).masked_fill_(ahead_TM > 0, -torch.inf)
        first = max(1, round(budget * tiles))
        later_T = (end_T - first).clamp(min=0) / max(1, tiles - 1 - first)
        count_T = (first * (1.0 - (1.0 - _DECAY) * later_T)).floor().clamp(min=1)
        edges = ceil_div(_EDGES, key)
        edge_TM = (ahead_TM > -edges) | (torch.arange(tiles, device=k_ME.device) < edges)
        ranks_NTM = scores_NTM.argsort(stable=True, dim=-1, descending=True).argsort(-1)
        return (ranks_NTM < count_T[:, None]) | edge_TM


class MInference(PrefillRule):
    """The plan of `plan --preset minference`, which gives every head a pattern of its own, its sizes scaled by one
    factor; `compare` runs the search at the length, on the one prompt that it publishes."""

    name = "minference"

    def setting(self, budget: float) -> str:
        return f"{LineRatio.scale(budget):.4g} x the sizes that were searched, by head"


# Lines have no cap: the search's is as tight as the lines that it found.
_SIZES = {VerticalSlash: ("vertical", "slash"), AShape: ("sink", "window"), BlockSparse: ("keep",)}


def searched(loaded: LoadedModel, length: int, backend: Any) -> PrefillPlan:
    """The prefill phase of the preset's plan, without its test."""
    options = PlanOptions(lengths=(length,), preset="minference", phases=("prefill",), verify="none", backend=backend)
    asked, measured = for_profile(options, profile(job_of(loaded, options)))
    settled = settle(asked, loaded.info.context_length, "cpu")
    return allocate(measured, shipped_prices(head_shape(measured.model)), settled)


def scaled(plan: PrefillPlan, factor: float, length: int) -> PrefillPlan:
    def size_of(pattern: Pattern) -> Pattern:
        names = _SIZES.get(type(pattern), ())
        sizes = {name: getattr(pattern, name).resolve(length) * factor for name in names}
        budgets = {name: tokens(min(length, max(1, round(n)))) for name, n in sizes.items()}
        budgets |= {"max_tiles": fraction(1.0)} if isinstance(pattern, VerticalSlash) else {}
        return pattern.model_copy(update=budgets)

    groups = plan.bucket(length).heads
    heads = tuple(group.model_copy(update={"pattern": size_of(group.pattern)}) for group in groups)
    return plan.model_copy(update={"lengths": (PrefillBucket(up_to=None, heads=heads, dense=not heads),)})
