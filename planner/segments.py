"""Which layers choose tokens and which attend to what was chosen: the cheapest assignment within a loss, exactly.

Each layer is dense, or a filter (dense, and it chooses tokens), or sparse (it attends to what the last filter before
it chose). The dynamic programme walks the layers; a state is the filter in force; each state keeps the partial
assignments that no other one beats in both cost and loss. Costs are whole nanoseconds, so that equal sums are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_DENSE, _SPARSE, _FILTER = 0, 1, 2
_NO_FILTER = (-1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentProblem:
    """What an assignment costs and loses.

    Attributes:
        dense_ns, sparse_ns, choose_ns: per layer; a filter costs dense_ns + choose_ns.
        loss: [selector, layer j, layer i]: what is lost when layer j attends to the choice of layer i < j; infinite
            where it may not.
        most_loss: the sum of losses that is allowed.
    """

    dense_ns: Ints
    sparse_ns: Ints
    choose_ns: Ints
    loss: Floats
    most_loss: float

    @property
    def layers(self) -> int:
        """How many layers."""
        return len(self.dense_ns)


@dataclass(frozen=True, slots=True)
class FilterSegment:
    """A filter layer, how it chooses, and the layers that use its choice."""

    filter: int
    selector: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A solution; no segments means that all layers are dense."""

    segments: tuple[FilterSegment, ...]
    cost_ns: int
    loss: float


def solve(problem: SegmentProblem) -> Assignment:
    """The assignment of least cost whose loss is allowed; among equals the one of least loss.

    Proven: partial assignments are dropped only where another one with the same filter in force costs no more and
    loses no more, or where the allowed loss is exceeded already.
    """
    trail = _Trail()
    fronts = {_NO_FILTER: _Front(np.zeros(1, np.int64), np.zeros(1), np.full(1, -1, np.int64))}
    for layer in range(problem.layers):
        fronts = _step(problem, trail, fronts, layer)
    best = _pruned(list(fronts.values()), problem.most_loss)
    return Assignment(trail.segments(int(best.node[0])), int(best.cost[0]), float(best.loss[0]))


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """Partial assignments, ascending in cost and descending in loss; `node` is their last step in the trail."""

    cost: Ints
    loss: Floats
    node: Ints


class _Trail:
    """Every step ever taken: what was done in its layer, and the step before it."""

    def __init__(self) -> None:
        self._before: list[Ints] = []
        self._steps: list[tuple[int, int, int]] = []  # first node, layer, action
        self._size = 0

    def add(self, before: Ints, layer: int, action: int) -> Ints:
        self._steps.append((self._size, layer, action))
        self._before.append(before)
        self._size += len(before)
        return np.arange(self._size - len(before), self._size)

    def segments(self, node: int) -> tuple[FilterSegment, ...]:
        actions: list[tuple[int, int]] = []
        firsts = np.array([first for first, _, _ in self._steps])
        while node >= 0:
            place = int(np.searchsorted(firsts, node, side="right")) - 1
            first, layer, action = self._steps[place]
            actions.append((layer, action))
            node = int(self._before[place][node - first])
        return _segments(actions[::-1])


def _segments(actions: list[tuple[int, int]]) -> tuple[FilterSegment, ...]:
    found: list[FilterSegment] = []
    for layer, action in actions:
        if action >= _FILTER:
            found.append(FilterSegment(layer, action - _FILTER, ()))
        elif action == _SPARSE:
            last = found.pop()
            found.append(FilterSegment(last.filter, last.selector, (*last.layers, layer)))
    return tuple(segment for segment in found if segment.layers)


_Fronts = dict[tuple[int, int], _Front]


def _step(problem: SegmentProblem, trail: _Trail, fronts: _Fronts, layer: int) -> _Fronts:
    after: _Fronts = {}
    dense, sparse = problem.dense_ns[layer], problem.sparse_ns[layer]
    for (filter_, selector), front in fronts.items():
        options = [_extended(front, trail, layer, _DENSE, dense, 0.0)]
        if filter_ >= 0 and np.isfinite(problem.loss[selector, layer, filter_]):
            lost = float(problem.loss[selector, layer, filter_])
            options.append(_extended(front, trail, layer, _SPARSE, sparse, lost))
        after[filter_, selector] = _pruned(options, problem.most_loss)
    everything = _pruned(list(fronts.values()), problem.most_loss)
    for selector in range(len(problem.loss)):
        price = dense + problem.choose_ns[layer]
        after[layer, selector] = _extended(everything, trail, layer, _FILTER + selector, price, 0.0)
    return after


def _extended(front: _Front, trail: _Trail, layer: int, action: int, cost: int, loss: float) -> _Front:
    return _Front(front.cost + cost, front.loss + loss, trail.add(front.node, layer, action))


def _pruned(fronts: list[_Front], most_loss: float) -> _Front:
    cost = np.concatenate([front.cost for front in fronts])
    loss = np.concatenate([front.loss for front in fronts])
    node = np.concatenate([front.node for front in fronts])
    order = np.lexsort((node, loss, cost))
    order = order[loss[order] <= most_loss]
    least_before = np.minimum.accumulate(np.concatenate([[np.inf], loss[order]]))[:-1]
    kept = order[loss[order] < least_before]
    return _Front(cost[kept], loss[kept], node[kept])
