"""Queries, keys and values whose attention goes where it was planted: what kernels and index builders are timed on.

Random queries and keys attend everywhere, so an index over them is as wrong as any other and slashes are scattered.
Here every head has the structure of its family (sinks, a local band, runs of diagonals, scattered columns, hot tiles;
see codes.py), sized for a stated density, and what was planted is returned beside the tensors.

Deterministic by seed: the structure is the same on every device. Memory is linear in the length. Tensors lie token by
token, as models make them.

Shapes: H query heads, G KV heads, N query heads of a KV head, S tokens, D head size, C columns, M key tiles, T row
tiles, Z clusters a row tile looks at, F frequencies, X dimensions of a tile code, J tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.bench.codes import (
    SMALLEST_HEAD,
    Layout,
    layout_for,
    narrowest_run,
    place_code,
    place_query,
    slash_code,
    slash_waves,
    tile_codes,
)
from sparsekv.planner.bench.sizes import SINK, BenchFamily, HeadSizes, pattern_for, planted_diagonals, sizes_for
from sparsekv.planner.space import last_q_for
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Pattern, TileShape

_FEWEST_TILES = 8
BLOCK_ROWS = 1 << 14  # of temporaries
_BASE_SPREAD = 0.4  # standard deviation of the logits of what was not planted
_MARGIN = 3.0  # log of the planted diagonals' mass over that of all other keys
_SINK_SHARE = 0.25  # of the sinks' mass over that of the rest
_RUN_JITTER = 0.04  # of the prompt, by which heads differ
_LIFETIMES = 4  # of an a_shape's window: what lies beyond it holds exp(-4) of the mass
_HOT_LEAD = 5.0  # log of the hot tiles' mass over that of the others


@dataclass(frozen=True, slots=True)
class HeadTruth:
    """What was planted for one query head, on the host. What its family does not have is empty."""

    family: BenchFamily
    window: int  # tokens of the local band
    runs: tuple[tuple[int, int], ...]  # diagonals [first, stop)
    columns_C: torch.Tensor  # int64, ascending
    cluster_M: torch.Tensor  # int64: of each key tile
    looks_at_TZ: torch.Tensor  # int64: clusters whose key tiles are hot for a row tile


@dataclass(frozen=True, slots=True)
class Planted:
    """One layer's attention, where its structure is, and patterns with budgets for it."""

    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    chunk: Chunk
    tile: TileShape
    heads: tuple[HeadTruth, ...]
    patterns: tuple[Pattern, ...]

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.q_BHSD.shape[-1]) ** -0.5


def plant(
    families: Sequence[BenchFamily],
    *,
    kv_heads: int,
    head_dim: int,
    length: int,
    density: float,
    tile: TileShape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Planted:
    """Attention of one layer of `length` tokens, its heads sparse at about `density`.

    Args:
        families: of each query head.
        kv_heads: heads of K and V; each serves as many query heads as the next.
        density: computed tiles over causal tiles that patterns with these budgets come to; short prompts, where the
            tiles that every pattern computes are more, come to more.
        tile: hot tiles are whole tiles of this shape.

    Raises:
        UsageError: see `check_plantable`.
    """
    check_plantable(len(families), kv_heads, head_dim, length, density, tile)
    group = len(families) // kv_heads
    layout = layout_for(families, head_dim, group)
    narrowest = narrowest_run(layout.frequencies, length)
    sizes = [sizes_for(family, length, density, tile, narrowest) for family in families]
    random = torch.Generator().manual_seed(seed)
    groups = [_draw_group(sizes[g * group : (g + 1) * group], length, tile, layout, random) for g in range(kv_heads)]
    q_BHSD, k_BGSD, v_BGSD = (_empty(n, length, head_dim, device, dtype) for n in (len(families), kv_heads, kv_heads))
    noise = torch.Generator(device).manual_seed(seed)
    for g, drawn in enumerate(groups):
        _fill(drawn, q_BHSD[0, g * group : (g + 1) * group], k_BGSD[0, g], tile, layout, noise)
        v_BGSD[0, g].normal_(generator=noise)
    return Planted(
        q_BHSD,
        k_BGSD,
        v_BGSD,
        Chunk.uniform(1, 0, length),
        tile,
        tuple(truth for drawn in groups for truth in drawn.heads),
        tuple(pattern_for(own, length, density, tile) for own in sizes),
    )


def check_plantable(heads: int, kv_heads: int, head_dim: int, length: int, density: float, tile: TileShape) -> None:
    """Whether structure of that density can be planted in such a layer.

    Raises:
        UsageError: it cannot; the message says why.
    """
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise UsageError(f"expected heads to be a multiple of KV heads, found {heads} and {kv_heads}")
    if head_dim < SMALLEST_HEAD:
        raise UsageError(f"expected a head size of at least {SMALLEST_HEAD} to plant structure in, found {head_dim}")
    if length < _FEWEST_TILES * tile.key:
        raise UsageError(
            f"expected lengths of at least {_FEWEST_TILES} tiles, {_FEWEST_TILES * tile.key} tokens, found {length}"
        )
    if not 0.0 < density <= 1.0:
        raise UsageError(f"expected a density above 0 and up to 1, found {density}")


def _empty(heads: int, length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((1, length, heads, head_dim), device=device, dtype=dtype).transpose(1, 2)


# --- what is planted: small, on the host ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """The structure of the heads that share a KV head, and the codes that say it."""

    heads: tuple[HeadTruth, ...]
    sizes: tuple[HeadSizes, ...]
    peak: float  # logit of a diagonal in the middle of its run
    column_peak: float  # logit of a column
    frequencies_F: torch.Tensor  # empty without vertical-slash heads
    weights_F: torch.Tensor
    codes_MX: torch.Tensor  # by cluster; empty without tile heads
    cluster_M: torch.Tensor

    @property
    def lifetime(self) -> float:
        """Tokens over which an a_shape's attention fades by a factor e."""
        return max([size.window for size in self.sizes] + [1]) / _LIFETIMES


def _draw_group(
    sizes: Sequence[HeadSizes], length: int, tile: TileShape, layout: Layout, random: torch.Generator
) -> _Group:
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    clusters = max(size.clusters for size in sizes)
    cluster_M = _deal(clusters, -(-length // tile.key), random) if clusters else none
    columns = {
        n: _draw_columns(next(size.columns for size in sizes if size.columns), length, random)
        for n in range(layout.column_codes)
        if any(size.columns for size in sizes)
    }
    width = max(size.run for size in sizes)
    peak = _slash_peak(max(sizes, key=lambda size: size.run), length)
    waves = slash_waves(layout.frequencies, length, width, peak) if width else (empty, empty)
    return _Group(
        tuple(_draw_head(n, size, columns, cluster_M, clusters, length, tile, random) for n, size in enumerate(sizes)),
        tuple(sizes),
        peak,
        peak + _column_lead(width, length),
        *waves,
        tile_codes(clusters, layout.tile_code, random) if clusters else empty,
        cluster_M,
    )


def _slash_peak(size: HeadSizes, length: int) -> float:
    """The logit with which the runs outweigh all other keys."""
    return math.log(length / max(1, planted_diagonals(size))) + _MARGIN


def _column_lead(width: int, length: int) -> float:
    """How much a column's logit is above a diagonal's: or columns drown among the keys that wide runs cross."""
    return min(1.0, max(0.0, 1 + math.log(max(1, width) / last_q_for(length))))


def _draw_head(
    number: int,
    size: HeadSizes,
    columns: dict[int, torch.Tensor],
    cluster_M: torch.Tensor,
    clusters: int,
    length: int,
    tile: TileShape,
    random: torch.Generator,
) -> HeadTruth:
    none = torch.empty(0, dtype=torch.int64)
    looks_at_TZ = none.reshape(0, 0)
    if size.clusters:
        rows, chosen = -(-length // tile.query), max(1, round(clusters / size.clusters))
        looks_at_TZ = torch.rand(rows, clusters, generator=random).topk(chosen, dim=1).indices
    return HeadTruth(
        size.family,
        size.window,
        _draw_runs(size, length, random),
        columns[number % len(columns)] if size.columns else none,
        cluster_M if size.clusters else none,
        looks_at_TZ,
    )


def _draw_runs(size: HeadSizes, length: int, random: torch.Generator) -> tuple[tuple[int, int], ...]:
    if not size.run:
        return ()
    half = size.run // 2
    middles = []
    for place in size.runs:
        moved = place + _RUN_JITTER * (2 * float(torch.rand(1, generator=random)) - 1)
        middles.append(max(size.run, round(moved * length)))
    return tuple((middle - half, middle - half + size.run) for middle in middles)


def _draw_columns(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Beyond the sinks, and early enough that some rows see them."""
    drawn = torch.randperm(length - length // 16 - SINK, generator=random)[:count]
    return drawn.add_(SINK).sort().values


def _deal(clusters: int, tiles: int, random: torch.Generator) -> torch.Tensor:
    """A cluster for each key tile, each once among as many neighbours as there are clusters: [M]."""
    rounds = -(-tiles // clusters)
    return torch.rand(rounds, clusters, generator=random).argsort(dim=1).flatten()[:tiles]


# --- how it gets into queries and keys --------------------------------------------------------------------------------


def _fill(
    drawn: _Group,
    q_NSD: torch.Tensor,
    k_SD: torch.Tensor,
    tile: TileShape,
    layout: Layout,
    noise: torch.Generator,
) -> None:
    for start in range(0, k_SD.shape[0], BLOCK_ROWS):
        position_J = torch.arange(start, min(start + BLOCK_ROWS, k_SD.shape[0]), device=k_SD.device)
        k_SD[start : start + BLOCK_ROWS] = _keys(drawn, position_J, k_SD.shape[1], tile, layout, noise)
        for n in range(len(drawn.heads)):
            q_NSD[n, start : start + BLOCK_ROWS] = _queries(drawn, n, position_J, k_SD, tile, layout, noise)


def _base(position_J: torch.Tensor, head_dim: int, layout: Layout, noise: torch.Generator) -> torch.Tensor:
    """Random numbers in the base, zeros elsewhere."""
    x_JD = torch.zeros(len(position_J), head_dim, device=position_J.device)
    width = layout.base.stop - layout.base.start
    size = math.sqrt(_BASE_SPREAD * math.sqrt(head_dim / width))
    x_JD[:, layout.base].normal_(std=size, generator=noise)
    return x_JD


def _keys(
    drawn: _Group, position_J: torch.Tensor, head_dim: int, tile: TileShape, layout: Layout, noise: torch.Generator
) -> torch.Tensor:
    k_JD = _base(position_J, head_dim, layout, noise)
    k_JD[:, layout.sink] = (position_J < SINK).float()[:, None]
    for n in range(layout.column_codes):
        own = next((truth.columns_C for truth in drawn.heads[n :: layout.column_codes] if len(truth.columns_C)), None)
        if own is not None:
            k_JD[:, layout.columns.start + n] = torch.isin(position_J, own.to(position_J.device)).float()
    if layout.place.stop > layout.place.start:
        k_JD[:, layout.place] = place_code(position_J, drawn.lifetime)
    if len(drawn.codes_MX):
        codes_MX, cluster_M = (x.to(position_J.device) for x in (drawn.codes_MX, drawn.cluster_M))
        k_JD[:, layout.tiles] = codes_MX[cluster_M[position_J // tile.key]]
    if len(drawn.frequencies_F):
        # Not where a column is: a key in both would outweigh all others.
        alone_J1 = (k_JD[:, layout.sink.start : layout.columns.stop].amax(1, keepdim=True) == 0).float()
        k_JD[:, layout.slashes] = slash_code(position_J, drawn.frequencies_F) * alone_J1
    return k_JD


def _queries(
    drawn: _Group,
    number: int,
    position_J: torch.Tensor,
    k_SD: torch.Tensor,
    tile: TileShape,
    layout: Layout,
    noise: torch.Generator,
) -> torch.Tensor:
    """Logits are written in units of 1 / scale; the base makes its own."""
    length, head_dim = k_SD.shape
    truth, size = drawn.heads[number], drawn.sizes[number]
    q_JD = torch.zeros(len(position_J), head_dim, device=position_J.device)
    if truth.runs:
        mass = math.log(planted_diagonals(size) * math.exp(drawn.peak) + size.columns * math.exp(drawn.column_peak))
        q_JD[:, layout.columns.start + number % layout.column_codes] = drawn.column_peak
        q_JD[:, layout.slashes] = _slash_query(drawn, truth, position_J)
    elif truth.window:
        q_JD[:, layout.place] = torch.tensor(place_query(), device=position_J.device)
        mass = math.log(drawn.lifetime) + position_J / drawn.lifetime
    else:
        codes_MX, looks_at_TZ = (x.to(position_J.device) for x in (drawn.codes_MX, truth.looks_at_TZ))
        peak = _hot_peak(size)
        q_JD[:, layout.tiles] = peak * codes_MX[looks_at_TZ[position_J // tile.query]].sum(1)
        mass = peak + math.log(length / size.clusters)
    q_JD[:, layout.sink.start] = mass + math.log(_SINK_SHARE / SINK)
    return q_JD * math.sqrt(head_dim) + _base(position_J, head_dim, layout, noise)


def _hot_peak(size: HeadSizes) -> float:
    return math.log(size.clusters) + _HOT_LEAD


def _slash_query(drawn: _Group, truth: HeadTruth, position_J: torch.Tensor) -> torch.Tensor:
    """The codes of the tokens that the runs' middles point back at: float32 [J, 2 F]."""
    weights_2F = drawn.peak * drawn.weights_F.repeat(2).float().to(position_J.device)
    codes_J2F = torch.zeros(len(position_J), len(weights_2F), device=position_J.device)
    for first, stop in truth.runs:
        codes_J2F += slash_code(position_J - (first + stop) // 2, drawn.frequencies_F)
    return codes_J2F * weights_2F
