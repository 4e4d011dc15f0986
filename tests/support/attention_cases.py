"""Random attention problems with their answer by brute force: masks are drawn first, indices are packed from them.

Nothing here uses an index builder or an attention function of the project. Keys and values past a row's length, and
queries of padding rows, are NaN: a kernel that lets them through shows it.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, T query tiles, N key tiles, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, AttentionOutput, Chunk, TileIndex
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
    seed: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Problem:
    """A case drawn: its tensors, its index and the mask that the index stands for."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    index: TileIndex
    mask_BHSK: torch.Tensor
    chunk: Chunk
    window: int | None
    scale: float


def draw(case: Case, device: str = "cpu") -> Problem:
    """Tensors, index and mask of a case; the same on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    chunk = Chunk(case.past, case.lengths)
    S = max(n - p for p, n in zip(case.past, case.lengths, strict=True)) + case.spare_rows
    K = chunk.longest + case.spare_keys
    B = len(case.past)
    q_BHSD = _tokens(case, B, case.heads, S, generator)
    k_BGKD = _tokens(case, B, case.kv_heads, K, generator)
    v_BGKD = _tokens(case, B, case.kv_heads, K, generator)
    for b, (past, length) in enumerate(zip(case.past, case.lengths, strict=True)):
        q_BHSD[b, :, length - past :] = float("nan")
        k_BGKD[b, :, length:] = float("nan")
        v_BGKD[b, :, length:] = float("nan")
    index, mask_BHSK = _draw_index(case, chunk, S, K, generator)
    at = torch.device(device)
    return Problem(
        q_BHSD.to(at),
        k_BGKD.to(at),
        v_BGKD.to(at),
        TileIndex(
            index.tile,
            index.tiles_BHTW.to(at),
            index.counts_BHT.to(at),
            index.columns_BHC.to(at),
            index.live_BHTN.to(at),
            index.dense_H.to(at),
        ),
        mask_BHSK.to(at),
        chunk,
        case.window,
        case.dim**-0.5,
    )


def _tokens(case: Case, batch: int, heads: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn((batch, tokens, heads, case.dim), generator=generator).to(case.dtype).transpose(1, 2)
    return drawn if case.token_major else drawn.contiguous()


def causal_mask(chunk: Chunk, queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    """[B, S, K]: what a dense layer sees; padding rows see nothing."""
    i_BS1 = torch.tensor(chunk.past)[:, None, None] + torch.arange(queries)[:, None]
    j_K = torch.arange(keys)
    mask_BSK = (j_K <= i_BS1) & (i_BS1 < torch.tensor(chunk.lengths)[:, None, None])
    return mask_BSK if window is None else mask_BSK & (i_BS1 - j_K < window)


def _draw_index(
    case: Case, chunk: Chunk, queries: int, keys: int, generator: torch.Generator
) -> tuple[TileIndex, torch.Tensor]:
    tile, B, H = case.tile, len(case.past), case.heads
    T, N = chunk.query_tiles(tile, queries), chunk.key_tiles(tile)
    dense_H = torch.tensor([h in case.dense_heads for h in range(H)])
    last_BT = _last_rows(chunk, tile, T)
    causal_BTN = torch.arange(N) * tile.key <= last_BT[:, :, None]
    chosen_BHTN = (torch.rand((B, H, T, N), generator=generator) < case.share) | dense_H[None, :, None, None]
    chosen_BHTN &= causal_BTN[:, None]
    columns_BHC = _draw_columns(case, chunk, generator)
    inside_BHTC = chosen_BHTN.gather(3, (columns_BHC.clamp(min=0) // tile.key)[:, :, None].expand(B, H, T, -1))
    live_BHTC = (torch.rand(inside_BHTC.shape, generator=generator) < 0.7) & ~inside_BHTC
    live_BHTC &= (columns_BHC >= 0)[:, :, None] & (columns_BHC[:, :, None] <= last_BT[:, None, :, None])

    computed_BHTK = chosen_BHTN.repeat_interleave(tile.key, 3)
    computed_BHTK = torch.nn.functional.pad(computed_BHTK, (0, max(0, keys - computed_BHTK.shape[3])))[..., :keys]
    singles_BHTK = torch.zeros_like(computed_BHTK)
    for b, h in torch.cartesian_prod(torch.arange(B), torch.arange(H)).tolist():
        held = columns_BHC[b, h] >= 0
        singles_BHTK[b, h][:, columns_BHC[b, h][held]] = live_BHTC[b, h][:, held]
    mask_BHSK = (computed_BHTK | singles_BHTK).repeat_interleave(tile.query, 2)[:, :, :queries]
    mask_BHSK = mask_BHSK & causal_mask(chunk, queries, keys, case.window)[:, None]
    return pack(tile, chosen_BHTN, columns_BHC, live_BHTC, dense_H), mask_BHSK


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
    for b, length in enumerate(case.lengths):
        for h in range(H):
            wanted = min(case.columns // 2 if h == H - 1 and H > 1 else case.columns, length)
            columns_BHC[b, h, :wanted] = torch.randperm(length, generator=generator)[:wanted].sort().values
    return columns_BHC


def pack(
    tile: TileShape,
    chosen_BHTN: torch.Tensor,
    columns_BHC: torch.Tensor,
    live_BHTC: torch.Tensor,
    dense_H: torch.Tensor,
) -> TileIndex:
    """The index that stands for marked tiles and live columns. Lists of dense heads are filled with rubbish."""
    counts_BHT = chosen_BHTN.sum(3)
    listed_H = ~dense_H
    width = int(counts_BHT[:, listed_H].max()) if listed_H.any() and counts_BHT.numel() else 0
    order_BHTN = torch.argsort(~chosen_BHTN * 1, dim=3, stable=True)[..., :width]
    unused = torch.arange(width) >= counts_BHT[..., None]
    tiles_BHTW = order_BHTN.masked_fill(unused, NO_TILE)
    tiles_BHTW[:, dense_H] = 1 << 20
    C = columns_BHC.shape[2]
    bits = torch.nn.functional.pad(live_BHTC, (0, -C % 32)).unflatten(3, (-1, 32)).long()
    words = (bits << torch.arange(32)).sum(4)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return TileIndex(tile, tiles_BHTW.int(), counts_BHT.int(), columns_BHC.int(), words.int(), dense_H)


def expected(problem: Problem) -> AttentionOutput:
    """The answer, dense in float32 with the mask; rows that see nothing are 0 and -inf."""
    group = problem.q_BHSD.shape[1] // problem.k_BGKD.shape[1]
    k_BHKD = problem.k_BGKD.float().nan_to_num(0.0).repeat_interleave(group, 1)
    v_BHKD = problem.v_BGKD.float().nan_to_num(0.0).repeat_interleave(group, 1)
    scores_BHSK = problem.q_BHSD.float() @ k_BHKD.transpose(2, 3) * problem.scale
    scores_BHSK = scores_BHSK.masked_fill(~problem.mask_BHSK, float("-inf"))
    lse_BHS = scores_BHSK.logsumexp(3)
    out_BHSD = torch.softmax(scores_BHSK, 3).nan_to_num(0.0) @ v_BHKD
    return AttentionOutput(out_BHSD, lse_BHS)


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted ||out - expected|| / ||expected||."""
    return 2e-5 if dtype == torch.float32 else 5e-3


def assert_close(found: AttentionOutput, problem: Problem) -> None:
    """Every element written, padding exact, the rest within the dtype's tolerance."""
    answer = expected(problem)
    seen_BHS = problem.mask_BHSK.any(3)
    out = found.out_BHSD.float()
    assert found.out_BHSD.dtype == problem.q_BHSD.dtype
    assert out.shape == answer.out_BHSD.shape
    assert torch.isfinite(out).all(), "an element was not written, or memory past the length was read"
    assert (out[~seen_BHS] == 0).all(), "rows that see nothing must be 0"
    error = (out - answer.out_BHSD).norm() / answer.out_BHSD.norm().clamp(min=1e-9)
    assert error < tolerance(problem.q_BHSD.dtype), f"relative error {error:.2e}"
    if found.lse_BHS is not None:
        assert found.lse_BHS.dtype == torch.float32
        assert (found.lse_BHS[~seen_BHS] == float("-inf")).all()
        worst = (found.lse_BHS - answer.lse_BHS)[seen_BHS].abs().max() if seen_BHS.any() else torch.tensor(0.0)
        assert worst < (1e-4 if problem.q_BHSD.dtype == torch.float32 else 2e-2), f"log-sum-exp off by {worst:.2e}"
