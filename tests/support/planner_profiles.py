"""Made-up profiles: any damages and costs, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsekv.planner.options import PRESET_FAMILIES, PlanOptions, Settled
from sparsekv.planner.profile.profile_data import Candidate, LayerScores, LengthProfile, Profile, Reuse
from sparsekv.plans.model import AttentionGroup, Fingerprint, ModelInfo
from sparsekv.plans.patterns import AShape, BlockSparse, Pattern, TileShape, VerticalSlash, fraction, tokens

DIGEST = "sha256:" + "0" * 64
RAYS = (("a_shape", "a"), ("vertical_slash", "v1"), ("vertical_slash", "v2"), ("block_sparse", "b"))
SINK, RECENT = 4, 128
BUDGETS = (fraction(0.05), fraction(0.1), fraction(0.2))


def made_up_model(layers: int = 3, heads: int = 4, context: int = 65536) -> ModelInfo:
    group = AttentionGroup(layers=tuple(range(layers)), kind="full", heads=heads, kv_heads=2, head_dim=32)
    prints = Fingerprint(architecture=DIGEST, weights=DIGEST)
    return ModelInfo(id="made/up", model_type="llama", context_length=context, attention=(group,), fingerprint=prints)


def pattern_of(ray: int, level: int) -> Pattern:
    """Another one for each ray and level."""
    size = tokens(1000 * ray + 100 * level + 64)
    if ray == 0:
        return AShape(sink=tokens(64), window=size)
    if ray == 3:
        return BlockSparse(keep=size)
    return VerticalSlash(vertical=size, slash=tokens(level + 1), max_tiles=tokens(4096))


def made_up_length(
    length: int,
    rng: np.random.Generator,
    *,
    layers: int = 3,
    heads: int = 4,
    levels: tuple[float, ...] = (0.2, 0.3, 0.4),
    drift: float = 0.0,
    turned: bool = False,
) -> LengthProfile:
    """Random damages that fall with density.

    Args:
        drift: how far densities may lie from their level.
        turned: whether slot n of head h holds candidate n + h; otherwise it holds candidate n for all heads.
    """
    keys = [(ray, level) for ray in range(len(RAYS)) for level in range(len(levels))]

    def table(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (len(keys), heads))

    slots = np.arange(len(keys))[:, None] + (np.arange(heads) if turned else np.zeros(heads, int))
    numbers = slots % len(keys)

    def one(layer: int) -> LayerScores:
        density = np.array([levels[level] for _, level in keys])[numbers] * (1.0 + table(-drift, drift))
        fall = np.array([1.0 / (1 + level) for _, level in keys])[numbers]
        share = np.array([0.1 if ray in (1, 2) else 0.0 for ray, _ in keys])[numbers]
        damage = table(0.01, 1.0) * fall
        return LayerScores(
            layer=layer,
            candidates=rows(numbers),
            patterns=rows(numbers),
            damage=rows(damage),
            worst=rows(damage * table(1.0, 2.0)),
            tiles=rows(density * (1 - share)),
            columns=rows(density * share),
        )

    return LengthProfile(
        length=length,
        prompt_tokens=(length,),
        candidates=tuple(
            Candidate(family=RAYS[ray][0], range=RAYS[ray][1], density=levels[level]) for ray, level in keys
        ),
        patterns=tuple(pattern_of(ray, level) for ray, level in keys),
        layers=tuple(one(layer) for layer in range(layers)),
    )


def options_for(**changes: Any) -> Settled:
    """Options as they are settled for a made-up profile: with all the families that it has, at 8192 tokens."""
    return as_settled(PlanOptions(**({"families": PRESET_FAMILIES, "lengths": (8192,)} | changes)))


def as_settled(options: PlanOptions) -> Settled:
    """Options for what needs no default filled in."""
    fields = {name: getattr(options, name) for name in PlanOptions.model_fields}
    return Settled.model_construct(**fields, samples_are_default=False)


def made_up_reuse(kept: np.ndarray, importance: tuple[float, ...] | None = None) -> Reuse:
    """The same table [layer j, filter i] for every budget but the first, which keeps half."""
    layers = len(kept)

    def triangle(scale: float) -> tuple:
        return tuple(tuple(float(kept[j, i]) * scale for i in range(j + 1)) for j in range(layers))

    return Reuse(
        sink=SINK,
        recent=RECENT,
        budgets=BUDGETS,
        importance=importance or (1.0,) * layers,
        kept=(triangle(0.5), triangle(1.0), triangle(1.0)),
    )


def made_up_profile(*lengths: LengthProfile, model: ModelInfo | None = None) -> Profile:
    return Profile(
        model=model or made_up_model(),
        device="made up",
        dtype="float32",
        backend="cpu",
        tile=TileShape(query=64, key=64),
        seed=0,
        samples=1,
        tasks=("kv_retrieval",),
        calibration=DIGEST,
        versions={"sparsekv": "0"},
        lengths=lengths,
    )


def rows(table: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())
