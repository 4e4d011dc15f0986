"""Prefill rules of others, the same in every head.

Patterns that plans have anyway run as plans, through the kernels: StreamingLLM's mask, vertical_slash at one density,
and the rules by which XAttention and FlexPrefill take tiles (kernels/index/adaptive.py). XAttention runs with a stride
of 16; of FlexPrefill there is the query-aware block rule alone, without its test of which heads take vertical-slash
lines instead. FlashPrefill's rule exists here only:

    a row tile computes the key tiles whose estimated share is at least alpha times that of its best one

The shares are those of pooled queries and keys (kernels/index/adaptive.py).

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S queries, T row tiles, R row tiles of one
block, X rows of a tile, M key tiles, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.index.adaptive import tile_scores
from sparsekv.kernels.index.block_sparse import tile_limits
from sparsekv.kernels.index.layout import IndexCall
from sparsekv.kernels.tiles import NO_TILE, Chunk, TileIndex, computed_tiles
from sparsekv.kernels.topk import ascending
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.profile.search_space import Patterns, Prefix, fit_to_target
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Pattern, PatternRange, TileShape
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention


def prefill_plan(model: ModelInfo, tile: TileShape, patterns: Mapping[int, Patterns]) -> Plan:
    """A plan for every length.

    Args:
        patterns: of the heads of every layer with full attention.
    """
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
    prefix = Prefix(nothing_11SD, nothing_11SD, Chunk.uniform(1, 0, length), tile, 1.0)
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
        prefix = Prefix(call.q_BHSD, call.k_BGKD, call.chunk, tile, call.scale)
        prefix = prefix.with_lines([patterns.last_q] if patterns.last_q else [])
        for density, by_layer in zip(densities, found, strict=True):
            targets = [density * prefix.causal_tiles] * prefix.heads
            by_layer[call.layer] = fit_to_target(prefix, [patterns] * prefix.heads, targets)

    model: Any = loaded.model
    with capture_attention(model, fit), torch.no_grad():
        model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
    return found


@dataclass(frozen=True, slots=True)
class MaxThreshold:
    """FlashPrefill's rule, in the layers with full attention; decode is dense.

    Attributes:
        alpha: least share of a key tile, relative to the best of its row; 0 computes every tile.
    """

    alpha: float
    tile: TileShape

    stepwise = True
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `planner.evaluation.Mode`."""
        computed, causal = torch.zeros((), dtype=torch.float64, device=model.device), 0

        def attend(call: AttentionCall) -> torch.Tensor | None:
            nonlocal computed, causal
            heads, queries = call.q_BHSD.shape[1:3]
            if queries == 1 and call.chunk.past[0]:
                return None
            own = heads * call.chunk.causal_tiles(self.tile)
            causal += own
            if call.window is not None:
                computed += own
                return None
            out_BHSD, tiles = self.attend(call)
            computed += tiles
            return out_BHSD

        with capture_attention(model, attend):
            yield lambda: Spent(float(computed), float(causal))

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, S, D], and tiles computed."""
        kept_BHTM = self._choose(call)
        index, head_dim = _index_of(kept_BHTM, self.tile), call.q_BHSD.shape[3]
        found = prefill_attention(
            call.q_BHSD,
            call.k_BGKD,
            call.v_BGKD,
            index,
            call.chunk,
            scale=call.scale,
            backend=choose_backend(call.q_BHSD.device, call.q_BHSD.dtype, head_dim, "auto", self.tile).name,
        )
        return found.out_BHSD, computed_tiles(index).sum()

    def _choose(self, call: AttentionCall) -> torch.Tensor:
        """Tiles that are computed: bool [B, H, T, M]."""
        index_call = IndexCall.of(call.q_BHSD, call.k_BGKD, call.chunk, self.tile, call.scale, call.window)
        layout = index_call.layout
        shape = (layout.batch, layout.heads, layout.row_tiles, layout.key_tiles)
        kept_BHTM = torch.zeros(shape, dtype=torch.bool, device=layout.device)
        for rows, scores_BHRM in tile_scores("pooled", range(layout.heads), index_call):
            tiles = scores_BHRM.shape[-1]
            limits = tile_limits(tiles, layout.locate().part(rows))
            mandatory_B1RM, visible_B1RM = (limit_BRM[:, None] for limit_BRM in limits)
            best_BHR1 = scores_BHRM.amax(-1, keepdim=True)
            own_BHRM = mandatory_B1RM | (visible_B1RM & (scores_BHRM >= self.alpha * best_BHR1))
            kept_BHTM[:, :, rows, :tiles] = own_BHRM
        return kept_BHTM


def _index_of(kept_BHTM: torch.Tensor, tile: TileShape) -> TileIndex:
    counts_BHT = kept_BHTM.sum(-1, dtype=torch.int32)
    new = counts_BHT.new_empty
    return TileIndex(
        tile=tile,
        tiles_BHTW=ascending(kept_BHTM, kept_BHTM.shape[-1], NO_TILE).contiguous(),
        counts_BHT=counts_BHT,
        columns_BHC=new((*counts_BHT.shape[:2], 0)),
        live_BHTN=new((*counts_BHT.shape, 0)),
        dense_H=torch.zeros(counts_BHT.shape[1], dtype=torch.bool, device=counts_BHT.device),
        dense_heads=(),
    )
