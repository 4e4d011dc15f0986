"""What a plan is compared with at equal density: one family of patterns for every head, and indices frozen once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import TileIndex, computed_tiles
from sparsekv.planner.eval_results import Spent
from sparsekv.planner.families import Family
from sparsekv.planner.profile.profile_data import LayerScores, LengthProfile, Profile
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.load import LoadedModel


def only(profile: Profile, family: Family) -> Profile:
    """The profile with the candidates of one family alone, from which `allocate` then makes a plan."""
    return profile.model_copy(update={"lengths": tuple(_only(entry, family) for entry in profile.lengths)})


def _only(entry: LengthProfile, family: Family) -> LengthProfile:
    kept = [place for place, candidate in enumerate(entry.candidates) if candidate.family == family]

    def rows(scores: LayerScores) -> LayerScores:
        names = ("patterns", "error", "tail_error", "mass", "tiles", "columns")
        return scores.model_copy(update={name: tuple(getattr(scores, name)[place] for place in kept) for name in names})

    candidates = tuple(entry.candidates[place] for place in kept)
    return entry.model_copy(update={"candidates": candidates, "layers": tuple(map(rows, entry.layers))})


class FrozenIndices:
    """The tiles that a plan computes on one prompt, used for every other: MInference 1.0's static ablation (4.4)."""

    def __init__(self, loaded: LoadedModel, plan: PrefillPlan, prompt_ids: torch.Tensor) -> None:
        self._plan, self._indices = plan, dict[int, TileIndex]()
        model, info = loaded.model, loaded.info
        self._backend = choose_backend(model.device, model.dtype, info.attention[0].head_dim).name
        self._computed, self._causal = torch.zeros(()), 0.0
        with capture_attention(model, self._freeze), torch.no_grad():
            model(input_ids=prompt_ids, use_cache=False, logits_to_keep=1)

    @property
    def stepwise(self) -> bool:
        """See `planner.evaluation.Mode`: prefill alone."""
        return False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `planner.evaluation.Mode`: every prefill runs on the frozen indices."""
        self._computed, self._causal = torch.zeros((), device=model.device), 0.0
        with capture_attention(model, self._attend):
            yield lambda: Spent(float(self._computed), self._causal)

    def _freeze(self, call: AttentionCall) -> None:
        heads, tile = call.q_BHSD.shape[1], self._plan.tile
        patterns = self._plan.bucket(call.chunk.longest).patterns(call.layer, heads)
        self._indices[call.layer] = build_index(
            patterns, call.q_BHSD, call.k_BGKD, call.chunk, tile, scale=call.scale, window=call.window
        )

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        batch, heads, queries, _ = call.q_BHSD.shape
        index = _spread(self._indices[call.layer], batch, call.chunk.query_tiles(self._plan.tile, queries))
        self._computed = self._computed + computed_tiles(index).sum()
        self._causal += heads * call.chunk.causal_tiles(self._plan.tile)
        return prefill_attention(
            call.q_BHSD, call.k_BGKD, call.v_BGKD, index, call.chunk, scale=call.scale, backend=self._backend
        ).out_BHSD


def _spread(index: TileIndex, batch: int, rows: int) -> TileIndex:
    """The first rows of an index of one prompt, for every row of a batch."""
    same: Callable[[torch.Tensor], torch.Tensor] = lambda part: part.expand(batch, *part.shape[1:])  # noqa: E731
    return TileIndex(
        tile=index.tile,
        tiles_BHTW=same(index.tiles_BHTW[:, :, :rows]),
        counts_BHT=same(index.counts_BHT[:, :, :rows]),
        columns_BHC=same(index.columns_BHC),
        live_BHTN=same(index.live_BHTN[:, :, :rows]),
        dense_H=index.dense_H,
    )
