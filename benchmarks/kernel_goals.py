"""Attention calls over random tiles beside the dense kernels of this machine; `check_kernels.py` prints them.

Tiles are drawn at random below the diagonal. Densities and rates count whole tiles, the diagonal's too, and single
columns by their width. Calls are timed in turn (sparsekv.bench.harness). On a CPU the emulator stands in for
flash-attn-4: then numbers mean nothing, and this only shows that the script runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import attention_cases
import flash_emulator
import torch
from attention_cases import Seen

from sparsekv.bench.harness import FLASH_ATTN, dense_calls, dense_flops, measure, time_dense
from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.flash import call
from sparsekv.kernels.prefill.flash.backend import Passes
from sparsekv.kernels.prefill.flash.call import Part
from sparsekv.kernels.prefill.flash.limits import device_obstacle, shape_obstacle
from sparsekv.kernels.prefill.flash.lists import lower
from sparsekv.kernels.tiles import AttentionOutput, Chunk, TileIndex, computed_tiles, density
from sparsekv.plans.patterns import TileShape

TILE, SMALL_TILE = TileShape(query=128, key=128), TileShape(query=64, key=64)
ROUNDS = 3  # of calls timed in turn: the clock of a GPU that is hot is not what it was a second before
# Share of the dense rate that the computed tiles reach, by whole tiles a row.
FLASH_GOALS, TRITON_GOAL = {16: 0.85, 32: 0.89, 64: 0.93}, 0.65
COLUMNS_GOAL = 1.08


@dataclass(frozen=True)
class Line:
    """One timed call. `found` is its rate over the dense rate, or its time over another call's."""

    what: str
    tokens: int
    milliseconds: float
    density: float | None = None
    tflops: float | None = None
    found: float | None = None
    goal: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.goal is None or self.found is None:
            return ""
        reached = self.found <= self.goal if self.at_most else self.found >= self.goal
        return f"{'<=' if self.at_most else '>='} {self.goal:.2f} {'reached' if reached else 'MISSED'}"


class Layer:
    """Random tensors of one layer and its dense kernels; the default is the attention of an 8B model.

    Dense kernels get tensors that lie token by token, which is how their users call them.
    """

    def __init__(
        self, tokens: int, device: str, *, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype=torch.bfloat16
    ) -> None:
        self.tokens, self.heads, self.dim = tokens, heads, dim
        self.chunk, self.scale = Chunk((0,), (tokens,)), dim**-0.5
        self.tensors = [
            torch.randn((1, count, tokens, dim), device=device, dtype=dtype) for count in (heads, kv_heads, kv_heads)
        ]
        self.by_token = [x_BHSD.transpose(1, 2).contiguous().transpose(1, 2) for x_BHSD in self.tensors]
        self.device = self.tensors[0].device

    def by_share(self, tile: TileShape, share: float, columns: int) -> TileIndex:
        """Every tile with this probability (the first, the diagonal one and the one before it always), and columns."""
        t_T, n_N = self._tiles(tile)
        marked_HTN = torch.rand((self.heads, len(t_T), len(t_T)), device=self.device) < share
        marked_HTN |= (n_N == t_T) | (n_N == t_T - 1) | (n_N == 0)
        return self._packed(tile, marked_HTN & (n_N <= t_T), columns)

    def by_row(self, whole: int, columns: int, diagonal: bool = True) -> TileIndex:
        """`whole` tiles in every row that has as many below the diagonal, and columns."""
        t_T, n_N = self._tiles(TILE)
        luck_HTN = torch.rand((self.heads, len(t_T), len(t_T)), device=self.device).masked_fill_(n_N >= t_T, -1.0)
        marked_HTN = (luck_HTN >= luck_HTN.topk(min(whole, len(t_T)), -1).values[..., -1:]) & (n_N < t_T)
        return self._packed(TILE, marked_HTN | ((n_N == t_T) & diagonal), columns)

    def attend(self, index: TileIndex, backend: str) -> AttentionOutput:
        if backend == "flash":
            return flash(*self.tensors, index, self.chunk, scale=self.scale)
        return prefill_attention(*self.tensors, index, self.chunk, scale=self.scale, backend=backend)

    def attend_tiles(self, index: TileIndex):
        """A call of flash-attn-4 over the tiles alone, their lists made before."""
        q, k, v = self.tensors
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=self.device)
        part = Part(q, k, v, torch.empty_like(q), lse, self.scale, None)
        passes = Passes(lower, call.attend_lists, call.attend_dense) if q.is_cuda else flash_emulator.PASSES
        lists = passes.lower(index, self.chunk).at(slice(0, 1), self.tokens, self.tokens)
        return lambda: passes.over_lists(part, lists)

    def dense(self):
        """Dense flash-attn-4, which goals are held against; whatever there is on a CPU."""
        calls = dense_calls(*self.by_token)
        return calls.get(FLASH_ATTN) or next(iter(calls.values()))

    def tflops(self, milliseconds: float, tile: TileShape, tiles: float) -> float:
        return 4.0 * self.dim * tile.query * tile.key * tiles / milliseconds / 1e9

    def dense_tflops(self, milliseconds: float) -> float:
        return dense_flops(self.heads, self.dim, self.tokens) / milliseconds / 1e9

    def _tiles(self, tile: TileShape) -> tuple[torch.Tensor, torch.Tensor]:
        t_T = torch.arange(self.tokens // tile.query, device=self.device)
        return t_T[:, None], t_T[None]

    def _packed(self, tile: TileShape, marked_HTN: torch.Tensor, columns: int) -> TileIndex:
        t_T = torch.arange(marked_HTN.shape[1], device=self.device)
        column_HC = torch.rand((self.heads, self.tokens), device=self.device).topk(columns).indices.sort().values
        inside_HTC = marked_HTN.gather(2, (column_HC // tile.key)[:, None].expand(-1, len(t_T), -1))
        live_HTC = ~inside_HTC & (column_HC[:, None] // tile.key < t_T[:, None])
        dense_H = torch.zeros(self.heads, dtype=torch.bool, device=self.device)
        index = attention_cases.pack(tile, Seen(marked_HTN[None], column_HC[None], live_HTC[None]), dense_H)
        parts = (index.tiles_BHTW, index.counts_BHT, index.columns_BHC, index.live_BHTN)
        return TileIndex(tile, *parts, dense_H, dense_heads=())


def flash_obstacle(device: str, dtype: torch.dtype, dim: int, tile: TileShape) -> str | None:
    """Why the flash backend does not run such tensors; the emulator on a CPU takes any of its tiles."""
    if device == "cpu":
        return None if tile.query == TILE.query else "query tiles of 128 rows only"
    return device_obstacle(torch.device(device)) or shape_obstacle(dtype, dim, tile)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: TileIndex, chunk: Chunk, **how) -> AttentionOutput:
    """The flash backend through the public call, or its emulator on a CPU."""
    if q.is_cuda:
        return prefill_attention(q, k, v, index, chunk, backend="flash", **how)
    return flash_emulator.prefill(q, k, v, index, chunk, **how)


def goals(layer: Layer, rows: tuple[int, ...] = (16, 32, 64), columns: int = 1024) -> list[Line]:
    """What attention alone is to reach, and what each backend reaches: lists and columns included, index given."""
    obstacle = flash_obstacle(layer.device.type, layer.tensors[0].dtype, layer.dim, TILE)
    if obstacle:
        print(f"no flash rows: {obstacle}", file=sys.stderr)
        return []
    found = []
    for whole in rows:
        index = layer.by_row(whole, 0)
        times = _measured(layer, index, dense=layer.dense())
        dense = layer.dense_tflops(times["dense"])
        found.append(Line("flash-attn-4, dense", layer.tokens, times["dense"], 1.0, dense))
        for name, goal in (("flash", FLASH_GOALS.get(whole)), ("triton", TRITON_GOAL)):
            rate = layer.tflops(times[name], TILE, float(index.counts_BHT.sum()))
            what = f"{name}, {whole} whole tiles a row and the diagonal: rate over dense"
            found.append(Line(what, layer.tokens, times[name], None, rate, rate / dense, goal))
    times = _measured(layer, layer.by_row(32, columns), forty=layer.attend_tiles(layer.by_row(40, 0, diagonal=False)))
    found.append(Line("flash, 40 whole tiles a row, no mask", layer.tokens, times["forty"]))
    for name, goal in (("flash", COLUMNS_GOAL), ("triton", None)):
        what = f"{name}, 32 tiles, the diagonal and {columns} columns: time over that"
        ratio = times[name] / times["forty"]
        found.append(Line(what, layer.tokens, times[name], found=ratio, goal=goal, at_most=True))
    return found


def table(layer: Layer, mixes: tuple[tuple[float, int], ...]) -> list[Line]:
    """The dense kernels, then Triton at every (share of tiles, columns), by tiles of 128 and of 64."""
    peers = time_dense(*layer.by_token, ROUNDS)
    found = [
        Line(f"dense: {name}", layer.tokens, ms, 1.0, layer.dense_tflops(ms)) for name, ms in peers.timed_ms.items()
    ]
    for tile in (TILE, SMALL_TILE):
        for share, columns in mixes:
            index = layer.by_share(tile, share, columns)
            times = measure({"triton": lambda index=index: layer.attend(index, "triton")}, layer.device, ROUNDS)
            ms, rate = times["triton"], layer.tflops(times["triton"], tile, float(computed_tiles(index).sum()))
            what = f"triton, {tile.query} tiles, {columns} columns: times faster than dense"
            over = peers.timed_ms[peers.fastest] / ms if peers.fastest else None
            found.append(Line(what, layer.tokens, ms, float(density(index, layer.chunk)), rate, over))
    return found


def _measured(layer: Layer, index: TileIndex, **beside) -> dict[str, float]:
    """Both backends over this index, in turn with other calls."""
    calls = {name: lambda name=name: layer.attend(index, name) for name in ("flash", "triton")}
    return measure(beside | calls, layer.device, ROUNDS)


def print_lines(title: str, lines: list[Line]) -> None:
    """One table."""
    print(f"\n{title}\n{'':72} {'tokens':>7} {'ms':>9} {'density':>8} {'TFLOP/s':>8} {'found':>8}")
    for line in lines:
        numbers = ((line.density, ".3f"), (line.tflops, ".0f"), (line.found, ".3f"))
        cells = " ".join("".rjust(8) if value is None else format(value, form).rjust(8) for value, form in numbers)
        print(f"{line.what:72} {line.tokens:7} {line.milliseconds:9.3f} {cells} {line.verdict}".rstrip(), flush=True)
