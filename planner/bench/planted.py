"""Queries, keys and values whose attention goes where it was planted: what kernels and index builders are timed on.

Random queries and keys attend everywhere, so an index over them is as wrong as any other and slashes are scattered.
Here every head has the structure of its family (sinks, a local band, runs of diagonals, scattered columns, hot tiles;
see codes.py), sized for a stated density, and what was planted is returned beside the tensors.

Deterministic by seed: the structure is the same on every device. Memory is linear in the length. Tensors lie token by
token, as models make them.

Shapes: H query heads, G KV heads, N query heads of a KV head, S tokens, D head size, M clusters or key tiles, T row
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
)
from sparsekv.planner.bench.sizes import SINK, BenchFamily, HeadSizes, pattern_for, planted_diagonals, sizes_for
from sparsekv.planner.bench.structure import Group, HeadTruth, draw_group
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Pattern, TileShape

_FEWEST_TILES = 8
BLOCK_ROWS = 1 << 14  # of temporaries
_BASE_SPREAD = 0.4  # standard deviation of the logits of what was not planted
_SINK_SHARE = 0.25  # of the sinks' mass over that of the rest
_HOT_LEAD = 5.0  # log of the hot tiles' mass over that of the others


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
        return 1 / math.sqrt(self.q_BHSD.shape[-1])


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
    groups = [draw_group(sizes[g * group : (g + 1) * group], length, tile, layout, random) for g in range(kv_heads)]
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


def _fill(
    drawn: Group,
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
    width = layout["base"].stop - layout["base"].start
    size = math.sqrt(_BASE_SPREAD * math.sqrt(head_dim / width))
    x_JD[:, layout["base"]].normal_(std=size, generator=noise)
    return x_JD


def _keys(
    drawn: Group, position_J: torch.Tensor, head_dim: int, tile: TileShape, layout: Layout, noise: torch.Generator
) -> torch.Tensor:
    k_JD = _base(position_J, head_dim, layout, noise)
    k_JD[:, layout["sink"]] = (position_J < SINK).float()[:, None]
    for n in range(layout.column_codes):
        own = next((truth.columns_C for truth in drawn.heads[n :: layout.column_codes] if len(truth.columns_C)), None)
        if own is not None:
            k_JD[:, layout["columns"].start + n] = torch.isin(position_J, own.to(position_J.device)).float()
    if layout["place"].stop > layout["place"].start:
        k_JD[:, layout["place"]] = place_code(position_J, drawn.lifetime)
    if len(drawn.codes_MX):
        codes_MX, cluster_M = (x.to(position_J.device) for x in (drawn.codes_MX, drawn.cluster_M))
        k_JD[:, layout["tiles"]] = codes_MX[cluster_M[position_J // tile.key]]
    if len(drawn.frequencies_F):
        # Not where a column is: a key in both would outweigh all others.
        alone_J1 = (k_JD[:, layout["sink"].start : layout["columns"].stop].amax(1, keepdim=True) == 0).float()
        k_JD[:, layout["slashes"]] = slash_code(position_J, drawn.frequencies_F) * alone_J1
    return k_JD


def _queries(
    drawn: Group,
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
    mass: float | torch.Tensor  # log of it, of what the query sees beside the sinks
    if truth.runs:
        mass = math.log(planted_diagonals(size) * math.exp(drawn.peak) + size.columns * math.exp(drawn.column_peak))
        q_JD[:, layout["columns"].start + number % layout.column_codes] = drawn.column_peak
        q_JD[:, layout["slashes"]] = _slash_query(drawn, truth, position_J)
    elif truth.window:
        q_JD[:, layout["place"]] = torch.tensor(place_query(), device=position_J.device)
        mass = math.log(drawn.lifetime) + position_J / drawn.lifetime
    else:
        codes_MX, looks_at_TZ = (x.to(position_J.device) for x in (drawn.codes_MX, truth.looks_at_TZ))
        peak = _hot_peak(size)
        q_JD[:, layout["tiles"]] = peak * codes_MX[looks_at_TZ[position_J // tile.query]].sum(1)
        mass = peak + math.log(length / size.clusters)
    q_JD[:, layout["sink"].start] = mass + math.log(_SINK_SHARE / SINK)
    return q_JD * math.sqrt(head_dim) + _base(position_J, head_dim, layout, noise)


def _hot_peak(size: HeadSizes) -> float:
    return math.log(size.clusters) + _HOT_LEAD


def _slash_query(drawn: Group, truth: HeadTruth, position_J: torch.Tensor) -> torch.Tensor:
    """The codes of the tokens that the runs' middles point back at: float32 [J, 2 F]."""
    weights_2F = drawn.peak * drawn.weights_F.repeat(2).float().to(position_J.device)
    codes_J2F = torch.zeros(len(position_J), len(weights_2F), device=position_J.device)
    for first, stop in truth.runs:
        codes_J2F += slash_code(position_J - (first + stop) // 2, drawn.frequencies_F)
    return codes_J2F * weights_2F
