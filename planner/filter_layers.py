"""Choosing filter layers: which layers decode densely and choose tokens for the layers after them (OmniKV).

Three rules. `dp` solves for the cheapest assignment whose lost attention mass, weighted by how much each layer moves
the residual, stays within `decode_loss`; how many filter layers there are comes out of it. `omnikv` is the paper's
reading of inter-layer similarity (section 3.1 and its released analysis): the first layers dense, filters at the
layers whose choice serves the next stretch of layers best, one wait layer, `last` selector. `fixed` takes the layers
it is given.

The dynamic programme (`solve`) walks the layers; a state is the filter in force; each state keeps the partial
assignments that no other one beats in both cost and loss. Costs are whole nanoseconds, so that equal sums are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost.crossover import longest_losing, pays
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.predict import step_us
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.profile_data import Profile, Reuse
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload, Segment

Ints = npt.NDArray[np.int64]

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
        return _segments_of(actions[::-1])


def _segments_of(actions: list[tuple[int, int]]) -> tuple[FilterSegment, ...]:
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


HOT_TOKENS = 4096
_FIRST_DENSE = 2
_LAYERS_A_FILTER = 32 / 3  # the paper's choice for 32 layers has three filters
_WAIT = 1

Floats = npt.NDArray[np.float64]


def choose_filter_layers(profile: Profile, cost: DeviceCost, options: PlanOptions) -> DecodePlan:
    """The decode phase of a plan, one bucket a profiled length.

    Lengths at which no assignment is cheaper than dense by `cost` go dense, and the lengths below a profiled one at
    which its segments would not pay, unless `options.crossover` is off or rows are offloaded: an offloaded layer that
    runs dense reads all its rows back in every step.

    Raises:
        UsageError: the profile has no decode statistics, or a fixed layer does not exist.
    """
    options = replace(options, crossover=options.crossover and not options.offload)
    measured = [(entry.length, entry.reuse) for entry in profile.lengths if entry.reuse is not None]
    if not measured:
        raise UsageError("expected a profile with decode statistics, found none; profile with the decode phase")
    longest, reuse = measured[-1]
    chosen = _assign(profile.model, longest, reuse, cost, options)
    segments = tuple(_segment(segment, reuse, longest, options) for segment in chosen)
    buckets: list[DecodeBucket] = []
    for length, _ in measured:
        above = (buckets[-1].up_to or 0) if buckets else 0
        buckets += _buckets(profile.model, length, above, segments, cost, options)
    lengths = (*_joined(buckets), buckets[-1].model_copy(update={"up_to": None}))
    return DecodePlan(lengths=lengths, offload=_offload(lengths) if options.offload else None)


def _joined(buckets: Sequence[DecodeBucket]) -> list[DecodeBucket]:
    """All but the last, without dense buckets that a longer dense one follows."""
    return [bucket for bucket, after in pairwise(buckets) if not (bucket.dense and after.dense)]


def _buckets(
    model: ModelInfo, length: int, above: int, segments: tuple[Segment, ...], cost: DeviceCost, options: PlanOptions
) -> tuple[DecodeBucket, ...]:
    """The bucket of a length, behind a dense one for the lengths from `above` on at which it would not pay."""
    bucket = DecodeBucket(up_to=length, dense=not segments, segments=segments)
    if options.crossover and segments and not _pays(bucket, cost, length, model):
        bucket = DecodeBucket(up_to=length, dense=True)
    if bucket.dense or not options.crossover:
        return (bucket,)
    below = longest_losing(lambda shorter: _pays(bucket, cost, shorter, model), length, above)
    return (DecodeBucket(up_to=below, dense=True), bucket) if below else (bucket,)


def _assign(
    model: ModelInfo, length: int, reuse: Reuse, cost: DeviceCost, options: PlanOptions
) -> tuple[FilterSegment, ...]:
    kept = _square(reuse, _budget_place(reuse.budgets, options.decode_budget, length))
    full = [layer for layer in range(model.layers) if model.group_of(layer).kind == "full"]
    if options.filter_rule == "fixed":
        return _after(_known(options.filter_layers, full), full, wait=0)
    if options.filter_rule == "omnikv":
        return _after(similar_layers(kept[0]), full, wait=_WAIT)
    return solve(_problem(length, reuse, kept, set(full), cost, options)).segments


def _problem(
    length: int, reuse: Reuse, kept: Floats, full: set[int], cost: DeviceCost, options: PlanOptions
) -> SegmentProblem:
    layers = len(reuse.importance)
    importance = np.asarray(reuse.importance)
    loss = (1.0 - np.minimum(kept, 1.0)) * (importance / max(importance.sum(), 1e-20))[None, :, None]
    for layer in set(range(layers)) - full:
        loss[:, layer, :] = loss[:, :, layer] = np.inf
    chosen = options.decode_budget.resolve(length)
    # Without a crossover the file is to be sparse whatever this device makes of it: tokens stand in for time.
    dense_us = cost.decode_dense_us(length) if options.crossover else float(length)
    sparse_us = cost.decode_sparse_us(chosen) if options.crossover else float(chosen)
    choose_us = cost.decode_choose_us(length) if options.crossover else 1.0
    return SegmentProblem(
        dense_ns=np.full(layers, round(dense_us * 1e3)),
        sparse_ns=np.full(layers, round(sparse_us * 1e3)),
        choose_ns=np.full(layers, round(choose_us * 1e3)),
        loss=loss,
        most_loss=options.decode_loss,
    )


def similar_layers(kept_JI: Floats) -> tuple[int, ...]:
    """Filter layers by OmniKV's similarity.

    Args:
        kept_JI: share of layer j's attention mass that the choice of layer i holds.

    Returns:
        For every 32 layers three, each the best server of the stretch of layers after it, at least half a stretch
        apart, the first two layers excepted.
    """
    layers = len(kept_JI)
    count = max(1, round(layers / _LAYERS_A_FILTER))
    stretch = max(1, layers // (count + 1))
    served = {
        i: float(np.mean(kept_JI[i + 1 : i + 1 + stretch, i])) for i in range(min(_FIRST_DENSE, layers - 2), layers - 1)
    }
    chosen: list[int] = []
    for layer in sorted(served, key=lambda i: (-served[i], i)):
        if len(chosen) < count and all(abs(layer - other) >= max(2, stretch // 2) for other in chosen):
            chosen.append(layer)
    return tuple(sorted(chosen))


def _after(filters: Sequence[int], full: Sequence[int], wait: int) -> tuple[FilterSegment, ...]:
    ends = [*filters[1:], max(full) + 1]
    spans = (
        FilterSegment(first, 0, tuple(layer for layer in full if first + wait < layer < end))
        for first, end in zip(filters, ends, strict=True)
    )
    return tuple(span for span in spans if span.layers)


def _known(filters: Sequence[int], full: Sequence[int]) -> tuple[int, ...]:
    unknown = sorted(set(filters) - set(full[:-1]))
    if unknown:
        raise UsageError(
            f"expected filter layers with full attention below the last layer, {full[-1]}, found {unknown}; "
            "choose others"
        )
    return tuple(sorted(set(filters)))


def _segment(found: FilterSegment, reuse: Reuse, longest: int, options: PlanOptions) -> Segment:
    choice, wanted = reuse.selectors[found.selector], options.decode_budget
    at_most = None if wanted.fraction is None else wanted.resolve(longest)
    return Segment(
        filter=found.filter,
        layers=found.layers,
        budget=DecodeBudget(tokens=wanted.tokens, fraction=wanted.fraction, at_most=at_most),
        sink=options.decode_sink,
        recent=options.decode_recent,
        selector=choice.selector,
        window=choice.window,
    )


def _square(reuse: Reuse, budget: int) -> Floats:
    """[selector, layer j, layer i] with zeros above the diagonal, for one budget."""
    layers = len(reuse.importance)
    kept = np.zeros((len(reuse.selectors), layers, layers))
    for selector, tables in enumerate(reuse.kept):
        for j, row in enumerate(tables[budget]):
            kept[selector, j, : j + 1] = row
    return kept


def _budget_place(measured: Sequence[Budget], wanted: Budget, length: int) -> int:
    """The largest measured budget within the wanted one: what is lost is then not underestimated."""
    sizes = [(budget.resolve(length), place) for place, budget in enumerate(measured)]
    fitting = [size for size in sizes if size[0] <= wanted.resolve(length)]
    if not fitting:
        raise UsageError(
            f"expected a decode budget of at least {min(sizes)[0]} tokens at {length}, the least that was profiled, "
            f"found {wanted.resolve(length)}; raise it, or profile again with it"
        )
    return max(fitting)[1]


def _pays(bucket: DecodeBucket, cost: DeviceCost, length: int, model: ModelInfo) -> bool:
    step = step_us(bucket, cost, length, model.layers)
    return step is not None and pays(step, model.layers * cost.decode_dense_us(length))


def _offload(buckets: Sequence[DecodeBucket]) -> Offload | None:
    # A layer that is dense at some length would read everything back from the host there.
    always = [bucket.sparse_layers for bucket in buckets if not bucket.dense]
    layers = frozenset.intersection(*always) if always else frozenset()
    return Offload(layers=tuple(sorted(layers)), hot=tokens(HOT_TOKENS)) if layers else None
