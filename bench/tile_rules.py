"""Rules by which the row tiles of a head take key tiles, the same in every head: published methods of prefill that no
plan expresses, each a mode of `evaluate`.

A rule estimates which share of a row tile's attention each key tile gets, and takes tiles by these shares, beside those
that every pattern computes: `cumulative_mass` (FlexPrefill's cumulative-attention index selection, XAttention's
threshold block selection) the fewest that hold a share of the whole, `max_threshold` (FlashPrefill) those with at least
a share of the best one's. Of FlexPrefill there is the query-aware block rule alone, without its test of which heads
take vertical-slash lines instead. Shares are estimated in one of two ways.

Antidiagonal (XAttention, its importance prediction), with s = STRIDE. Strided row x of a row tile is s of its rows,
which begin at token p = first + x s; strided key n is the keys n s .. n s + s - 1. Their score is the mean along the
antidiagonal of the s x s products, so that every row and every key of both enters once:

    z[x, n] = scale / s * sum over a < s of  q[min(p + (s - 1 - a - x % 2) mod s, last)] . k[n s + a]

with the softmax scale of the layer (1 / sqrt(D) in the paper). Odd strided rows take the antidiagonal one further in,
unlike in the paper: where i + j is odd throughout, so is i - j, and a diagonal an even number of tokens back would
never be looked at. A strided row sees strided key n when n s <= p, the last of whose keys the layer's window shows to
row p, and all of whose keys exist: what a ragged last key group holds lies in the diagonal tile, which is always
computed. A group of rows that ends early repeats its last row. With y the softmax of z over the strided keys that x
sees, and c_x the rows of x that are real (0 if x sees no strided key),

    score[m] = sum over x of  c_x / (sum of all c) * sum over the strided keys n of key tile m of  y[x, n]

STRIDE is 16, the larger of the two strides that the paper uses: the products of queries and keys cost a sixteenth of
those of dense attention, still quadratic in the length, and the smallest tile has 4 x 4 samples. On tiny-retriever (4K
tokens, 64 x 64 tiles, a density of 0.25 to 0.26 over all heads) the tiles chosen with strides 4, 8, 16 and 32 hold
88.3, 88.2, 88.0 and 87.6% of the attention.

Pooled (FlexPrefill's query-aware index; MInference 1.0, section 3.2): mean queries against mean keys, each tile
weighted by the keys of it that the average row sees, so that the diagonal tile does not count as a whole one:

    score[m] = softmax over m of  scale * mean q . mean k_m + log(mean over the rows of the keys of m that a row sees)

Either way a row tile's scores are 0 or more and sum to 1, or are all 0 where it sees no strided key or is padding.

Shapes as in kernels/index/layout.py; R row tiles of one block, X = R * tile.query / s strided rows, J strided keys, M
key tiles, N heads of one KV head, E = s * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import pool_heads, tile_limits
from sparsekv.kernels.index.layout import IndexCall, IndexLayout, RowTiles, ceil_div, floor_div, take_heads
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.tiles import NO_TILE, TileIndex, computed_tiles
from sparsekv.kernels.topk import ascending, blocks
from sparsekv.planner.evaluation.results import Spent
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

ScoreKind = Literal["antidiagonal", "pooled"]

STRIDE = 16  # divides every tile side
_HIDDEN = torch.finfo(torch.float32).min  # finite: a row that sees nothing must not become NaN


def tile_scores(kind: ScoreKind, heads: Sequence[int], call: IndexCall) -> Iterator[tuple[slice, torch.Tensor]]:
    """Estimates the tiles of these heads, a block of row tiles at a time.

    Temporaries hold about topk.BLOCK_ELEMENTS elements, and one copy of the keys of a KV head where these do not lie
    token after token. Nothing waits for the device.

    Args:
        kind: how to estimate; see above.
        heads: query heads, ascending.
        call: the layer's queries and keys.

    Yields:
        Which row tiles, and their scores over key tiles 0 to M - 1, float32 [B, h, R, M]: no row of these sees a later
        tile.
    """
    return _antidiagonal(heads, call) if kind == "antidiagonal" else _pooled(heads, call)


def _pooled(heads: Sequence[int], call: IndexCall) -> Iterator[tuple[slice, torch.Tensor]]:
    layout, rows = call.layout, call.layout.locate()
    q_BhTD, k_BhMD = pool_heads(heads, call)
    for part in blocks(layout.row_tiles, layout.batch * len(heads) * layout.key_tiles):
        seen_BRM = _mean_keys_seen(rows.part(part), _tiles_up_to(part, layout), layout)
        logits_BhRM = (q_BhTD[:, :, part] @ k_BhMD[:, :, : seen_BRM.shape[2]].mT).mul_(call.scale)
        logits_BhRM.add_(seen_BRM.log()[:, None]).clamp_(min=_HIDDEN)
        any_BR1 = (seen_BRM > 0).any(-1, keepdim=True)
        yield part, logits_BhRM.softmax(-1).mul_(any_BR1[:, None])


def _mean_keys_seen(rows: RowTiles, tiles: int, layout: IndexLayout) -> torch.Tensor:
    """Returns how many keys of each tile the average row of a row tile sees: float32 [B, R, M]; 0 in padding row
    tiles."""
    key, window = layout.tile.key, layout.window
    start_M = torch.arange(tiles, device=layout.device) * key
    first_BR1, last_BR1 = rows.first_BT.unsqueeze(-1), rows.last_BT.unsqueeze(-1)

    def sum_up_to(token_BR1: torch.Tensor) -> torch.Tensor:
        """Sum over all rows i up to a token of the keys j <= i of the tile."""
        reach_BRM = (token_BR1 - start_M + 1).clamp_(min=0)
        inside_BRM = reach_BRM.clamp(max=key)
        return inside_BRM * (inside_BRM + 1) // 2 + (reach_BRM - inside_BRM) * key

    pairs_BRM = sum_up_to(last_BR1) - sum_up_to(first_BR1 - 1)
    if window is not None:
        pairs_BRM -= sum_up_to(last_BR1 - window) - sum_up_to(first_BR1 - 1 - window)
    rows_BR1 = last_BR1 - first_BR1 + 1
    return (pairs_BRM / rows_BR1.clamp(min=1)).masked_fill_(rows_BR1 < 1, 0.0)


def _antidiagonal(heads: Sequence[int], call: IndexCall) -> Iterator[tuple[slice, torch.Tensor]]:
    layout, rows = call.layout, call.layout.locate()
    groups = [list(own) for _, own in groupby(heads, lambda head: head // layout.group_size)]
    strided = layout.tile.query // STRIDE * ceil_div(layout.chunk.longest, STRIDE)
    elements = layout.batch * (strided + layout.tile.query * layout.head_dim)  # of a head's row tile
    for part in blocks(layout.row_tiles, elements * max(map(len, groups))):
        first_BX, real_BX = _strided_rows(rows.part(part), layout)
        strides = min(_tiles_up_to(part, layout) * layout.tile.key, layout.chunk.longest) // STRIDE
        hidden_BXJ = _hidden_keys(first_BX, strides, layout)
        real_BX.masked_fill_(hidden_BXJ.all(-1), 0.0)
        yield part, torch.cat([_score_rows(own, part, hidden_BXJ, real_BX, call) for own in groups], 1)


def _tiles_up_to(part: slice, layout: IndexLayout) -> int:
    """Key tiles that the last of these row tiles can see in any batch row; at least 1."""
    rows = part.stop * layout.tile.query
    ends = (min(past + rows, length) for past, length in zip(layout.chunk.past, layout.chunk.lengths, strict=True))
    return max(1, ceil_div(max(ends), layout.tile.key))


def _fold_keys(kv_head: int, strided: int, call: IndexCall) -> torch.Tensor:
    """The strided keys of a KV head, each s keys side by side: a view where keys lie token after token."""
    k_B1KD = call.k_BGKD[:, kv_head, None, : strided * STRIDE]
    k_B1JE = torch.unflatten(k_B1KD, 2, (strided, STRIDE)).flatten(3)
    return k_B1JE if k_B1JE.is_cuda else k_B1JE.float()  # only CUDA multiplies half precision into float32


def _fold_queries(heads: Sequence[int], part: slice, call: IndexCall) -> torch.Tensor:
    """The strided rows, each s rows side by side, in the order of their keys: [B, h, X, E]."""
    layout, query = call.layout, call.layout.tile.query
    start, stop = part.start * query, min(part.stop * query, layout.queries)
    q_BhSD = take_heads(call.q_BHSD[:, :, start:stop], heads)
    row_S = torch.arange((part.stop - part.start) * query, device=layout.device)
    row_Xs = torch.unflatten(row_S, 0, (-1, STRIDE)).flip(1)
    row_S = torch.stack((row_Xs[0::2], row_Xs[1::2].roll(-1, 1)), 1).flatten()
    last = [min(max(count - start, 1), stop - start) - 1 for count in layout.chunk.rows]
    folded = [q_BhSD[b].index_select(1, row_S.clamp(max=last[b])) for b in range(layout.batch)]
    return torch.unflatten(torch.stack(folded), 2, (-1, STRIDE)).flatten(3)


def _score_rows(
    heads: Sequence[int], part: slice, hidden_BXJ: torch.Tensor, real_BX: torch.Tensor, call: IndexCall
) -> torch.Tensor:
    """Scores of a block of row tiles for heads of one KV head: [B, h, R, M]."""
    layout = call.layout
    k_B1JE = _fold_keys(heads[0] // layout.group_size, hidden_BXJ.shape[2], call)
    q_B1YE = _fold_queries(heads, part, call).flatten(1, 2)[:, None]
    logits_B1YJ = scaled_scores(q_B1YE, k_B1JE, call.scale / STRIDE)
    logits_BhXJ = logits_B1YJ.view(layout.batch, len(heads), *hidden_BXJ.shape[1:])
    weights_BhXJ = logits_BhXJ.masked_fill_(hidden_BXJ[:, None], _HIDDEN).softmax(-1)
    sums_BhXM = _sum_tiles(weights_BhXJ, layout.tile.key // STRIDE, _tiles_up_to(part, layout))
    real_B1X1 = real_BX[:, None, :, None]
    shares_BhXM = torch.where(real_B1X1 > 0, sums_BhXM * real_B1X1, 0.0)
    per_tile = (-1, layout.tile.query // STRIDE)
    scores_BhRM = torch.unflatten(shares_BhXM, 2, per_tile).sum(3)
    return scores_BhRM.div_(torch.unflatten(real_B1X1, 2, per_tile).sum(3).clamp(min=1.0))


def _strided_rows(rows: RowTiles, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """First token of each strided row, and how many of its rows are real: int64 and float32 [B, X]."""
    step = torch.arange(0, layout.tile.query, STRIDE, device=layout.device)
    first_BRx = rows.first_BT.unsqueeze(-1) + step
    real_BRx = (rows.last_BT.unsqueeze(-1) + 1 - first_BRx).clamp_(0, STRIDE)
    return first_BRx.flatten(1), real_BRx.flatten(1).float()


def _hidden_keys(first_BX: torch.Tensor, strided: int, layout: IndexLayout) -> torch.Tensor:
    """Strided keys that a strided row does not see: [B, X, J]."""
    number_J = torch.arange(strided, device=layout.device)
    whole_B1 = on_device([length // STRIDE for length in layout.chunk.lengths], layout.device)[:, None]
    end_BX = torch.minimum(floor_div(first_BX, STRIDE) + 1, whole_B1)
    hidden_BXJ = number_J >= end_BX.unsqueeze(-1)
    if layout.window is None:
        return hidden_BXJ
    return hidden_BXJ | (first_BX.unsqueeze(-1) - (number_J * STRIDE + STRIDE - 1) >= layout.window)


def _sum_tiles(weights_BhXJ: torch.Tensor, strides: int, tiles: int) -> torch.Tensor:
    """Sums over the strided keys of each tile; the last ones may lack some."""
    whole = weights_BhXJ.shape[-1] // strides
    sums_BhXM = torch.unflatten(weights_BhXJ[..., : whole * strides], -1, (whole, strides)).sum(-1)
    if whole == tiles:
        return sums_BhXM
    rest_BhX1 = weights_BhXJ[..., whole * strides :].sum(-1, keepdim=True)
    return torch.nn.functional.pad(torch.cat((sums_BhXM, rest_BhX1), -1), (0, tiles - whole - 1))


Take = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Which tiles are computed, bool [B, H, R, M], of shares of that shape, tiles that must be and tiles that may be."""


@dataclass(frozen=True, slots=True)
class TileRule:
    """A rule in the layers with full attention; decode is dense."""

    score: ScoreKind
    take: Take
    tile: TileShape

    stepwise = True
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        computed, causal = torch.zeros((), dtype=torch.float64, device=model.device), 0

        def attend(call: AttentionCall) -> torch.Tensor | None:
            nonlocal computed, causal
            heads, queries = call.q_BHSD.shape[1:3]
            if queries == 1 and call.chunk.past[0]:
                return None
            own = heads * call.chunk.causal_tiles(self.tile, call.window)
            causal += own
            if call.window is not None:
                computed += own
                return None
            index = self.index(call)
            computed += computed_tiles(index).sum()
            return self._attend(call, index)

        with capture_attention(model, attend):
            yield lambda: Spent(float(computed), float(causal))

    def mode(self, info: ModelInfo) -> TileRule:
        return self

    def index(self, call: AttentionCall) -> TileIndex:
        index_call = IndexCall.of(call.q_BHSD, call.k_BGKD, call.chunk, self.tile, call.scale, call.window)
        layout = index_call.layout
        shape = (layout.batch, layout.heads, layout.row_tiles, layout.key_tiles)
        kept_BHTM = torch.zeros(shape, dtype=torch.bool, device=layout.device)
        for rows, scores_BHRM in tile_scores(self.score, range(layout.heads), index_call):
            tiles = scores_BHRM.shape[-1]
            mandatory_BRM, visible_BRM = tile_limits(tiles, layout.locate().part(rows))
            kept_BHTM[:, :, rows, :tiles] = self.take(scores_BHRM, mandatory_BRM[:, None], visible_BRM[:, None])
        return _index_of(kept_BHTM, self.tile)

    def _attend(self, call: AttentionCall, index: TileIndex) -> torch.Tensor:
        q_BHSD, capped = call.q_BHSD, call.softmax.cap > 0.0
        chosen = choose_backend(q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[3], "auto", self.tile, capped)
        return prefill_attention(
            q_BHSD,
            call.k_BGKD,
            call.v_BGKD,
            index,
            call.chunk,
            scale=call.scale,
            softmax=call.softmax,
            backend=chosen.name,
        ).out_BHSD


def max_threshold(alpha: float, tile: TileShape) -> TileRule:
    """FlashPrefill's rule: tiles of which the share is at least `alpha` times that of their row's best; 0 takes all."""

    def take(scores_BHRM: torch.Tensor, mandatory_B1RM: torch.Tensor, visible_B1RM: torch.Tensor) -> torch.Tensor:
        return mandatory_B1RM | (visible_B1RM & (scores_BHRM >= alpha * scores_BHRM.amax(-1, keepdim=True)))

    return TileRule("pooled", take, tile)


def cumulative_mass(score: ScoreKind, mass: float, tile: TileShape) -> TileRule:
    """The rule of FlexPrefill and XAttention: the fewest tiles that hold `mass` of a row's attention, best first, among
    equals the lower one; 1 takes all."""
    least = mass if mass < 1.0 else torch.inf  # rounding must not decide whether the whole has been reached

    def take(scores_BHRM: torch.Tensor, mandatory_B1RM: torch.Tensor, visible_B1RM: torch.Tensor) -> torch.Tensor:
        scores_BHRM = scores_BHRM.nan_to_num(0.0).masked_fill_(~visible_B1RM, 0.0)
        needed_BHR1 = (least * scores_BHRM.sum(-1, keepdim=True)).nan_to_num_(0.0, posinf=torch.inf)
        ranked_BHRM = (
            scores_BHRM.masked_fill(mandatory_B1RM, torch.inf).sort(stable=True, dim=-1, descending=True).indices
        )
        shares_BHRM = scores_BHRM.gather(-1, ranked_BHRM)
        before_BHRM = shares_BHRM.cumsum(-1) - shares_BHRM
        kept_BHRM = torch.empty_like(scores_BHRM, dtype=torch.bool)
        kept_BHRM.scatter_(-1, ranked_BHRM, before_BHRM < needed_BHR1)
        return mandatory_B1RM | (visible_B1RM & kept_BHRM)

    return TileRule(score, take, tile)


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
