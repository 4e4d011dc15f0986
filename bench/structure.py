"""Defines what is planted in a layer: how much of each structure comes to a stated density, and the directions that
show it.

Structure is drawn on the host: it is small, and the same whatever the device.

A head of N key tiles computes (N + 1) / 2 tiles a row on average when it is dense. Every pattern computes the first
tile, the diagonal one and the one before it, so that short prompts cannot be sparse: the bench prints what they come
to.

Each structure has dimensions of its own, so that the query heads of a group, which share their keys, can each look
elsewhere: a head that leaves a dimension at 0 does not see what the keys hold there.

    sink      1 dimension: the first tokens.
    columns   one a query head of the group (as far as there is room): the keys of its columns.
    position  2: the token's number in lifetimes of the local window, split so that bfloat16 holds it exactly enough. A
              query of 1 there weighs keys by exp(-distance / lifetime).
    slashes   pairs (cos, sin) of w_f * j: a query with the codes of i - o sees sum_f cos(w_f (i - j - o)), a lobe
              around diagonal o: positions as rotary embeddings write them.
    tiles     a code for each cluster of key tiles.
    base      random.

Symbols: N key tiles of the prompt, K tiles of a full row, B average tiles of a row.
Shapes: G KV heads, F frequencies, J token positions, C columns, M clusters or key tiles, T row tiles, Z clusters a row
tile looks at, X dimensions of a tile code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import AShape, BlockSparse, Pattern, TileShape, VerticalSlash, last_q_for, tokens

FAMILIES = ("vertical_slash", "a_shape", "block_sparse")

SINK = 4  # tokens that every head looks at
_MANDATORY = 3  # tiles of a row
_COLUMN_SHARE = 0.2  # of the computed tiles of a vertical-slash head
# Diagonals of the middles of bands, as shares of the prompt; heads move them a little.
_TWO_BANDS = (0.15, 0.45)
_ONE_BAND = (0.1, 0.7)  # at least and at most: the farther back, the fewer rows see it
_ROOM = 1.15  # of `max_tiles` over the fullest row that is planted

SMALLEST_HEAD = 32
_WIDTH = 0.45  # lobes narrower than so many shortest waves do not die out beside their middle
_POSITION_UNIT = 16  # whole numbers up to 256 are exact in bfloat16: of such units, and of what is left
_POSITION_QUERY = (float(_POSITION_UNIT), 1.0)  # times 1 / scale: weighs keys by one factor e a lifetime
_BASE_SPREAD = 0.4  # standard deviation of the logits of what was not planted
_SINK_SHARE = 0.25  # of the sinks' mass over that of the rest
_HOT_LEAD = 5.0  # log of the hot tiles' mass over that of the others
_MARGIN = 3.0  # log of the planted diagonals' mass over that of all other keys
_BAND_JITTER = 0.04  # of the prompt, by which heads differ
_LIFETIMES = 4  # of a window: what lies beyond it holds exp(-4) of the mass


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """One head of a family at a density. What a family does not have is 0 or empty."""

    family: str
    window: int = 0  # tokens of the local window
    band: int = 0  # diagonals in a band
    bands: tuple[float, ...] = ()  # the diagonal in the middle of each, as a share of the prompt
    columns: int = 0
    clusters: int = 0  # one key tile in so many is hot for a row tile

    @property
    def diagonals(self) -> int:
        return self.band * len(self.bands)

    def row_tiles(self, length: int, tile: TileShape) -> float:
        """Most tiles of a row, the mandatory ones included."""
        hot = tile.key_tiles(length) / self.clusters + 1 if self.clusters else 0
        return len(self.bands) * _band_tiles(self.band, tile) + hot + _MANDATORY


def sizes_for(family: str, length: int, density: float, tile: TileShape, narrowest: int = 1) -> HeadSizes:
    """Returns what to plant in a head so that the pattern of `pattern_for` computes about `density` of the tiles.

    Args:
        density: computed tiles over causal tiles.
        narrowest: diagonals of the narrowest band that can be planted.
    """
    row_tiles = row_tiles_at(density, length, tile)
    match family:
        case "vertical_slash":
            return _lines(family, length, density, tile, narrowest)
        case "a_shape":
            return HeadSizes(family, window=(row_tiles - 2) * tile.key)
        case _:
            hot = max(1, row_tiles - _MANDATORY)
            return HeadSizes(family, clusters=max(2, math.ceil(tile.key_tiles(length) / hot)))


def pattern_for(sizes: HeadSizes, length: int, density: float, tile: TileShape) -> Pattern:
    """The pattern with budgets for what was planted."""
    if sizes.family != "vertical_slash":
        return diffuse_pattern(sizes.family, length, density, tile)
    sampled = last_q_for(length)
    return VerticalSlash(
        vertical=tokens(sizes.columns + SINK),
        slash=tokens(sizes.diagonals + SINK + sampled),  # each sampled query sees the sinks on a diagonal of its own
        last_q=sampled,
        max_tiles=tokens(math.ceil(_ROOM * sizes.row_tiles(length, tile)) * tile.key),
    )


def row_tiles_at(density: float, length: int, tile: TileShape) -> int:
    """K such that rows of at most K tiles compute that share of the causal tiles: early rows have fewer."""
    tiles = tile.key_tiles(length)
    return min(tiles, max(tile.mandatory, round(tiles * (1 - math.sqrt(1 - density)))))


def diffuse_pattern(family: str, length: int, density: float, tile: TileShape) -> Pattern:
    """A pattern of that density where attention is diffuse."""
    row_tiles = row_tiles_at(density, length, tile)
    match family:
        case "a_shape":  # the first key tile, and a window that fills the row
            return AShape(sink=tokens(4), window=tokens((row_tiles - 2) * tile.key + 1))
        case "block_sparse":
            return BlockSparse(keep=tokens(max(tile.mandatory + 1, row_tiles) * tile.key))
        case "vertical_slash":  # diagonals are scattered there, so that `max_tiles` binds
            # A row sees the lines that begin before it: beside the tiles that all rows have, late rows compute more.
            seen_last = max(2.0, density * tile.key_tiles(length) - 2 * tile.mandatory)
            columns = min(length // 4, round(_COLUMN_SHARE * seen_last * tile.key / (1.01 - density)))  # some in tiles
            bound = tokens(math.ceil((1 - _COLUMN_SHARE) * seen_last + tile.mandatory) * tile.key)
            return VerticalSlash(vertical=tokens(columns), slash=bound, last_q=last_q_for(length), max_tiles=bound)
    raise UsageError(f"expected patterns whose budgets fix their density ({', '.join(FAMILIES)}), found {family!r:.40}")


def _lines(family: str, length: int, density: float, tile: TileShape, narrowest: int) -> HeadSizes:
    """Solves B = 3 + columns + (tiles of a band) * (rows that see it): for two bands' width, or one's position."""
    average = density * (tile.key_tiles(length) + 1) / 2
    left = (1 - _COLUMN_SHARE) * average - _MANDATORY
    columns = max(4, min(round(2 * _COLUMN_SHARE * average * tile.key), length // 16))
    width = round((left / sum(1 - middle for middle in _TWO_BANDS) - 2) * tile.key)
    if width >= narrowest:
        return HeadSizes(family, band=width, bands=_TWO_BANDS, columns=columns)
    middle = 1 - left / _band_tiles(narrowest, tile)
    least, most = _ONE_BAND
    if middle < least:
        return HeadSizes(family, band=round((left / (1 - least) - 2) * tile.key), bands=(least,), columns=columns)
    return HeadSizes(family, band=narrowest, bands=(min(middle, most),), columns=columns)


def _band_tiles(width: int, tile: TileShape) -> float:
    """Tiles of a row that a band of diagonals crosses."""
    return width / tile.key + 2


class Layout(NamedTuple):
    """Says which dimensions serve what. Slices of structures that no head has are empty."""

    sink: slice
    columns: slice  # as wide as heads of a group can have columns of their own
    position: slice
    tiles: slice
    slashes: slice
    base: slice

    @property
    def frequencies(self) -> int:
        """F."""
        return _width(self.slashes) // 2


def _width(dimensions: slice) -> int:
    return int(dimensions.stop - dimensions.start)


def layout_for(families: Collection[str], head_dim: int, group: int) -> Layout:
    """Gives slashes, which need the most, what the others leave. `head_dim` is at least SMALLEST_HEAD."""
    slashes, tiles = "vertical_slash" in families, "block_sparse" in families
    columns = min(group, head_dim // 8) if slashes else 0
    position = 2 if "a_shape" in families else 0
    left = head_dim - 1 - columns - position - head_dim // 8  # the last for the base
    code = 0 if not tiles else left // 5 if slashes else left // 2
    pairs = (left - code) // 2 if slashes else 0
    cuts = [0, *accumulate((1, columns, position, code, 2 * pairs)), head_dim]
    return Layout(*(slice(start, stop) for start, stop in pairwise(cuts)))


def narrowest_band(frequencies: int, length: int) -> int:
    """The fewest tokens that a lobe of so many waves can be wide, for logits of 7 or so in its middle."""
    return math.ceil(_WIDTH * length / max(1, frequencies))


@dataclass(frozen=True, slots=True)
class HeadTruth:
    """Holds what was planted for one query head, on the host. What its family does not have is empty."""

    sizes: HeadSizes
    bands: tuple[tuple[int, int], ...]  # diagonals [first, stop)
    columns_C: torch.Tensor  # int64, ascending
    cluster_M: torch.Tensor  # int64: of each key tile
    looks_at_TZ: torch.Tensor  # int64: clusters whose key tiles are hot for a row tile


@dataclass(frozen=True, slots=True)
class Group:
    """The heads that share a KV head: their structure, and the keys and queries that make attention go there."""

    length: int
    tile: TileShape
    layout: Layout
    heads: tuple[HeadTruth, ...]
    peak: float  # logit of a diagonal in the middle of its band
    column_peak: float  # logit of a column
    frequencies_F: torch.Tensor  # empty without vertical-slash heads
    weights_F: torch.Tensor
    codes_MX: torch.Tensor  # by cluster; empty without tile heads
    cluster_M: torch.Tensor

    @property
    def lifetime(self) -> float:
        """Tokens over which attention to a window fades by a factor e."""
        return max([truth.sizes.window for truth in self.heads] + [1]) / _LIFETIMES

    def keys(self, position_J: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Returns the keys of the KV head at these positions: float32 [J, D]."""
        layout, device = self.layout, position_J.device
        k_JD = self._base(position_J, noise)
        k_JD[:, layout.sink] = (position_J < SINK).float()[:, None]
        codes = _width(layout.columns)
        for n in range(codes):
            for own_C in [truth.columns_C for truth in self.heads[n::codes] if len(truth.columns_C)][:1]:
                k_JD[:, layout.columns.start + n] = torch.isin(position_J, own_C.to(device)).float()
        if _width(layout.position):
            k_JD[:, layout.position] = _position_code(position_J, self.lifetime)
        if len(self.codes_MX):
            k_JD[:, layout.tiles] = self.codes_MX.to(device)[self.cluster_M.to(device)[position_J // self.tile.key]]
        if len(self.frequencies_F):
            # Not where a column is: a key in both would outweigh all others.
            alone_J1 = (k_JD[:, layout.sink.start : layout.columns.stop].amax(1, keepdim=True) == 0).float()
            k_JD[:, layout.slashes] = _slash_code(position_J, self.frequencies_F) * alone_J1
        return k_JD

    def queries(self, number: int, position_J: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Returns the queries of a head at these positions: float32 [J, D]. Logits are in units of 1 / scale; the base
        makes its own."""
        layout, truth, sizes = self.layout, self.heads[number], self.heads[number].sizes
        head_dim = layout.base.stop
        q_JD = torch.zeros(len(position_J), head_dim, device=position_J.device)
        mass: float | torch.Tensor  # log of it, of what the query sees beside the sinks
        if truth.bands:
            mass = math.log(sizes.diagonals * math.exp(self.peak) + sizes.columns * math.exp(self.column_peak))
            q_JD[:, layout.columns.start + number % _width(layout.columns)] = self.column_peak
            weights_2F = self.peak * self.weights_F.repeat(2).float().to(position_J.device)
            # The codes of the tokens that the bands' middles point back at.
            middles = [position_J - (first + stop) // 2 for first, stop in truth.bands]
            q_JD[:, layout.slashes] = sum(_slash_code(at_J, self.frequencies_F) for at_J in middles) * weights_2F
        elif sizes.window:
            q_JD[:, layout.position] = torch.tensor(_POSITION_QUERY, device=position_J.device)
            mass = math.log(self.lifetime) + position_J / self.lifetime
        else:
            codes_MX, looks_at_TZ = (x.to(position_J.device) for x in (self.codes_MX, truth.looks_at_TZ))
            peak = math.log(sizes.clusters) + _HOT_LEAD
            q_JD[:, layout.tiles] = peak * codes_MX[looks_at_TZ[position_J // self.tile.query]].sum(1)
            mass = peak + math.log(self.length / sizes.clusters)
        q_JD[:, layout.sink.start] = mass + math.log(_SINK_SHARE / SINK)
        return q_JD * math.sqrt(head_dim) + self._base(position_J, noise)

    def _base(self, position_J: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Random numbers in the base, zeros elsewhere."""
        base = self.layout.base
        x_JD = torch.zeros(len(position_J), base.stop, device=position_J.device)
        x_JD[:, base].normal_(std=math.sqrt(_BASE_SPREAD * math.sqrt(base.stop / _width(base))), generator=noise)
        return x_JD


def draw_group(
    sizes: Sequence[HeadSizes], length: int, tile: TileShape, layout: Layout, random: torch.Generator
) -> Group:
    """The structure of a group's heads.

    Args:
        sizes: of each head; those of one family are alike.
        random: on the host.
    """
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    clusters, count = max(size.clusters for size in sizes), max(size.columns for size in sizes)
    cluster_M = _deal(clusters, -(-length // tile.key), random) if clusters else none
    columns = [_draw_columns(count, length, random) for _ in range(_width(layout.columns))] if count else []
    heads = []
    for number, size in enumerate(sizes):
        looks_at_TZ = none.reshape(0, 0)
        if size.clusters:
            rows, chosen = -(-length // tile.query), max(1, round(clusters / size.clusters))
            looks_at_TZ = torch.rand(rows, clusters, generator=random).topk(chosen, dim=1).indices
        bands = tuple(_draw_band(middle, size.band, length, random) for middle in size.bands)
        own_C = columns[number % len(columns)] if size.columns else none
        heads.append(HeadTruth(size, bands, own_C, cluster_M if size.clusters else none, looks_at_TZ))
    widest = max(sizes, key=lambda size: size.band)
    peak = math.log(length / max(1, widest.diagonals)) + _MARGIN  # with which the bands outweigh all other keys
    # Columns drown among the keys that wide bands cross, unless their logit is above a diagonal's.
    lead = min(1.0, max(0.0, 1 + math.log(max(1, widest.band) / last_q_for(length))))
    waves = _slash_waves(layout.frequencies, length, widest.band, peak) if widest.band else (empty, empty)
    codes_MX = _tile_codes(clusters, _width(layout.tiles), random) if clusters else empty
    return Group(length, tile, layout, tuple(heads), peak, peak + lead, *waves, codes_MX, cluster_M)


def _draw_band(middle: float, width: int, length: int, random: torch.Generator) -> tuple[int, int]:
    """Near a share of the prompt: heads differ a little."""
    moved = middle + _BAND_JITTER * (2 * float(torch.rand(1, generator=random)) - 1)
    first = max(width, round(moved * length)) - width // 2
    return first, first + width


def _draw_columns(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Beyond the sinks, and early enough that some rows see them."""
    drawn = torch.randperm(length - length // 16 - SINK, generator=random)[:count]
    return drawn.add_(SINK).sort().values


def _deal(clusters: int, tiles: int, random: torch.Generator) -> torch.Tensor:
    """A cluster for each key tile, each once among as many neighbours as there are clusters: [M]."""
    rounds = -(-tiles // clusters)
    return torch.rand(rounds, clusters, generator=random).argsort(dim=1).flatten()[:tiles]


def _slash_waves(count: int, length: int, width: int, peak: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies and their weights, which make one lobe of height 1 in a prompt and next to nothing elsewhere.

    Whole waves on the prompt, as in a Fourier series, with the weights of a normal curve: the lobe is one too. Of
    logits that are `peak` high in its middle, it has lost 1 at half of `width` tokens from there; `width` is at least
    `narrowest_band`.
    """
    wave_F = torch.arange(count, dtype=torch.float64)
    spread = length * math.sqrt(-2 * math.log1p(-1 / peak)) / (math.pi * width)
    weight_F = torch.exp(-0.5 * (wave_F / spread).square())
    weight_F[0] /= 2
    return 2 * math.pi / length * wave_F, weight_F / weight_F.sum()


def _slash_code(position_J: torch.Tensor, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines: float32 [J, 2 F]. Angles are float64, as float32 loses them beyond a million tokens."""
    angle_JF = position_J.double()[:, None] * frequencies_F.to(position_J.device)
    return torch.cat([angle_JF.cos(), angle_JF.sin()], dim=1).float()


def _position_code(position_J: torch.Tensor, lifetime: float) -> torch.Tensor:
    """The position in lifetimes, in units of 16 and what is left: float32 [J, 2]."""
    lifetimes_J = position_J.double() / lifetime
    units_J = (lifetimes_J / _POSITION_UNIT).round()
    return torch.stack([units_J, lifetimes_J - _POSITION_UNIT * units_J], dim=1).float()


def _tile_codes(clusters: int, width: int, random: torch.Generator) -> torch.Tensor:
    """One unit vector a cluster: exact where there is room, else random: float32 [M, X]."""
    if clusters <= width:
        return torch.eye(clusters, width)
    return torch.nn.functional.normalize(torch.randn(clusters, width, generator=random), dim=1)
