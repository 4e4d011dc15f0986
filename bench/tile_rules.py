"""Published methods of sparse prefill as prefill rules, the same in every head: three that take key tiles by estimated
shares, and two that are patterns of plans anyway (`MInference`, `StreamingLLM`).

A rule estimates which share of a row tile's attention each key tile gets, and takes tiles by these shares, beside those
that every pattern computes: FlexPrefill (cumulative-attention index selection) and XAttention (threshold block
selection) the fewest that hold a share of the whole, FlashPrefill those with at least a share of the best one's. Of
FlexPrefill there is the query-aware block rule alone, without its test of which heads take vertical-slash lines
instead. Shares are estimated in one of two ways.

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

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar, Literal

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import pool_heads, tile_limits
from sparsekv.kernels.index.layout import IndexCall, IndexLayout, RowTiles, ceil_div, floor_div, take_heads
from sparsekv.kernels.methods import Layer, PrefillRule
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.topk import blocks
from sparsekv.plans.patterns import AShape, Pattern, VerticalSlash, fraction, tokens

PUBLISHED_LINES = (1000, 6096)  # MInference's columns and diagonals
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


class _Estimated(PrefillRule):
    """A rule that takes tiles by the estimated share of their row's attention."""

    score: ClassVar[ScoreKind] = "pooled"

    def take(
        self, shares_BHRM: torch.Tensor, mandatory_B1RM: torch.Tensor, visible_B1RM: torch.Tensor, budget: float
    ) -> torch.Tensor:
        """bool [B, H, R, M]; mandatory tiles are added."""
        raise NotImplementedError

    def tiles(self, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, layer: Layer, budget: float) -> torch.Tensor:
        call = IndexCall.of(q_BHSD, k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window)
        layout = call.layout
        shape = (layout.batch, layout.heads, layout.row_tiles, layout.key_tiles)
        kept_BHTM = torch.zeros(shape, dtype=torch.bool, device=layout.device)
        for rows, shares_BHRM in tile_scores(self.score, range(layout.heads), call):
            tiles = shares_BHRM.shape[-1]
            mandatory_BRM, visible_BRM = tile_limits(tiles, layout.locate().part(rows))
            taken_BHRM = self.take(shares_BHRM, mandatory_BRM[:, None], visible_BRM[:, None], budget)
            kept_BHTM[:, :, rows, :tiles] = taken_BHRM
        return kept_BHTM


class FlashPrefill(_Estimated):
    """Tiles of which the share is at least `alpha` times that of their row's best; 0 takes all."""

    name = "flashprefill"

    @staticmethod
    def alpha(budget: float) -> float:
        return 0.0 if budget == 1.0 else 0.99 * (1e-4 / 0.99) ** budget

    def setting(self, budget: float) -> str:
        return f"alpha {self.alpha(budget):.4g}"

    def take(
        self, shares_BHRM: torch.Tensor, mandatory_B1RM: torch.Tensor, visible_B1RM: torch.Tensor, budget: float
    ) -> torch.Tensor:
        return shares_BHRM >= self.alpha(budget) * shares_BHRM.amax(-1, keepdim=True)


class FlexPrefill(_Estimated):
    """The fewest tiles that hold `gamma` of a row's attention, best first, among equals the lower one; 1 takes all."""

    name, knob = "flexprefill", "gamma"

    @staticmethod
    def mass(budget: float) -> float:
        """From 0.05 to 0.9995, in steps of what is left out."""
        return 1.0 if budget == 1.0 else 1.0 - 0.95 * (0.0005 / 0.95) ** budget

    def setting(self, budget: float) -> str:
        return f"{self.knob} {self.mass(budget):.4g}"

    def take(
        self, shares_BHRM: torch.Tensor, mandatory_B1RM: torch.Tensor, visible_B1RM: torch.Tensor, budget: float
    ) -> torch.Tensor:
        mass = self.mass(budget)
        least = mass if mass < 1.0 else torch.inf  # rounding must not decide whether the whole has been reached
        shares_BHRM = shares_BHRM.nan_to_num(0.0).masked_fill(~visible_B1RM, 0.0)
        needed_BHR1 = (least * shares_BHRM.sum(-1, keepdim=True)).nan_to_num_(0.0, posinf=torch.inf)
        first_BHRM = shares_BHRM.masked_fill(mandatory_B1RM, torch.inf)
        ranked_BHRM = first_BHRM.sort(stable=True, dim=-1, descending=True).indices
        shares_BHRM = shares_BHRM.gather(-1, ranked_BHRM)
        before_BHRM = shares_BHRM.cumsum(-1) - shares_BHRM
        kept_BHRM = torch.empty_like(shares_BHRM, dtype=torch.bool)
        return kept_BHRM.scatter_(-1, ranked_BHRM, before_BHRM < needed_BHR1)


class XAttention(FlexPrefill):
    """The same by antidiagonal sums, where the mass is called `tau`."""

    name, knob, score = "xattention", "tau", "antidiagonal"


class MInference(PrefillRule):
    """Its vertical-slash pattern in the ratio of nearly every head of its Llama-3.1-8B configuration, scaled."""

    name = "minference"

    @staticmethod
    def scale(budget: float) -> float:
        return float(2.0 ** (-12 + 16 * budget))

    def pattern(self, budget: float) -> Pattern:
        columns, diagonals = (tokens(round(self.scale(budget) * count)) for count in PUBLISHED_LINES)
        return VerticalSlash(vertical=columns, slash=diagonals, last_q=64, max_tiles=fraction(1.0))

    def setting(self, budget: float) -> str:
        return "{:.4g} x ({} columns, {} diagonals)".format(self.scale(budget), *PUBLISHED_LINES)


class StreamingLLM(PrefillRule):
    """Sinks and a window."""

    name = "streamingllm"

    def pattern(self, budget: float) -> Pattern:
        return AShape(sink=tokens(128), window=fraction(budget))  # it needs four sinks; a tile is computed anyway

    def setting(self, budget: float) -> str:
        return f"a window of {budget:.4g} of the context"
