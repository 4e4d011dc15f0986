"""Random attention problems with their answer by brute force: what is seen is drawn first, indices are packed from it.

Nothing here uses an index builder or an attention function of the project. Keys and values past a row's length, and
queries of padding rows, are NaN: a kernel that lets them through shows it. Rows are sampled where a whole mask would
not fit.

Shapes: B batch, H query heads, G KV heads, S query rows, R sampled rows, K keys in memory, T query tiles, N key tiles,
C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, AttentionOutput, Chunk, PrefillCall, TileIndex
from sparsekv.plans.patterns import TileShape


@dataclass(frozen=True)
class Case:
    """One problem; `share` of the causal tiles and `columns` single columns a head are drawn at random."""

    name: str
    past: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] = (256,)
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    dtype: torch.dtype = torch.float32
    tile: TileShape = TileShape(query=64, key=64)  # noqa: RUF009
    share: float = 0.5
    columns: int = 0
    dense_heads: tuple[int, ...] = ()
    window: int | None = None
    spare_rows: int = 0
    spare_keys: int = 0
    token_major: bool = False  # memory order [B, S, H, D], as models have it
    cap: float = 0.0
    learned_sinks: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Seen:
    """What each query tile computes, before it is packed into an index."""

    tiles_BHTN: torch.Tensor  # bool
    columns_BHC: torch.Tensor  # ascending, padded with NO_COLUMN
    live_BHTC: torch.Tensor  # bool

    def to(self, device: torch.device) -> Seen:
        return Seen(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Problem:
    """A case drawn: its tensors, its index and what the index stands for."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    index: TileIndex
    seen: Seen
    chunk: Chunk
    window: int | None
    scale: float
    softmax: Softmax = PLAIN

    def by(self, attend: Callable[..., AttentionOutput], **how: Any) -> AttentionOutput:
        """What a backend makes of it."""
        tensors = (self.q_BHSD, self.k_BGKD, self.v_BGKD)
        how |= {} if self.softmax is PLAIN else {"softmax": self.softmax}
        return attend(*tensors, self.index, self.chunk, scale=self.scale, window=self.window, **how)

    @property
    def call(self) -> PrefillCall:
        """The problem as a backend's own function is given it, beside the index."""
        return PrefillCall(self.q_BHSD, self.k_BGKD, self.v_BGKD, self.chunk, self.scale, self.window, self.softmax.cap)

    @property
    def every_row(self) -> torch.Tensor:
        return torch.arange(self.q_BHSD.shape[2], device=self.q_BHSD.device)


def draw(case: Case, device: str = "cpu") -> Problem:
    """Tensors, index and mask of a case; the same on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    chunk = Chunk(case.past, case.lengths)
    S = max(n - p for p, n in zip(case.past, case.lengths, strict=True)) + case.spare_rows
    K = chunk.longest + case.spare_keys
    q_BHSD = _tokens(case, case.heads, S, generator)
    k_BGKD = _tokens(case, case.kv_heads, K, generator)
    v_BGKD = _tokens(case, case.kv_heads, K, generator)
    for b, (past, length) in enumerate(zip(case.past, case.lengths, strict=True)):
        q_BHSD[b, :, length - past :] = float("nan")
        k_BGKD[b, :, length:] = float("nan")
        v_BGKD[b, :, length:] = float("nan")
    dense_H = torch.tensor([h in case.dense_heads for h in range(case.heads)])
    seen = _draw_seen(case, chunk, S, dense_H, generator).to(torch.device(device))
    q_BHSD, k_BGKD, v_BGKD, dense_H = (x.to(device) for x in (q_BHSD, k_BGKD, v_BGKD, dense_H))
    index = pack(case.tile, seen, dense_H)
    sinks_H = torch.randn(case.heads, generator=generator).to(device) * 3 if case.learned_sinks else None
    softmax = Softmax(case.cap, sinks_H) if case.cap or case.learned_sinks else PLAIN
    return Problem(q_BHSD, k_BGKD, v_BGKD, index, seen, chunk, case.window, case.dim**-0.5, softmax)


def _tokens(case: Case, heads: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn((len(case.past), tokens, heads, case.dim), generator=generator).to(case.dtype).transpose(1, 2)
    return drawn if case.token_major else drawn.contiguous()


def _draw_seen(case: Case, chunk: Chunk, queries: int, dense_H: torch.Tensor, generator: torch.Generator) -> Seen:
    tile, B, H = case.tile, len(case.past), case.heads
    T, N = chunk.query_tiles(tile, queries), chunk.key_tiles(tile)
    last_BT = _last_rows(chunk, tile, T)
    tiles_BHTN = (torch.rand((B, H, T, N), generator=generator) < case.share) | dense_H[None, :, None, None]
    tiles_BHTN &= (torch.arange(N) * tile.key <= last_BT[:, :, None])[:, None]
    columns_BHC = _draw_columns(case, chunk, generator)
    inside_BHTC = tiles_BHTN.gather(3, (columns_BHC.clamp(min=0) // tile.key)[:, :, None].expand(B, H, T, -1))
    live_BHTC = (torch.rand(inside_BHTC.shape, generator=generator) < 0.7) & ~inside_BHTC
    live_BHTC &= (columns_BHC >= 0)[:, :, None] & (columns_BHC[:, :, None] <= last_BT[:, None, :, None])
    return Seen(tiles_BHTN, columns_BHC, live_BHTC)


def _last_rows(chunk: Chunk, tile: TileShape, tiles: int) -> torch.Tensor:
    """The last real row of each query tile, [B, T]; -1 where there is none."""
    first_BT = torch.tensor(chunk.past)[:, None] + torch.arange(tiles) * tile.query
    length_B1 = torch.tensor(chunk.lengths)[:, None]
    last_BT = torch.minimum(first_BT + tile.query, length_B1) - 1
    return last_BT.masked_fill(first_BT >= length_B1, -1)


def _draw_columns(case: Case, chunk: Chunk, generator: torch.Generator) -> torch.Tensor:
    """Ascending distinct columns of each head; the last head has fewer, its row is padded."""
    B, H = len(case.past), case.heads
    columns_BHC = torch.full((B, H, case.columns), NO_COLUMN)
    for b, length in enumerate(chunk.lengths):
        for h in range(H):
            wanted = min(case.columns // 2 if h == H - 1 and H > 1 else case.columns, length)
            columns_BHC[b, h, :wanted] = torch.randperm(length, generator=generator)[:wanted].sort().values
    return columns_BHC


def pack(tile: TileShape, seen: Seen, dense_H: torch.Tensor) -> TileIndex:
    """The index that stands for what is seen. Lists of dense heads are filled with rubbish: nobody may read them."""
    device = dense_H.device
    counts_BHT = seen.tiles_BHTN.sum(3)
    width = int(counts_BHT[:, ~dense_H].max()) if (~dense_H).any() and counts_BHT.numel() else 0
    order_BHTN = torch.argsort((~seen.tiles_BHTN).to(torch.int8), dim=3, stable=True)[..., :width]
    unused = torch.arange(width, device=device) >= counts_BHT[..., None]
    tiles_BHTW = order_BHTN.masked_fill(unused, NO_TILE)
    tiles_BHTW[:, dense_H] = 1 << 20
    bits = torch.nn.functional.pad(seen.live_BHTC, (0, -seen.live_BHTC.shape[3] % 32)).unflatten(3, (-1, 32)).long()
    words = (bits << torch.arange(32, device=device)).sum(4)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return TileIndex(tile, tiles_BHTW.int(), counts_BHT.int(), seen.columns_BHC.int(), words.int(), dense_H)


def mask_of_rows(problem: Problem, row_R: torch.Tensor) -> torch.Tensor:
    """Bool [B, H, R, K]: which keys these query rows see, by the definition in tiles.py; padding rows see nothing."""
    tile, seen, device = problem.index.tile, problem.seen, row_R.device
    keys = problem.k_BGKD.shape[2]
    tiles_BHRN = seen.tiles_BHTN[:, :, row_R // tile.query]
    in_tile_BHRK = tiles_BHRN.repeat_interleave(tile.key, 3)[..., :keys]
    in_tile_BHRK = torch.nn.functional.pad(in_tile_BHRK, (0, keys - in_tile_BHRK.shape[3]))
    live_BHRC = seen.live_BHTC[:, :, row_R // tile.query]
    slot_BHRC = seen.columns_BHC[:, :, None].where(live_BHRC, keys)  # the last slot takes what is not live
    single_BHRK = torch.zeros((*in_tile_BHRK.shape[:3], keys + 1), dtype=torch.bool, device=device)
    single_BHRK = single_BHRK.scatter_(3, slot_BHRC, True)[..., :keys]
    i_BR1 = torch.tensor(problem.chunk.past, device=device)[:, None, None] + row_R[:, None]
    j_K = torch.arange(keys, device=device)
    causal_BRK = (j_K <= i_BR1) & (i_BR1 < torch.tensor(problem.chunk.lengths, device=device)[:, None, None])
    if problem.window is not None:
        causal_BRK &= i_BR1 - j_K < problem.window
    return (in_tile_BHRK | single_BHRK) & causal_BRK[:, None]


@dataclass(frozen=True)
class Comparison:
    """How far an output is from the answer; `faults` is empty when it is right."""

    error: float  # ||out - answer|| / ||answer||
    lse_error: float  # the largest difference
    faults: tuple[str, ...]


def compare(found: AttentionOutput, problem: Problem, row_R: torch.Tensor | None = None) -> Comparison:
    """The rows `row_R` (all by default) against dense float32 attention under their mask.

    Every element must have been written, and rows that see nothing must be 0 and -inf.
    """
    row_R = problem.every_row if row_R is None else row_R
    mask_BHRK = mask_of_rows(problem, row_R)
    group = problem.q_BHSD.shape[1] // problem.k_BGKD.shape[1]
    k_BHKD, v_BHKD = (x.float().nan_to_num(0.0).repeat_interleave(group, 1) for x in (problem.k_BGKD, problem.v_BGKD))
    cap, sinks_H = problem.softmax.cap, problem.softmax.sinks_H
    scores_BHRK = problem.q_BHSD[:, :, row_R].float() @ k_BHKD.mT * problem.scale
    scores_BHRK = cap * torch.tanh(scores_BHRK / cap) if cap else scores_BHRK
    scores_BHRK = scores_BHRK.masked_fill(~mask_BHRK, float("-inf"))
    weights_BHRK = torch.softmax(scores_BHRK, 3).nan_to_num(0.0)
    if sinks_H is not None:
        weights_BHRK *= torch.sigmoid(scores_BHRK.logsumexp(3) - sinks_H[:, None])[..., None]
    answer_BHRD = weights_BHRK @ v_BHKD
    out_BHRD = found.out_BHSD[:, :, row_R].float()
    seen_BHR = mask_BHRK.any(3)
    exact = problem.q_BHSD.dtype == torch.float32
    faults = []
    error = float((out_BHRD - answer_BHRD).norm() / answer_BHRD.norm().clamp(min=1e-9))
    if found.out_BHSD.dtype != problem.q_BHSD.dtype or found.out_BHSD.shape != problem.q_BHSD.shape:
        faults.append(f"output is {found.out_BHSD.dtype} {tuple(found.out_BHSD.shape)}")
    if not torch.isfinite(found.out_BHSD).all():
        faults.append("an element was not written, or memory past the length was read")
    if not (out_BHRD[~seen_BHR] == 0).all():
        faults.append("rows that see nothing are not 0")
    if not error < (2e-5 if exact else 5e-3):
        faults.append(f"relative error {error:.2e}")
    lse_error = 0.0
    if found.lse_BHS is not None:
        lse_BHR = found.lse_BHS[:, :, row_R]
        if found.lse_BHS.dtype != torch.float32 or not (lse_BHR[~seen_BHR] == float("-inf")).all():
            faults.append("log-sum-exp of rows that see nothing is not -inf, or not float32")
        apart = (lse_BHR - scores_BHRK.logsumexp(3))[seen_BHR].abs()
        lse_error = float(apart.max()) if apart.numel() else 0.0
        if not lse_error < (1e-4 if exact else 2e-2):
            faults.append(f"log-sum-exp off by {lse_error:.2e}")
    return Comparison(error, lse_error, tuple(faults))


def assert_close(found: AttentionOutput, problem: Problem) -> None:
    """Fails with what is wrong."""
    assert not compare(found, problem).faults
