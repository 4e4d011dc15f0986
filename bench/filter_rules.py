"""Filter layers by the rules of others, from the similarities of a profile: they are segments, and run as plans.

Shapes: J layers that attend, I layers that choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sparsekv.kernels.methods import Method
from sparsekv.planner.decode_search import anchor_layers
from sparsekv.planner.filter_layers import Segments, segments_of
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.profile_data import LengthProfile, Profile, Reuse
from sparsekv.plans.patterns import Budget

_ANCHORS_A_LAYER = 5 / 32  # Kascade's choice for 32 layers
_FIRST_DENSE = 2
_LAYERS_A_FILTER = 32 / 3  # OmniKV's choice for 32 layers has three filters


class FilterRule(Method):
    """A rule by which layers choose for others."""

    waits: ClassVar[bool] = False  # the first layer after each filter stays dense

    def filters(self, kept_JI: Floats, importance: Sequence[float], full: Sequence[int]) -> Sequence[int]:
        """The layers that choose, of those with full attention.

        Args:
            kept_JI: share of layer j's attention mass that the choice of layer i holds.
        """
        raise NotImplementedError

    def segments(self, profile: Profile, entry: LengthProfile, budget: Budget) -> Segments:
        """Segments of one length; similarities are those of the largest profiled budget within this one, or the least.

        Args:
            entry: of the profile, with decode statistics.
        """
        reuse, full = entry.reuse, profile.model.full_layers
        assert reuse is not None
        kept_JI = _similarities(profile, reuse, budget, entry.length)
        segments = segments_of(self.filters(kept_JI, reuse.importance, full), full, reuse, budget, entry.length)
        return _after_wait(segments) if self.waits else segments


class OmniKV(FilterRule):
    """Its reading of inter-layer similarity, with its wait layer."""

    name, waits = "omnikv", True

    def filters(self, kept_JI: Floats, importance: Sequence[float], full: Sequence[int]) -> Sequence[int]:
        return similar_layers(kept_JI, full)


class Even(FilterRule):
    """As many as Kascade's at even distances, from the second layer on."""

    name = "even"

    def filters(self, kept_JI: Floats, importance: Sequence[float], full: Sequence[int]) -> Sequence[int]:
        count = _anchors(full)
        return [full[1 + (len(full) - 1) * number // count] for number in range(count)]


class Kascade(FilterRule):
    """Its anchor layers, five of 32, one choice for all heads."""

    name = "kascade"

    def filters(self, kept_JI: Floats, importance: Sequence[float], full: Sequence[int]) -> Sequence[int]:
        return anchor_layers(kept_JI, importance, full[1:], _anchors(full))


def _anchors(full: Sequence[int]) -> int:
    return max(1, round(_ANCHORS_A_LAYER * len(full)))


def _after_wait(segments: Segments) -> Segments:
    """With the first layer after each filter left dense."""
    rests = [tuple(layer for layer in one.layers if layer != one.filter + 1) for one in segments]
    return tuple(one.model_copy(update={"layers": rest}) for one, rest in zip(segments, rests, strict=True) if rest)


def similar_layers(kept_JI: Floats, full: Sequence[int] | None = None) -> tuple[int, ...]:
    """Filter layers by OmniKV's similarity.

    Args:
        kept_JI: share of layer j's attention mass that the choice of layer i holds.
        full: the layers with full attention, which alone choose and are served; all of them when None.

    Returns:
        For every 32 layers three, each the best server of the stretch of layers after it, at least half a stretch
        apart, the first two layers excepted.
    """
    layers = len(kept_JI)
    count = max(1, round(layers / _LAYERS_A_FILTER))
    stretch = max(1, layers // (count + 1))
    among = range(layers) if full is None else full
    stretches = {i: [j for j in among if i < j <= i + stretch] for i in among if i >= min(_FIRST_DENSE, layers - 2)}
    served = {i: float(np.mean(kept_JI[after, i])) for i, after in stretches.items() if after}
    chosen: list[int] = []
    for layer in sorted(served, key=lambda i: (-served[i], i)):
        if len(chosen) < count and all(abs(layer - other) >= max(2, stretch // 2) for other in chosen):
            chosen.append(layer)
    return tuple(sorted(chosen))


def _similarities(profile: Profile, reuse: Reuse, budget: Budget, length: int) -> Floats:
    sizes = [one.resolve(length) for one in reuse.budgets]
    within = [number for number, size in enumerate(sizes) if size <= budget.resolve(length)]
    number = max(within, key=sizes.__getitem__) if within else sizes.index(min(sizes))
    kept_JI, full = np.zeros((profile.model.layers,) * 2), profile.model.full_layers
    for layer in full:
        row = reuse.kept[number][layer]
        kept_JI[layer, : len(row)] = np.minimum(row, 1.0)
    kept_JI[:, sorted(set(range(profile.model.layers)).difference(full))] = 0.0
    return kept_JI
