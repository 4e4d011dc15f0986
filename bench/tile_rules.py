"""Published methods of sparse prefill as prefill rules, the same in every head: two that take key tiles by estimated
shares of a row tile's attention, and two that are patterns of plans anyway (`LineRatio`, `StreamingLLM`). Others stand
in published_rules.py.

XAttention (threshold block selection) takes the fewest tiles that hold a share of the whole, FlashPrefill those with at
least a share of the best one's. Shares are estimated in one of two ways.

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

    share[m] = sum over x of  c_x / (sum of all c) * sum over the strided keys n of key tile m of  y[x, n]

STRIDE is 16, the larger of the two strides that the paper uses: the products of queries and keys cost a sixteenth of
those of dense attention, still quadratic in the length, and the smallest tile has 4 x 4 samples. On tiny-retriever (4K
tokens, 64 x 64 tiles, a density of 0.25 to 0.26 over all heads) the tiles chosen with strides 4, 8, 16 and 32 hold
88.3, 88.2, 88.0 and 87.6% of the attention.

Pooled (MInference 1.0, section 3.2): mean queries against mean keys, each tile weighted by the keys of it that the
average row sees, so that the diagonal tile does not count as a whole one:

    share[m] = softmax over m of  scale * mean q . mean k_m + log(mean over the rows of the keys of m that a row sees)

Either way a row tile's shares are 0 or more and sum to 1, or are all 0 where it sees no strided key.

Shapes as in kernels/index/layout.py; N heads of one KV head, R rows, S keys, T row tiles, M key tiles, X strided rows,
J strided keys, E = s * D.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch.nn.functional import pad

from sparsekv.kernels.index.block_sparse import tile_limits
from sparsekv.kernels.index.layout import IndexCall, ceil_div
from sparsekv.kernels.methods import Layer, PrefillRule
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.topk import blocks
from sparsekv.plans.patterns import AShape, Pattern, VerticalSlash, fraction, tokens

PUBLISHED_LINES = (1000, 6096)  # MInference's columns and diagonals
STRIDE = 16  # divides every tile side
_HIDDEN = torch.finfo(torch.float32).min  # finite: a row that sees nothing must not become NaN


@dataclass(frozen=True, slots=True)
class Heads:
    """The query heads of one KV head in one batch row, or some row tiles of these, and the keys that they may see.

    Attributes:
        length: of the batch row, whatever keys are here.
        must_TM, sees_TM: tiles that every row tile computes, and those that it may.
    """

    q_NRD: torch.Tensor
    k_SD: torch.Tensor
    must_TM: torch.Tensor
    sees_TM: torch.Tensor
    past: int
    length: int
    layer: Layer

    @property
    def row_tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The key tiles of the first and of the last row of each row tile."""
        stop, tile = self.past + self.q_NRD.shape[1], self.layer.tile
        first_T = torch.arange(self.past, stop, tile.query, device=self.k_SD.device)
        return first_T // tile.key, (first_T + tile.query - 1).clamp(max=stop - 1) // tile.key

    def back(self, rows: slice) -> torch.Tensor:
        """[R, S]: tokens from each key to a row; negative ahead of it."""
        row_R = torch.arange(self.past + rows.start, self.past + rows.stop, device=self.k_SD.device)
        return row_R[:, None] - torch.arange(len(self.k_SD), device=self.k_SD.device)

    def scores(self, rows: slice) -> torch.Tensor:
        """[N, R, S], -inf where a row does not see a key."""
        q_XD, layer, back_RS = self.q_NRD[:, rows], self.layer, self.back(rows)
        scores_XS = scaled_scores(q_XD.flatten(0, 1)[None, None], self.k_SD[None, None], layer.scale, layer.softmax.cap)
        hidden_RS = (back_RS < 0) | (back_RS >= (layer.window or len(self.k_SD)))
        return torch.unflatten(scores_XS[0, 0], 0, q_XD.shape[:2]).masked_fill_(hidden_RS, -torch.inf)


def means(x_XRD: torch.Tensor, size: int, stride: int = 1) -> torch.Tensor:
    """Means of each `size` tokens, apart for each place in a stride: [..., tiles, stride, D]."""
    count, ones_R1 = ceil_div(x_XRD.shape[-2], size), x_XRD.new_ones(x_XRD.shape[-2], 1, dtype=torch.float32)
    filled = [pad(x, (0, 0, 0, count * size - len(ones_R1))) for x in (x_XRD.float(), ones_R1)]
    sums, rows = (torch.unflatten(x, -2, (count, size // stride, stride)).sum(-3) for x in filled)
    return sums / rows.clamp(min=1.0)


class ByKVHead(PrefillRule):
    """A rule of one KV head and batch row at a time; with `pairs` of rows and keys an element, of some row tiles."""

    pairs: ClassVar[int | None] = None

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        """bool [N, T, M]; tiles that a row tile does not see do not count."""
        raise NotImplementedError

    def tiles(self, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, layer: Layer, budget: float) -> torch.Tensor:
        layout = IndexCall.of(q_BHSD, k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window).layout
        must_BTM, sees_BTM = tile_limits(layout.key_tiles, layout.locate())
        tiles_BHTM, query = must_BTM[:, None].repeat(1, layout.heads, 1, 1), layer.tile.query
        for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
            each = layout.group_size * query * length // self.pairs if self.pairs else 0
            for group, part in product(range(layout.kv_heads), blocks(ceil_div(length - past, query), each)):
                own = slice(group * layout.group_size, (group + 1) * layout.group_size)
                rows = slice(part.start * query, min(part.stop * query, length - past))
                tiles = ceil_div(past + rows.stop, layer.tile.key)
                k_SD = k_BGKD[b, group, : min(length, tiles * layer.tile.key)]
                limits = must_BTM[b, part, :tiles], sees_BTM[b, part, :tiles]
                heads = Heads(q_BHSD[b, own, rows], k_SD, *limits, past + rows.start, length, layer)
                tiles_BHTM[b, own, part, :tiles] = self.taken(heads, budget)
        return tiles_BHTM


class XAttention(ByKVHead):
    """The fewest tiles that hold `tau` of a row's attention, best first, among equals the lower one; 1 takes all."""

    name, pairs = "xattention", STRIDE**2
    further: ClassVar[int] = 1  # antidiagonals, in odd strided rows; 0 in the paper

    @staticmethod
    def mass(budget: float) -> float:
        """From 0.05 to 0.9995, in steps of what is left out."""
        return 1.0 if budget == 1.0 else 1.0 - 0.95 * (0.0005 / 0.95) ** budget

    def setting(self, budget: float) -> str:
        return f"tau {self.mass(budget):.4g}"

    def shares(self, heads: Heads) -> torch.Tensor:
        """[N, T, M], by antidiagonals."""
        q_NRD, k_SD, tile = heads.q_NRD, heads.k_SD, heads.layer.tile
        rows, strided = q_NRD.shape[1], len(k_SD) // STRIDE
        first_X = torch.arange(0, len(heads.sees_TM) * tile.query, STRIDE, device=k_SD.device)
        odd_X1 = first_X[:, None] // STRIDE % 2 * self.further
        within_Xs = torch.arange(STRIDE - 1, -1, -1, device=k_SD.device) - odd_X1
        at_Xs = (first_X[:, None] + within_Xs % STRIDE).clamp(max=rows - 1)
        k_JE = k_SD[: strided * STRIDE].unflatten(0, (strided, STRIDE)).flatten(1)
        q_XE, scale = q_NRD[:, at_Xs].flatten(2).flatten(0, 1), heads.layer.scale / STRIDE
        z_XJ = scaled_scores(q_XE[None, None], k_JE[None, None], scale)
        z_NXJ = z_XJ[0, 0].unflatten(0, (-1, len(first_X)))
        back_XJ = heads.past + first_X[:, None] - torch.arange(strided, device=k_SD.device) * STRIDE
        hidden_XJ = (back_XJ < 0) | (back_XJ - STRIDE + 1 >= (heads.layer.window or torch.inf))
        real_X1 = (rows - first_X).clamp(0, STRIDE).masked_fill(hidden_XJ.all(1), 0)[:, None]
        y_NXJ = z_NXJ.masked_fill_(hidden_XJ, _HIDDEN).softmax(-1)
        tiles, keys = heads.sees_TM.shape[1], tile.key // STRIDE
        y_NXJ = pad(y_NXJ, (0, tiles * keys - strided)) if strided < tiles * keys else y_NXJ
        sums_NXM = torch.where(real_X1 > 0, y_NXJ.unflatten(2, (tiles, keys)).sum(-1) * real_X1, 0.0)
        per_tile = (len(heads.sees_TM), tile.query // STRIDE)
        real_T1 = torch.unflatten(real_X1, 0, per_tile).sum(1).clamp(min=1)
        return torch.unflatten(sums_NXM, 1, per_tile).sum(2) / real_T1

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        mass = self.mass(budget)
        least = mass if mass < 1.0 else torch.inf  # rounding must not decide whether the whole has been reached
        shares_NTM = self.shares(heads).nan_to_num(0.0).masked_fill(~heads.sees_TM, 0.0)
        needed_NT1 = (least * shares_NTM.sum(-1, keepdim=True)).nan_to_num_(0.0, posinf=torch.inf)
        first_NTM = shares_NTM.masked_fill(heads.must_TM, torch.inf)
        ranked_NTM = first_NTM.sort(stable=True, dim=-1, descending=True).indices
        shares_NTM = shares_NTM.gather(-1, ranked_NTM)
        before_NTM = shares_NTM.cumsum(-1) - shares_NTM
        kept_NTM = torch.empty_like(shares_NTM, dtype=torch.bool)
        return kept_NTM.scatter_(-1, ranked_NTM, before_NTM < needed_NT1)


class FlashPrefill(ByKVHead):
    """Tiles of which the share is at least `alpha` times that of their row's best; 0 takes all."""

    name, pairs = "flashprefill", 64 * 64  # at least

    @staticmethod
    def alpha(budget: float) -> float:
        return 0.0 if budget == 1.0 else 0.99 * (1e-4 / 0.99) ** budget

    def setting(self, budget: float) -> str:
        return f"alpha {self.alpha(budget):.4g}"

    def shares(self, heads: Heads) -> torch.Tensor:
        """[N, T, M], pooled."""
        tile, window = heads.layer.tile, heads.layer.window or len(heads.k_SD)
        ends_X = heads.past + (torch.arange(len(heads.sees_TM) + 1) * tile.query).clamp(max=heads.q_NRD.shape[1])
        back_XM = ends_X[:, None] - torch.arange(heads.sees_TM.shape[1]) * tile.key  # from a tile's first key
        back_2XM = torch.stack((back_XM, back_XM - window))
        some_2XM = back_2XM.clamp(0, tile.key)
        pairs_2XM = some_2XM * (some_2XM + 1) // 2 + (back_2XM - some_2XM).clamp(min=0) * tile.key  # of earlier rows
        seen_TM = (pairs_2XM[0] - pairs_2XM[1]).diff(dim=0) / ends_X.diff()[:, None]
        q_NTD, k_MD = means(heads.q_NRD, tile.query).squeeze(-2), means(heads.k_SD, tile.key).squeeze(-2)
        logits_NTM = q_NTD @ k_MD.T * heads.layer.scale + seen_TM.log().to(k_MD.device)
        return logits_NTM.clamp(min=_HIDDEN).softmax(-1)

    def taken(self, heads: Heads, budget: float) -> torch.Tensor:
        shares_NTM = self.shares(heads)
        return shares_NTM >= self.alpha(budget) * shares_NTM.amax(-1, keepdim=True)


class LineRatio(PrefillRule):
    """Columns and diagonals in the ratio of nearly every head of MInference's Llama-3.1-8B configuration, scaled."""

    name = "line_ratio"

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
