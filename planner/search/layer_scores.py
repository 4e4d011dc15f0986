"""What each candidate pattern does to the output of one layer, from its queries, keys and values alone.

Shapes: H query heads, G KV heads, S rows, D head size, W model size (Z = H * D); X batch rows of M rows (rows.py).

The error of head h under a pattern is measured after the output projection, relative to the whole layer:

    || (O_h sparse - O_h dense) W_h ||_F  /  || O dense W ||_F        over the rows considered

where W_h are the columns of W_o that read head h. It is taken over all rows (or an even sample of them), and over the
tail: the question and the answer, where retrieval happens, a hundredth of the rows of a long prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.tiles import AttentionOutput, TileIndex, computed_tiles
from sparsekv.planner.search.fit import Patterns, Prefix
from sparsekv.planner.search.rows import Rows
from sparsekv.plans.patterns import Dense

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer over one prompt: what attention reads, what its output goes through, which rows are looked at."""

    prefix: Prefix
    v_BGSD: torch.Tensor
    projection_WZ: torch.Tensor
    rows: Rows
    backend: str


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScore:
    """One candidate, one entry a head."""

    error_H: Values  # over all rows
    tail_error_H: Values  # over the question and the answer
    mass_H: Values  # mean share of the attention mass that the computed positions hold
    tiles_H: Values  # whole tiles computed
    columns_H: Values  # single columns computed, in tiles


def score_candidates(layer: Layer, candidates: Sequence[Patterns]) -> list[CandidateScore]:
    """Scores each candidate (one pattern a head each), all heads of the layer in one launch."""
    scorer = _Scorer(layer)
    return [scorer.score(patterns) for patterns in candidates]


class _Scorer:
    """Holds what all candidates of a layer are compared with."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._q_XHMD = layer.rows.queries(layer.prefix.q_BHSD)
        self._dense = self._attend(layer.prefix.index((Dense(),) * layer.prefix.heads))
        device = self._q_XHMD.device
        self._spread_XM, self._tail_XM = layer.rows.spread_mask(device), layer.rows.tail_mask(device)
        weight_WHD = layer.projection_WZ.float().reshape(-1, self._q_XHMD.shape[1], self._q_XHMD.shape[3])
        # || E W_h ||^2 is the trace of E^T E against W_h^T W_h: no product of the model's size for each candidate.
        self._metric_HDD = torch.einsum("whd,whe->hde", weight_WHD, weight_WHD)
        self._spread_norm, self._tail_norm = (self._norm(mask) for mask in (self._spread_XM, self._tail_XM))

    def score(self, patterns: Patterns) -> CandidateScore:
        index = self._layer.prefix.index(patterns)
        sparse = self._attend(index)
        tiles_H = _host(index.counts_BHT[0].sum(-1))
        off_XHMD = (sparse.out_BHSD - self._dense.out_BHSD).float()
        return CandidateScore(
            error_H=self._error(off_XHMD, self._spread_XM) / self._spread_norm,
            tail_error_H=self._error(off_XHMD, self._tail_XM) / self._tail_norm,
            mass_H=self._mass(sparse),
            tiles_H=tiles_H,
            columns_H=np.maximum(_host(computed_tiles(index)[0]) - tiles_H, 0.0),
        )

    def _attend(self, index: TileIndex) -> AttentionOutput:
        prefix, rows = self._layer.prefix, self._layer.rows
        k_XGSD, v_XGSD = rows.keys(prefix.k_BGSD), rows.keys(self._layer.v_BGSD)
        return prefill_attention(
            self._q_XHMD,
            k_XGSD,
            v_XGSD,
            rows.index(index),
            rows.chunk,
            scale=prefix.scale,
            window=prefix.window,
            want_lse=True,
            backend=self._layer.backend,
        )

    def _error(self, off_XHMD: torch.Tensor, rows_XM: torch.Tensor) -> Values:
        off_HRD = off_XHMD.transpose(0, 1)[:, rows_XM]
        squared_H = ((off_HRD.transpose(1, 2) @ off_HRD) * self._metric_HDD).sum((1, 2))
        return _host(squared_H.clamp(min=0.0).sqrt())

    def _norm(self, rows_XM: torch.Tensor) -> float:
        out_RHD = self._dense.out_BHSD.transpose(1, 2)[rows_XM].float()
        gram_ZZ = out_RHD.flatten(1).T @ out_RHD.flatten(1)
        weight_WZ = self._layer.projection_WZ.float()
        return max(float(((weight_WZ @ gram_ZZ) * weight_WZ).sum().clamp(min=0.0).sqrt()), 1e-20)

    def _mass(self, sparse: AttentionOutput) -> Values:
        assert sparse.lse_BHS is not None
        assert self._dense.lse_BHS is not None
        kept_XHM = (sparse.lse_BHS - self._dense.lse_BHS).clamp(max=0.0).exp()
        return _host(kept_XHM.transpose(0, 1)[:, self._spread_XM].mean(-1))


def _host(values_H: torch.Tensor) -> Values:
    return np.asarray(values_H.double().cpu().numpy())
