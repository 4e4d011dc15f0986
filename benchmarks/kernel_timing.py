"""Times of the attention kernels beside the dense kernels of this machine; `check_kernels.py` calls it.

Times are medians of `triton.testing.do_bench`; sparse and dense run in the same process. TFLOP/s count the tiles and
columns that are computed, for dense kernels the causal half of the matrix.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import attention_cases
import torch
from attention_cases import Seen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.backends import decode_attention, prefill_attention
from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.keys import KeyView, resident
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.prefill.triton import Launch
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import TileShape

TILE, SMALL_TILE = TileShape(query=128, key=128), TileShape(query=64, key=64)


@dataclass(frozen=True)
class Timing:
    """One line of a timing table; density and TFLOP/s where they mean something."""

    name: str
    tokens: int
    milliseconds: float
    density: float | None = None
    tflops: float | None = None
    gigabytes_per_second: float | None = None


@dataclass(frozen=True)
class Shape:
    """The tensors of one layer; the default is the attention of an 8B model."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (
            torch.randn((1, heads, self.tokens, self.dim), device=device, dtype=self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return q, k, v

    @property
    def dense_flops(self) -> float:
        return 4.0 * self.heads * self.dim * self.tokens * (self.tokens + 1) / 2


def median_ms(call: Callable[[], object], device: str) -> float:
    """Milliseconds of a call: the median on a GPU; one run in the interpreter."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    import triton

    return float(triton.testing.do_bench(call, warmup=50, rep=300, return_mode="median"))


def dense_peers(shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    """The dense kernels that this machine has; one that does not run is left out, with its reason on stderr."""
    q, k, v = shape.tensors(device)

    def torch_kernel(backend: SDPBackend) -> Callable[[], object]:
        def call() -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    def flash_attn_4() -> object:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func(*by_token, causal=True)

    by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    chunk = Chunk((0,), (shape.tokens,))
    peers: dict[str, Callable[[], object]] = {
        "dense: dense_attention": lambda: dense_attention(q, k, v, chunk, scale=shape.dim**-0.5)
    }
    if device != "cpu":
        peers["dense: torch flash"] = torch_kernel(SDPBackend.FLASH_ATTENTION)
        peers["dense: torch cuDNN"] = torch_kernel(SDPBackend.CUDNN_ATTENTION)
        peers["dense: flash-attn-4"] = flash_attn_4
    return {name: call for name, call in peers.items() if runs(name, call)}


def runs(name: str, call: Callable[[], object]) -> bool:
    """Tries a peer once."""
    try:
        call()
    except Exception as error:
        print(f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
        return False
    return True


def timing_index(shape: Shape, tile: TileShape, share: float, columns: int, device: str) -> tuple[TileIndex, float]:
    """Random tiles (the first, the diagonal and the one before it always) and columns; and the density they come to."""
    tiles = shape.tokens // tile.query
    t_T = torch.arange(tiles, device=device)
    marked_HTN = torch.rand((shape.heads, tiles, tiles), device=device) < share
    marked_HTN |= (t_T[None, :] == t_T[:, None]) | (t_T[None, :] == t_T[:, None] - 1) | (t_T[None, :] == 0)
    marked_HTN &= t_T[None, :] <= t_T[:, None]
    column_HC = torch.rand((shape.heads, shape.tokens), device=device).topk(columns).indices.sort().values
    inside_HTC = marked_HTN.gather(2, (column_HC // tile.key)[:, None].expand(-1, tiles, -1))
    live_HTC = ~inside_HTC & (column_HC[:, None] // tile.key < t_T[:, None])
    seen = Seen(marked_HTN[None], column_HC[None], live_HTC[None])
    dense_H = torch.full((shape.heads,), share >= 1, device=device)
    computed = float(marked_HTN.sum()) + float(live_HTC.sum()) / tile.key
    return attention_cases.pack(tile, seen, dense_H), computed / (shape.heads * tiles * (tiles + 1) / 2)


def time_prefill(shape: Shape, device: str, mixes: list[tuple[float, int]]) -> list[Timing]:
    """Dense peers, then the sparse kernel at every (share of tiles, columns), at 128 and 64 tiles."""
    found = []
    for name, call in dense_peers(shape, device).items():
        ms = median_ms(call, device)
        found.append(Timing(name, shape.tokens, ms, 1.0, shape.dense_flops / ms / 1e9))
    q, k, v = shape.tensors(device)
    chunk = Chunk((0,), (shape.tokens,))
    for tile in (TILE, SMALL_TILE):
        for share, columns in mixes:
            index, density = timing_index(shape, tile, share, columns, device)

            def call(index: TileIndex = index) -> object:
                return prefill_attention(q, k, v, index, chunk, scale=shape.dim**-0.5, backend="triton")

            ms = median_ms(call, device)
            name = f"triton {tile.query} tiles, {columns} columns"
            found.append(Timing(name, shape.tokens, ms, density, _tile_flops(shape, tile) * density / ms / 1e9))
    return found


def _tile_flops(shape: Shape, tile: TileShape) -> float:
    """Operations of every causal tile, the whole diagonal ones included."""
    tiles = shape.tokens // tile.query
    return 4.0 * shape.heads * shape.dim * tile.query * tile.key * tiles * (tiles + 1) / 2


def time_launches(shape: Shape, device: str) -> list[Timing]:
    """Other block sizes than the table's, at 10% of the tiles and 1000 columns; those that do not fit are left out."""
    from sparsekv.kernels.prefill.triton import prefill

    q, k, v = shape.tensors(device)
    chunk = Chunk((0,), (shape.tokens,))
    index, density = timing_index(shape, TILE, 0.1, min(1000, shape.tokens // 8), device)
    found = []
    for m, n, c, warps, stages, column_stages in (
        (128, 128, 64, 8, 2, 3), (128, 128, 64, 8, 3, 3), (128, 128, 64, 8, 2, 2), (128, 128, 32, 8, 2, 3),
        (128, 128, 128, 8, 2, 3), (128, 64, 64, 8, 3, 3), (128, 64, 64, 4, 3, 3), (64, 128, 64, 4, 2, 3),
        (64, 64, 64, 4, 3, 3),
    ):  # fmt: skip
        launch = Launch(m, n, c, warps, stages, column_stages)

        def call(launch: Launch = launch) -> object:
            return prefill(q, k, v, index, chunk, scale=shape.dim**-0.5, launch=launch)

        name = f"launch {m}x{n}, {c} columns, {warps} warps, {stages}/{column_stages} stages"
        if runs(name, call):
            ms = median_ms(call, device)
            found.append(Timing(name, shape.tokens, ms, density, _tile_flops(shape, TILE) * density / ms / 1e9))
    return found


def time_decode(shape: Shape, device: str, listed: list[int], tail: int = 64) -> list[Timing]:
    """One query over all tokens by torch, and over chosen tokens by the Triton kernels."""
    q, k, v = shape.tensors(device)
    q = q[:, :, -1:]
    chunk = Chunk((shape.tokens - 1,), (shape.tokens,))
    bytes_a_token = 2 * shape.kv_heads * shape.dim * k.element_size()
    ms = median_ms(lambda: dense_attention(q, k, v, chunk, scale=shape.dim**-0.5), device)
    found = [Timing("dense decode: torch", shape.tokens, ms, 1.0, None, shape.tokens * bytes_a_token / ms / 1e6)]
    for count in listed:
        chosen = torch.randperm(shape.tokens - tail, device=device)[:count].sort().values.int()
        keys = resident(k, v)
        selection = Selection(chosen[None, None], torch.full_like(keys.lengths_B, count), 0, tail)

        def call(keys: KeyView = keys, selection: Selection = selection) -> object:
            return decode_attention(q, keys, selection, scale=shape.dim**-0.5, backend="triton")

        ms = median_ms(call, device)
        used = count + tail
        name = f"triton decode, {count} chosen, {tail} recent"
        rate = used * bytes_a_token / ms / 1e6
        found.append(Timing(name, shape.tokens, ms, used / shape.tokens, None, rate))
    return found


def print_timings(title: str, timings: list[Timing]) -> None:
    """One table."""
    print(f"\n{title}\n{'':52} {'tokens':>7} {'ms':>9} {'density':>8} {'TFLOP/s':>8} {'GB/s':>8}")
    for t in timings:
        numbers = [f"{x:8.{digits}f}" if x is not None else " " * 8
                   for x, digits in ((t.density, 3), (t.tflops, 0), (t.gigabytes_per_second, 0))]  # fmt: skip
        print(f"{t.name:52} {t.tokens:7} {t.milliseconds:9.3f} {' '.join(numbers)}", flush=True)
