"""Prefill over random tiles, as many in every row as a plan computes: what a search is worth is what this loses.

Shapes: B batch, H heads, T query tiles, W listed tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import NO_TILE, TileIndex, computed_tiles
from sparsekv.planner.evaluation.results import Spent
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention


class RandomTiles:
    """A `planner.evaluation.Mode`: the plan's number of tiles in every row, but any; the mandatory ones stay.

    Single columns count by their width, so that nothing is lost in the exchange.
    """

    def __init__(self, plan: PrefillPlan, seed: int) -> None:
        self._plan = plan
        self._generator = torch.Generator().manual_seed(seed)
        self._spent = Spent()

    @property
    def stepwise(self) -> bool:
        return False

    @property
    def dense_prefill(self) -> bool:
        return False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        self._spent = Spent()
        with capture_attention(model, self._attend):
            yield lambda: self._spent

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        heads, tile = call.q_BHSD.shape[1], self._plan.tile
        patterns = self._plan.bucket(call.chunk.longest).patterns(call.layer, heads)
        planned = build_index(patterns, call.q_BHSD, call.k_BGKD, call.chunk, tile, scale=call.scale)
        index = self._shuffled(planned)
        causal = float(heads * call.chunk.causal_tiles(tile))
        self._spent += Spent(float(computed_tiles(index).sum()), causal)
        return prefill_attention(
            call.q_BHSD, call.k_BGKD, call.v_BGKD, index, call.chunk, scale=call.scale, backend="cpu"
        ).out_BHSD

    def _shuffled(self, planned: TileIndex) -> TileIndex:
        """Square tiles, no past: row t may see the tiles 0 to t, and always sees 0, t - 1 and t."""
        batch, heads, rows = planned.counts_BHT.shape
        columns_BH = computed_tiles(planned) - planned.counts_BHT.sum(-1)
        extra_BHT = (columns_BH / rows).ceil()[..., None]
        luck = torch.rand(batch, heads, rows, rows, generator=self._generator)
        place = torch.arange(rows)
        luck.masked_fill_(place > place[:, None], -1.0)
        luck.masked_fill_((place == 0) | (place == place[:, None]) | (place == place[:, None] - 1), 2.0)
        luck.masked_fill_(place > place[:, None], -1.0)
        counts_BHT = torch.minimum(planned.counts_BHT + extra_BHT, place + 1).int()
        rank = luck.argsort(-1, descending=True).argsort(-1)
        listed = torch.where(rank < counts_BHT[..., None], place, rows).sort(-1).values
        tiles = torch.where(listed < rows, listed, NO_TILE).int()
        return replace(
            planned,
            tiles_BHTW=tiles,
            counts_BHT=counts_BHT,
            columns_BHC=planned.columns_BHC[..., :0],
            live_BHTN=planned.live_BHTN[..., :0],
        )
