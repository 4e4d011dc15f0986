"""Segments that decode might run with, proposed from similarities of layers; `decode_search` measures them.

The dynamic programme of `filter_layers` proposes most: for every profiled budget, and for a ladder of allowed losses. A
lost share of attention mass counts once by what it does to the next token where a layer alone is sparse (measured),
once by how much the layer moves the residual. Beside it stand the rules of others: filters at even distances and
Kascade's anchor layers.

Shapes: J layers that attend, I layers that choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from sparsekv.planner.filter_layers import (
    FilterSegment,
    SegmentProblem,
    budget_index,
    following,
    lost_mass,
    segment_of,
    shares_of,
    solve_segments,
)
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.predict import decode_share, visible_tokens
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.profile_data import LengthProfile, Reuse
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, fraction
from sparsekv.plans.phases import DecodeBudget, Segment

Segments = tuple[Segment, ...]

_LOSSES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5)  # of attention mass, weighted by importance
_DIVERGENCES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of what is allowed, by the additive model
_MOST_FILTERS = 4  # of the rules that are given their number
_PROBED = 0.05  # share of the context that the probes choose
_NO_LOSS, _NO_DIVERGENCE = 0.02, 1e-6  # below these a quotient of the two is noise
_TOKEN_COST = 1000
_FACTORS = (0.5, 0.5**0.5, 2.0**0.5, 2.0)  # of a budget, in one step
_MOST_CHOSEN = 0.7  # share of the context; more is not worth a choice
_LEAST_LOSS = 1e-4  # of attention mass


class CandidateSpace:
    """Holds what may be proposed at one profiled length.

    Args:
        options: settled: budget, sink, recent.
    """

    def __init__(self, model: ModelInfo, entry: LengthProfile, options: PlanOptions) -> None:
        assert entry.reuse is not None
        self._model, self._length, self._options, self._reuse = model, entry.length, options, entry.reuse
        self.full = model.full_layers
        self.budgets: tuple[Budget, ...] = entry.reuse.budgets if options.any_budget else (options.decode_budget,)
        self._lost = {budget: self._lost_with(budget) for budget in self.budgets}
        self._losses: dict[tuple[int, int, int], float] = {}  # what `_loss` has found

    def _lost_with(self, budget: Budget) -> Floats:
        reuse: Reuse = self._reuse
        return lost_mass(reuse, budget_index(reuse.budgets, budget, self._length), self.full)

    def probe(self, layer: int) -> Segments:
        """One layer alone, behind the nearest one that can choose for it; the first of `full` chooses for itself."""
        nearest = max((other for other in self.full if other < layer), default=layer)
        return self.segments([FilterSegment(nearest, (layer,))], self._probed)

    def weights(self, divergence: dict[int, float]) -> Floats:
        """[J]: nats for each share of attention mass that a layer loses, from the divergence of its probe."""
        weights_J = np.full(self._model.layers, 1e-20)
        for layer, kl in divergence.items():
            (segment,) = self.probe(layer)
            weights_J[layer] = (kl + _NO_DIVERGENCE) / (self._loss(segment, layer) + _NO_LOSS)
        return weights_J

    def expected(self, segments: Segments, weights_J: Floats) -> float:
        """The divergence by the additive model, in nats: too low where layers stand in for each other."""
        return sum(
            self._loss(segment, layer) * float(weights_J[layer]) for segment in segments for layer in segment.layers
        )

    def share(self, segments: Segments) -> float:
        """Cached tokens that are read, of all."""
        return decode_share(segments, self._length, self._model)

    def proposed(self, weights_J: Floats, allowed: float) -> list[Segments]:
        """Candidates by the tokens they read, ascending, each once.

        Those are left out beside which another one reads no more and is expected to diverge half as much at most.

        Args:
            weights_J: of `weights`.
            allowed: divergence, in nats.
        """
        found = dict.fromkeys(segments for segments in self._all(weights_J, allowed) if segments)
        rated = sorted(
            ((self.share(one), self.expected(one, weights_J), one) for one in found), key=lambda rated: rated[:2]
        )
        kept: list[tuple[float, Segments]] = []
        for _, expected, segments in rated:
            if all(expected < 2.0 * other for other, _ in kept):
                kept.append((expected, segments))
        return [segments for _, segments in kept]

    def neighbours(self, segments: Segments) -> list[Segments]:
        """Those that differ by one step, whether they read less or more, each once."""
        found = dict.fromkeys(self._steps(segments))
        return [one for one in found if one and one != segments and _is_legal(one)]

    def _steps(self, segments: Segments) -> Iterator[Segments]:
        inside = {layer for segment in segments for layer in (segment.filter, *segment.layers)}
        dense = [layer for layer in self.full if layer not in inside]
        for number, segment in enumerate(segments):
            for others in self._instead(segment, dense):
                yield (*segments[:number], *others, *segments[number + 1 :])
        for number, (first, second) in enumerate(pairwise(segments)):  # a filter layer less
            layers = tuple(sorted({*first.layers, second.filter, *second.layers}))
            merged = first.model_copy(update={"layers": layers, "budget": self._larger(first, second)})
            yield (*segments[:number], merged, *segments[number + 2 :])
        for one in combinations(dense, 2):  # a filter layer more
            new = self.segments([FilterSegment(one[0], one[1:])], self._probed)
            yield tuple(sorted((*segments, *new), key=lambda segment: segment.filter))

    def _instead(self, segment: Segment, dense: Sequence[int]) -> Iterator[Segments]:
        """Returns what may stand in place of one segment, legal beside the others or not."""
        for factor in _FACTORS:
            budget = self._scaled(segment, factor)
            if budget.resolve(self._length) <= self._most_chosen:
                yield (segment.model_copy(update={"budget": budget}),)
        for layer in dense:
            if layer > segment.filter:
                yield (segment.model_copy(update={"layers": tuple(sorted((*segment.layers, layer)))}),)
            if layer < segment.layers[0]:
                yield (segment.model_copy(update={"filter": layer}),)
        for position, layer in enumerate(segment.layers):
            before, after = segment.layers[:position], segment.layers[position + 1 :]
            yield (segment.model_copy(update={"layers": (*before, *after)}),) if before or after else ()
            first = (segment.model_copy(update={"layers": before}),) if before else ()
            yield (*first, segment.model_copy(update={"filter": layer, "layers": after})) if after else first

    def alone(self, segments: Segments) -> list[Segments]:
        """Those in which one more dense layer chooses for itself, a filter layer or one outside all segments, or all
        dense layers do, or all filter layers; and the neighbours of what chooses for itself."""
        found = [self._alone(segments, layer) for layer in self.full]
        every = [self._all_alone(segments, among) for among in (self.full, [one.filter for one in segments])]
        own = self.neighbours(segments) if any(segment.filter_is_sparse for segment in segments) else []
        return list(dict.fromkeys([*(one for one in found if one), *(one for one in every if one != segments), *own]))

    def _all_alone(self, segments: Segments, among: Sequence[int]) -> Segments:
        for layer in among:
            segments = self._alone(segments, layer) or segments
        return segments

    def _alone(self, segments: Segments, layer: int) -> Segments | None:
        """With a layer that chooses for itself; None where it cannot."""
        numbers = {segment.filter: number for number, segment in enumerate(segments)}
        if any(layer in segment.layers for segment in segments):
            return None
        if layer in numbers:
            number = numbers[layer]
            own = segments[number].model_copy(update={"layers": (layer, *segments[number].layers)})
            found = (*segments[:number], own, *segments[number + 1 :])
        else:
            budget = max((segment.budget for segment in segments), key=lambda one: one.resolve(self._length))
            own = segments[0].model_copy(update={"filter": layer, "layers": (layer,), "budget": budget})
            found = tuple(sorted((*segments, own), key=lambda one: one.filter))
        return found if _is_legal(found) else None

    def larger(self, segments: Segments) -> Iterator[Segments]:
        """The same with a twofold and a fourfold budget in every segment, as far as budgets may grow."""
        for factor in (2, 4):
            grown = tuple(segment.model_copy(update={"budget": self._scaled(segment, factor)}) for segment in segments)
            if all(segment.budget.resolve(self._length) <= self._most_chosen for segment in grown):
                yield grown

    def segments(self, found: Sequence[FilterSegment], budget: Budget) -> Segments:
        """As plans have them."""
        return tuple(segment_of(one, self._reuse, budget, self._length) for one in found)

    @property
    def _most_chosen(self) -> int:
        asked = self._options
        return int(_MOST_CHOSEN * self._length) if asked.any_budget else asked.decode_budget.resolve(self._length)

    @property
    def _probed(self) -> Budget:
        return min(self.budgets, key=lambda one: abs(one.resolve(self._length) - _PROBED * self._length))

    def _loss(self, segment: Segment, layer: int) -> float:
        """Share of attention mass, between the profiled budgets and beyond them along a power law."""
        key = segment.filter, segment.budget.resolve(self._length), layer
        if key not in self._losses:
            self._losses[key] = self._interpolated(*key)
        return self._losses[key]

    def _interpolated(self, filter_layer: int, size: int, layer: int) -> float:
        sizes = [budget.resolve(self._length) for budget in self.budgets]
        lost = [float(self._lost[budget][layer, filter_layer]) for budget in self.budgets]
        return _power_law(sizes, lost, size)

    def _all(self, weights_J: Floats, allowed: float) -> Iterator[Segments]:
        importance_J = shares_of(self._reuse.importance)
        measured = [factor * allowed for factor in _DIVERGENCES]
        for budget in self.budgets:
            for by_J, losses in ((weights_J, measured), (importance_J, _LOSSES)):
                problem = self._problem(budget, by_J)
                for loss in losses:
                    yield self.segments(solve_segments(replace(problem, most_loss=loss)).segments, budget)
            for found in self._by_rule(budget):
                yield self.segments(found, budget)

    def _by_rule(self, budget: Budget) -> Iterator[tuple[FilterSegment, ...]]:
        full, kept_JI = self.full, 1.0 - np.minimum(self._lost[budget], 1.0)
        for count in range(1, min(_MOST_FILTERS, len(full) - 1) + 1):
            yield following([full[len(full) * number // count] for number in range(count)], full)
            yield following(anchor_layers(kept_JI, self._reuse.importance, full, count), full)

    def _problem(self, budget: Budget, weights_J: Floats) -> SegmentProblem:
        options, groups = self._options, self._model.by_layer
        attended = min(self._length, options.decode_sink + budget.resolve(self._length) + options.decode_recent)
        visible = [visible_tokens(groups[layer], self._length) for layer in range(self._model.layers)]
        return SegmentProblem(
            dense=np.array(visible, np.int64) * _TOKEN_COST,
            sparse=np.full(len(visible), attended * _TOKEN_COST),
            choose=np.zeros(len(visible), np.int64),
            loss=self._lost[budget] * weights_J[:, None],
            most_loss=0.0,
        )

    def _larger(self, first: Segment, second: Segment) -> DecodeBudget:
        return max(first.budget, second.budget, key=lambda one: one.resolve(self._length))

    def _scaled(self, segment: Segment, factor: float) -> DecodeBudget:
        budget = segment.budget
        if budget.fraction is None:
            return DecodeBudget(tokens=max(1, min(self._length, round(factor * budget.most))))
        scaled = fraction(min(1.0, float(f"{factor * budget.fraction:.3g}")))  # two steps that undo each other do
        return DecodeBudget(fraction=scaled.fraction, at_most=scaled.resolve(self._length))


def _is_legal(segments: Segments) -> bool:
    """Returns whether a plan may have these, in their order; see `Segment` and `DecodeBucket`."""
    sparse = [layer for segment in segments for layer in segment.layers]
    others = {segment.filter for segment in segments if not segment.filter_is_sparse}
    return (
        all(segment.filter <= segment.layers[0] for segment in segments)
        and all(one.filter < after.filter and one.layers[-1] < after.layers[0] for one, after in pairwise(segments))
        and len(set(sparse)) == len(sparse)
        and others.isdisjoint(sparse)
    )


def _power_law(sizes: Sequence[int], lost: Sequence[float], size: int) -> float:
    """The loss of a budget from those of others, linear in logarithms."""
    unique_N, first_N = np.unique(sizes, return_index=True)
    x_N, y_N, at = np.log(unique_N), np.log(np.asarray(lost)[first_N] + _LEAST_LOSS), np.log(size)
    if len(x_N) == 1:
        return float(np.exp(y_N[0]))
    below = int(np.clip(np.searchsorted(x_N, at) - 1, 0, len(x_N) - 2))
    slope = (y_N[below + 1] - y_N[below]) / (x_N[below + 1] - x_N[below])
    return float(np.exp(y_N[below] + slope * (at - x_N[below])))


def anchor_layers(kept_JI: Floats, importance_J: Sequence[float], full: Sequence[int], count: int) -> tuple[int, ...]:
    """Kascade's anchor layers (arXiv 2512.16391): those that maximise the similarity, weighted by importance, of every
    layer to the anchor before it. The first layer is dense and no anchor.

    Args:
        kept_JI: share of layer j's attention mass that the choice of layer i holds.
        full: the layers with full attention, ascending; the first anchor is the second of them.
        count: of anchors; fewer where there are fewer layers.
    """
    rest = list(full[1:])
    count = min(count, len(rest))
    best: dict[int, tuple[float, tuple[int, ...]]] = {len(rest): (0.0, ())}
    for _ in range(count):  # from the last segment to the first: best score of everything from a position on
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in range(len(rest)):
            options = [
                (score + _similarity(kept_JI, importance_J, rest[start:end]), (rest[start], *anchors))
                for end, (score, anchors) in best.items()
                if end > start
            ]
            if options:
                longer[start] = max(options, key=lambda option: (option[0], option[1]))
        best = longer
    return best[0][1] if 0 in best else ()


def _similarity(kept_JI: Floats, importance_J: Sequence[float], layers: Sequence[int]) -> float:
    return float(sum(importance_J[layer] * kept_JI[layer, layers[0]] for layer in layers[1:]))
