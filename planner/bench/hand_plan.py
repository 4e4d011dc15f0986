"""A plan made by hand at stated densities, to time a model that has none: nothing here says what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.planner.bench.sizes import BenchFamily, diffuse_pattern
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan


def hand_plan(
    info: ModelInfo,
    lengths: Sequence[int],
    densities: Sequence[float],
    tile: TileShape,
    families: Sequence[BenchFamily] = ("vertical_slash", "a_shape"),
) -> Plan:
    """A bucket for each length, families dealt out to the heads of every full-attention layer in turn.

    Budgets are such that they come to the density where attention is diffuse, as it is with random weights: the
    diagonals of vertical_slash heads are then scattered, and `max_tiles` is what binds.

    Args:
        lengths: ascending.
        densities: one for all lengths, or one for each.

    Raises:
        UsageError: lengths and densities do not pair up, or a family has no fixed density.
    """
    if len(densities) not in (1, len(lengths)):
        raise UsageError(f"expected one density, or one for each of the {len(lengths)} lengths, found {len(densities)}")
    shares = tuple(densities) * len(lengths) if len(densities) == 1 else densities
    last = len(lengths) - 1
    buckets = tuple(
        PrefillBucket(
            up_to=None if place == last else length,
            heads=tuple(
                group
                for layers in info.attention
                if layers.kind == "full"
                for group in _groups(layers, length, share, tile, families)
            ),
        )
        for place, (length, share) in enumerate(zip(lengths, shares, strict=True))
    )
    return Plan(status="unverified", model=info, prefill=PrefillPlan(tile=tile, lengths=buckets))


def in_words(families: Sequence[BenchFamily], densities: Sequence[float], tile: TileShape) -> str:
    """What the plan is, for those who read the numbers."""
    shares = ", ".join(f"{share:g}" for share in densities)
    return f"made by hand: {' and '.join(families)} in turn, sized for a density of {shares}, {tile.key} tiles"


def _groups(
    layers: AttentionGroup, length: int, density: float, tile: TileShape, families: Sequence[BenchFamily]
) -> list[HeadGroup]:
    patterns = [diffuse_pattern(family, length, density, tile) for family in families]
    return [
        HeadGroup(layer=layer, heads=tuple(range(number, layers.heads, len(patterns))), pattern=pattern)
        for layer in layers.layers
        for number, pattern in enumerate(patterns)
        if number < layers.heads
    ]
