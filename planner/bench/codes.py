"""Feature directions of queries and keys that make attention go to chosen places, whatever the rest of them holds.

Each structure has dimensions of its own, so that the query heads of a group, which share their keys, can each look
elsewhere: a head that leaves a dimension at 0 does not see what the keys hold there.

    sink      1 dimension: the first tokens.
    columns   one a query head of the group (as far as there is room): the keys of its columns.
    place     2: the token's number in lifetimes of the local band, split so that bfloat16 holds it exactly enough. A
              query of 1 there weighs keys by exp(-distance / lifetime).
    slashes   pairs (cos, sin) of w_f * j: a query with the codes of i - o sees sum_f cos(w_f (i - j - o)), a lobe
              around diagonal o: positions as rotary embeddings write them.
    tiles     a code for each cluster of key tiles.
    base      random.

Shapes: G KV heads, F frequencies, J token positions, M clusters, X dimensions of a code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparsekv.planner.bench.sizes import BenchFamily

SMALLEST_HEAD = 32
_WIDTH = 0.45  # lobes narrower than so many shortest waves do not die out beside their middle
_PLACE_UNIT = 16  # whole numbers up to 256 are exact in bfloat16: of such units, and of what is left


@dataclass(frozen=True, slots=True)
class Layout:
    """Which dimensions serve what. Slices of structures that no head has are empty."""

    parts: Mapping[str, slice]
    column_codes: int  # how many heads of a group can have columns of their own
    tile_code: int  # X
    frequencies: int  # F

    def __getitem__(self, structure: str) -> slice:
        return self.parts[structure]


def layout_for(families: Collection[BenchFamily], head_dim: int, group: int) -> Layout:
    """Gives slashes, which need the most, what the others leave. `head_dim` is at least SMALLEST_HEAD."""
    slashes, tiles = "vertical_slash" in families, bool({"block_sparse", "adaptive"} & set(families))
    columns = min(group, head_dim // 8) if slashes else 0
    place = 2 if "a_shape" in families else 0
    left = head_dim - 1 - columns - place - head_dim // 8  # the last for the base
    code = 0 if not tiles else left // 5 if slashes else left // 2
    pairs = (left - code) // 2 if slashes else 0
    cuts = [0, *accumulate((1, columns, place, code, 2 * pairs)), head_dim]
    names = ("sink", "columns", "place", "tiles", "slashes", "base")
    parts = {name: slice(start, stop) for name, (start, stop) in zip(names, pairwise(cuts), strict=True)}
    return Layout(parts, columns, code, pairs)


def slash_waves(count: int, length: int, width: int, peak: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies and their weights, which make one lobe of height 1 in a prompt and next to nothing elsewhere.

    Whole waves on the prompt, as in a Fourier series, with the weights of a normal curve: the lobe is one too. Of
    logits that are `peak` high in its middle, it has lost 1 at half of `width` tokens from there.

    Args:
        count: F; the width is at least `narrowest_run`.
    """
    wave_F = torch.arange(count, dtype=torch.float64)
    spread = length * math.sqrt(-2 * math.log1p(-1 / peak)) / (math.pi * width)
    weight_F = torch.exp(-0.5 * (wave_F / spread).square())
    weight_F[0] /= 2
    return 2 * math.pi / length * wave_F, weight_F / weight_F.sum()


def narrowest_run(frequencies: int, length: int) -> int:
    """The fewest tokens that a lobe of so many waves can be wide, for logits of 7 or so in its middle."""
    return math.ceil(_WIDTH * length / max(1, frequencies))


def slash_code(position_J: torch.Tensor, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines: float32 [J, 2 F]. Angles are float64, as float32 loses them beyond a million tokens."""
    angle_JF = position_J.double()[:, None] * frequencies_F.to(position_J.device)
    return torch.cat([angle_JF.cos(), angle_JF.sin()], dim=1).float()


def place_code(position_J: torch.Tensor, lifetime: float) -> torch.Tensor:
    """The position in lifetimes, in units of 16 and what is left: float32 [J, 2]."""
    place_J = position_J.double() / lifetime
    units_J = (place_J / _PLACE_UNIT).round()
    return torch.stack([units_J, place_J - _PLACE_UNIT * units_J], dim=1).float()


def place_query() -> tuple[float, float]:
    """What a query holds there, times 1 / scale, to weigh keys by one factor e a lifetime."""
    return float(_PLACE_UNIT), 1.0


def tile_codes(clusters: int, width: int, random: torch.Generator) -> torch.Tensor:
    """One unit vector a cluster: exact where there is room, else random: float32 [M, X]."""
    if clusters <= width:
        return torch.eye(clusters, width)
    return torch.nn.functional.normalize(torch.randn(clusters, width, generator=random), dim=1)
