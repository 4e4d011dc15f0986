"""What each candidate pattern does to the output of one layer, from its queries, keys and values alone.

The error of head h under a pattern is measured after the output projection, relative to the whole layer:

    || (O_h sparse - O_h dense) W_h ||_F  /  || O dense W ||_F        over the rows considered

where W_h are the columns of W_o that read head h. It is taken over all rows (or an even sample of query tiles), and
over the tail: the question and the answer, where retrieval happens, a hundredth of the rows of a long prompt.

In a sample, each query tile is a batch row: its queries, all keys, and its part of the index. All rows together are
left as one batch row, since a thousand of them would be as many launches of some backends.

Shapes: X batch rows of M rows each, H query heads, G KV heads, S rows of the prompt, D head size, W model size
(Z = H * D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex, computed_tiles
from sparsekv.planner.profile.search_space import Patterns, Prefix
from sparsekv.plans.patterns import Dense, TileShape


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a prompt of `length` tokens that candidates are scored on, as the batch rows of one call.

    Attributes:
        tail_start: the first row of the question.
        numbers: the query tiles: first an even spread, then what the tail has besides; None: all rows, uncut.
        spread: how many of them belong to the even spread.
    """

    length: int
    tail_start: int
    tile: TileShape
    numbers: tuple[int, ...] | None = None
    spread: int = 1

    @classmethod
    def of(cls, length: int, tail_start: int, tile: TileShape, stride: int) -> Rows:
        """Every `stride`-th query tile, and those from `tail_start` on; with a stride of 1, all rows."""
        if stride == 1:
            return cls(length, tail_start, tile)
        count = -(-length // tile.query)
        spread = tuple(range(min(stride, count) - 1, count, stride))
        tail = tuple(number for number in range(tail_start // tile.query, count) if number not in spread)
        return cls(length, tail_start, tile, spread + tail, len(spread))

    @property
    def chunk(self) -> Chunk:
        """Where they lie."""
        if self.numbers is None:
            return Chunk.uniform(1, 0, self.length)
        firsts = [number * self.tile.query for number in self.numbers]
        return Chunk(tuple(firsts), tuple(min(first + self.tile.query, self.length) for first in firsts))

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """Their queries, of a batch of one: [X, H, M, D], zeros beyond the prompt."""
        if self.numbers is None:
            return q_BHSD
        padding = -self.length % self.tile.query
        padded_HSD = torch.nn.functional.pad(q_BHSD[0], (0, 0, 0, padding)) if padding else q_BHSD[0]
        tiled_HTMD = padded_HSD.reshape(padded_HSD.shape[0], -1, self.tile.query, padded_HSD.shape[2])
        return tiled_HTMD[:, list(self.numbers)].transpose(0, 1).contiguous()

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """All keys (or values) for each batch row, without copying them: [X, G, S, D]."""
        return k_BGSD if self.numbers is None else k_BGSD.expand(len(self.numbers), -1, -1, -1)

    def index(self, index: TileIndex) -> TileIndex:
        """The part of an index that belongs to them."""
        if self.numbers is None:
            return index
        numbers = list(self.numbers)
        return TileIndex(
            tile=index.tile,
            tiles_BHTW=index.tiles_BHTW[0, :, numbers].transpose(0, 1)[:, :, None].contiguous(),
            counts_BHT=index.counts_BHT[0, :, numbers].T[:, :, None].contiguous(),
            columns_BHC=index.columns_BHC.expand(len(numbers), -1, -1).contiguous(),
            live_BHTN=index.live_BHTN[0, :, numbers].transpose(0, 1)[:, :, None].contiguous(),
            dense_H=index.dense_H,
        )

    def masks(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[X, M] each: rows that stand for all rows of the prompt, and rows of the question and the answer."""
        position_XM = torch.arange(self.length, device=device)[None]
        if self.numbers is not None:
            first_X = torch.tensor(self.numbers, device=device) * self.tile.query
            position_XM = first_X[:, None] + torch.arange(self.tile.query, device=device)
        in_spread_X = torch.arange(len(position_XM), device=device) < self.spread
        in_prompt_XM = position_XM < self.length
        return in_spread_X[:, None] & in_prompt_XM, (position_XM >= self.tail_start) & in_prompt_XM


Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer over one prompt: what attention reads, what its output goes through, which rows are looked at."""

    prefix: Prefix
    v_BGSD: torch.Tensor
    projection_WZ: torch.Tensor
    rows: Rows
    backend: str
    gradient_BHSD: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScore:
    """One candidate, one entry a head."""

    damage_H: Values
    coherent_H: Values
    blocked_H: Values
    normed_H: Values
    error2_H: Values
    tail2_H: Values
    tiles_H: Values  # whole tiles computed, as a share of the causal ones
    columns_H: Values  # single columns computed, in tiles, as such a share


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
        self._spread_XM, self._tail_XM = layer.rows.masks(device)
        weight_WHD = layer.projection_WZ.float().reshape(-1, self._q_XHMD.shape[1], self._q_XHMD.shape[3])
        self._metric_HDD = torch.einsum("whd,whe->hde", weight_WHD, weight_WHD)
        self._spread_norm, self._tail_norm = (self._norm(mask) for mask in (self._spread_XM, self._tail_XM))
        stride = len(range(0, layer.prefix.chunk.longest, layer.prefix.tile.query)) / max(1, layer.rows.spread) if layer.rows.numbers is not None else 1.0
        rest_XM = self._spread_XM & ~self._tail_XM
        self._weight_XM = self._tail_XM.float() + stride * rest_XM.float()
        self._g_XHMD = layer.rows.queries(layer.gradient_BHSD).float()
        self._gnorm_XHM = self._g_XHMD.square().mean(-1)

    def score(self, patterns: Patterns) -> CandidateScore:
        index = self._layer.prefix.index(patterns)
        sparse = self._attend(index)
        tiles_H, causal = _host(index.counts_BHT[0].sum(-1)), self._layer.prefix.causal_tiles
        off_XHMD = (sparse.out_BHSD - self._dense.out_BHSD).float()
        dot_XHM = (off_XHMD * self._g_XHMD).sum(-1)
        w = self._weight_XM[:, None]
        pad = -dot_XHM.shape[-1] % 128
        blocks = torch.nn.functional.pad(dot_XHM * w, (0, pad)).unflatten(-1, (-1, min(128, dot_XHM.shape[-1] + pad))).sum(-1)
        return CandidateScore(
            damage_H=0.5 * _host((dot_XHM.square() * w).sum((0, 2))),
            coherent_H=0.5 * _host((dot_XHM * w).sum((0, 2)).square()),
            blocked_H=0.5 * _host(blocks.square().sum((0, 2))),
            normed_H=0.5 * _host((off_XHMD.square().sum(-1) * self._gnorm_XHM * w).sum((0, 2))),
            error2_H=(self._error(off_XHMD, self._spread_XM) / self._spread_norm) ** 2,
            tail2_H=(self._error(off_XHMD, self._tail_XM) / self._tail_norm) ** 2,
            tiles_H=tiles_H / causal,
            columns_H=np.maximum(_host(computed_tiles(index)[0]) - tiles_H, 0.0) / causal,
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


def _host(values_H: torch.Tensor) -> Values:
    return np.asarray(values_H.double().cpu().numpy())
