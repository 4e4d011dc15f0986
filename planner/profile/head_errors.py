"""Measures what each candidate pattern does to the output of one layer, from its queries, keys and values alone.

The damage of a head under a pattern is the divergence of the answer that its error causes, to second order: with delta
the change of its attention output in a row, g the gradient there (sensitivity.py), D the head size,

    damage = 1/2 * sum over rows of  1/2 (g . delta)^2  +  1/2 |g|^2 |delta|^2 / D.

The first term is the estimate from one gradient, the second what it would be on average over directions: gradients of
a few prompts say little about the direction of every head and row, so that one is shrunk towards the other.

Rows are all rows of the prompt, or an even sample of runs of query tiles, whose rows then stand for those left out, and
the question. In a sample, each run is a batch row: its queries, all keys, and its part of the index. All rows together
are left as one batch row a step, since a thousand of them would be as many launches of some backends.

Shapes: X batch rows of M rows each, H query heads, G KV heads, S rows of the prompt, T query tiles, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import builds_by_triton
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles
from sparsekv.kernels.topk import blocks
from sparsekv.planner.profile.search_space import CommonPrefix, Patterns
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a prompt of `length` tokens that candidates are scored on, as the batch rows of one call.

    Attributes:
        tail_start: the first row of the question.
        run: neighbouring query tiles that are one batch row.
        numbers: the runs: first an even spread, then what the tail has besides; None: all rows, uncut.
        spread: how many of them belong to the even spread.
        step: query tiles of a step of the prompt.
    """

    length: int
    tail_start: int
    tile: TileShape
    run: int = 1
    numbers: tuple[int, ...] | None = None
    spread: int = 1
    step: int = 1

    @classmethod
    def of(cls, steps: Chunk, tail_start: int, tile: TileShape, stride: int, runs: int | None = None) -> SampledRows:
        """Every `stride`-th of the query tiles, about so many runs of neighbours within a step (None: each by itself),
        and those from `tail_start` on; with a stride of 1, all rows."""
        length, step = steps.longest, -(-steps.rows[0] // tile.query)
        if stride == 1 and len(steps.past) == 1:
            return cls(length, tail_start, tile)
        tiles = -(-length // tile.query)
        run = step if stride == 1 else 1 if runs is None else -(-tiles // (runs * stride))
        if len(steps.past) > 1:
            run = max(size for size in range(1, min(run, step) + 1) if step % size == 0)
        count = -(-tiles // run)
        spread = tuple(range(min(stride, count) - 1, count, stride))
        tail = tuple(number for number in range(tail_start // (run * tile.query), count) if number not in spread)
        return cls(length, tail_start, tile, run, spread + tail, len(spread), step)

    @property
    def chunk(self) -> Chunk:
        """Returns where they lie."""
        if self.numbers is None:
            return Chunk.uniform(1, 0, self.length)
        firsts = [number * self._run_rows for number in self.numbers]
        return Chunk(tuple(firsts), tuple(min(first + self._run_rows, self.length) for first in firsts))

    def queries(self, q_BHSD: torch.Tensor) -> torch.Tensor:
        """Their queries, of a batch of one: [X, H, M, D]."""
        return q_BHSD if self.numbers is None else self._runs(q_BHSD, self._run_rows)

    def keys(self, k_BGSD: torch.Tensor) -> torch.Tensor:
        """All keys (or values) for each batch row, without copying them: [X, G, S, D]."""
        return k_BGSD if self.numbers is None else k_BGSD.expand(len(self.numbers), -1, -1, -1)

    def index(self, index: TileIndex) -> TileIndex:
        """The part of an index, with a batch row a step, that belongs to them."""
        if self.numbers is None:
            return index

        def runs(of_steps_XHT: torch.Tensor) -> torch.Tensor:
            return self._runs(of_steps_XHT.transpose(0, 1).flatten(1, 2)[None], self.run)

        return TileIndex(
            tile=index.tile,
            tiles_BHTW=runs(index.tiles_BHTW),
            counts_BHT=runs(index.counts_BHT),
            columns_BHC=torch.stack([index.columns_BHC[number * self.run // self.step] for number in self.numbers]),
            live_BHTN=runs(index.live_BHTN),
            dense_H=index.dense_H,
        )

    def _runs(self, of_rows_BHS: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the runs of what there is for every row or query tile, [1, H, S, ...], the `size` of each run: [X, H,
        size, ...].

        Beyond the prompt, where nothing reads, the last one is repeated. Slices, since numbers that an index takes to
        the device would be waited for.
        """
        found = []
        for number in self.numbers or ():
            part_HM = of_rows_BHS[0, :, number * size : (number + 1) * size]
            if missing := size - part_HM.shape[1]:
                shape = (part_HM.shape[0], missing, *part_HM.shape[2:])
                part_HM = torch.cat([part_HM, part_HM[:, -1:].expand(shape)], 1)
            found.append(part_HM)
        return torch.stack(found)

    def weights(self, device: torch.device) -> torch.Tensor:
        """[X, M]: how many rows of the prompt each row stands for: itself in the tail, else its stride; 0 for none."""
        if self.numbers is None:
            return torch.ones(1, self.length, dtype=torch.float32, device=device)
        first_X = torch.tensor(self.numbers, device=device) * self._run_rows
        position_XM = first_X[:, None] + torch.arange(self._run_rows, device=device)
        in_spread_X1 = torch.arange(len(position_XM), device=device)[:, None] < self.spread
        in_tail_XM, in_prompt_XM = position_XM >= self.tail_start, position_XM < self.length
        stride = -(-self.length // self._run_rows) / self.spread
        stands_for_XM = in_tail_XM.float() + stride * (in_spread_X1 & ~in_tail_XM)
        return stands_for_XM * in_prompt_XM

    @property
    def _run_rows(self) -> int:
        return self.run * self.tile.query


Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer over one prompt: what attention reads, which rows are looked at, and how much they count."""

    prefix: CommonPrefix
    v_BGSD: torch.Tensor
    dense_BHSD: torch.Tensor  # the attention output without a pattern, by another kernel than the candidates'
    gradient_BHSD: torch.Tensor  # of the answer's score function by that
    rows: SampledRows
    backend: str


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScore:
    """One candidate, one entry a head."""

    damage_H: Values  # nats a token of the answer
    tiles_H: Values  # whole tiles computed, as a share of the causal ones
    columns_H: Values  # single columns computed, in tiles, as such a share


def score_candidates(layer: Layer, candidates: Sequence[Patterns]) -> list[CandidateScore]:
    """Scores each candidate (one pattern a head), all heads of the layer in one launch; waits for the device once."""
    scorer = _Scorer(layer)
    measured_C3H = torch.stack([scorer.score(patterns) for patterns in candidates]).cpu().numpy()
    _check_finite(measured_C3H[:, 0])
    return [CandidateScore(*measured_3H) for measured_3H in measured_C3H]


class _Scorer:
    """Holds what all candidates of a layer are compared with."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._q_XHMD = layer.rows.queries(layer.prefix.q_BHSD)
        self._dense_XHMD = layer.rows.queries(layer.dense_BHSD)
        self._gradient_XHMD = layer.rows.queries(layer.gradient_BHSD).float()
        self._square_XHM = torch.linalg.vector_norm(self._gradient_XHMD, dim=-1).square() / self._q_XHMD.shape[-1]
        self._weight_X1M = layer.rows.weights(self._q_XHMD.device)[:, None]

    def score(self, patterns: Patterns) -> torch.Tensor:
        """[3, H], float64 on the device: the fields of a `CandidateScore`."""
        prefix = self._layer.prefix
        index = prefix.index(patterns)
        out_XHMD = self._attend(index)
        tiles_H = index.counts_BHT.sum((0, 2)).double()
        columns_H = (computed_tiles(index).sum(0) - tiles_H).clamp(min=0.0)
        causal = prefix.causal_tiles
        return torch.stack([self._damage(out_XHMD).double(), tiles_H / causal, columns_H / causal])

    def _attend(self, index: TileIndex) -> torch.Tensor:
        prefix, rows = self._layer.prefix, self._layer.rows
        return prefill_attention(
            self._q_XHMD,
            rows.keys(prefix.k_BGSD),
            rows.keys(self._layer.v_BGSD),
            rows.index(index),
            rows.chunk,
            scale=prefix.scale,
            softmax=prefix.softmax,
            backend=self._layer.backend,
        ).out_BHSD

    def _damage(self, out_XHMD: torch.Tensor) -> torch.Tensor:
        """[H], float32."""
        if self._layer.backend in ("triton", "flash") and builds_by_triton(out_XHMD.device):
            from sparsekv.kernels.row_damage import head_damage

            return head_damage(out_XHMD, self._dense_XHMD, self._gradient_XHMD, self._square_XHM, self._weight_X1M)
        return self._damage_by_torch(out_XHMD)

    def _damage_by_torch(self, out_XHMD: torch.Tensor) -> torch.Tensor:
        """A few heads at a time: what is computed in between is as large as all queries in float32."""
        rows, heads, length, size = out_XHMD.shape
        damage = []
        for part in blocks(heads, rows * length * size):
            off_XhMD = out_XHMD[:, part].float().sub_(self._dense_XHMD[:, part])
            along_XhM = (off_XhMD * self._gradient_XHMD[:, part]).sum(-1).square_()
            anywhere_XhM = torch.linalg.vector_norm(off_XhMD, dim=-1).square_().mul_(self._square_XHM[:, part])
            rows_XhM = along_XhM.add_(anywhere_XhM).mul_(0.25)
            # Rows beyond the prompt weigh nothing, whatever they hold.
            damage.append(torch.where(self._weight_X1M > 0, rows_XhM * self._weight_X1M, 0.0).sum((0, 2)))
        return torch.cat(damage)


def _check_finite(damage_CH: Values) -> None:
    if not np.isfinite(damage_CH).all():
        heads = ", ".join(map(str, np.flatnonzero(~np.isfinite(damage_CH).all(0)).tolist()))
        raise UnsupportedError(
            f"expected finite outputs of sparse attention, found nan or infinity in heads {heads} of a layer; "
            "load the model in another dtype (--dtype bfloat16 or float32), or use another backend (--set backend=NAME)"
        )
