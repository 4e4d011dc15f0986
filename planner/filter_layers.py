"""Choosing filter layers: which layers decode densely and choose tokens for the layers after them (OmniKV).

Where segments were tried out on the model (`decode_search`), the cheapest are taken whose divergence from dense stays
within `decode_kl`. Where none were, or a `decode_loss` is asked for, the cheapest assignment whose lost attention mass,
weighted by how much each layer moves the residual, stays within that. How many filter layers there are comes out of it;
or the caller names them.

All sparse lengths of a plan share their segments, so that one captured step serves them; budgets may differ where they
were tried. A length at which no trial of the same segments stayed inside the gate goes dense. Without trials it
bounds the loss at the worst of the sparse lengths, and counts the tokens of the longest, where decode has most to gain.
A short length that would cost the longer ones their sparsity goes dense: segments are solved for all lengths, for all
but the shortest, and so on; those that save most over all lengths together are taken. What is saved is cached tokens
that are not read: the same on every device.

The dynamic programme (`solve_segments`) walks the layers; a state is the filter in force; each state keeps the partial
assignments that no other one beats in both cost and loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from sparsekv.planner.options import Settled
from sparsekv.planner.predict import decode_share, visible_tokens
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile, Reuse, TokenChoice
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload, Segment, followers
from sparsekv.plans.types import format_ids

Ints = npt.NDArray[np.int64]

_DENSE, _SPARSE, _FILTER = 0, 1, 2
_NO_FILTER = -1
_LEAST_HOT = 4096


def choose_filter_layers(profile: Profile, options: Settled) -> DecodePlan:
    """The decode phase of a plan: the same segments at every length that is sparse.

    The lengths of `options.dense` are dense; the others keep what they would have beside them.
    """
    check_filters(profile.model, options)
    check_budget(profile, options)
    chooser = _Chooser(profile, options)
    buckets = chooser.buckets(chooser.without(chooser.choose(), options.dense_at("decode")))
    plan = DecodePlan(lengths=buckets)
    layers = tuple(sorted(plan.follower_layers - profile.model.sharing)) if options.offload else ()
    if not layers:
        return plan
    budgets = [segment.budget for bucket in buckets for segment in bucket.segments]
    longest = max(entry.length for entry in profile.lengths)
    return plan.model_copy(update={"offload": Offload(layers=layers, hot=hot_set(budgets, longest))})


def hot_set(budgets: Iterable[DecodeBudget], longest: int) -> Budget:
    """Tokens on the device for layers that choose so many at contexts of up to `longest`: twice the largest budget, and
    never few. What that leaves to fetch is in docs/experiments.md."""
    return tokens(max(_LEAST_HOT, 2 * max(budget.resolve(longest) for budget in budgets)))


def takes_trials(profile: Profile, options: Settled) -> bool:
    """Returns whether segments are taken from what was tried out on the model, not by the attention mass that they
    lose."""
    return options.tries_decode and any(entry.trials for entry in profile.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class _Statistics:
    """One profiled length, for the budget asked for."""

    length: int
    loss: Floats  # [layer j, layer i], weighted by importance; infinite where j may not attend to the choice of i

    @classmethod
    def of(cls, length: int, reuse: Reuse, options: Settled, full: Sequence[int]) -> _Statistics:
        budget = budget_index(reuse.budgets, options.decode_budget, length)
        return cls(length, lost_mass(reuse, budget, full) * shares_of(reuse.importance)[:, None])

    def lost(self, segments: Sequence[FilterSegment]) -> float:
        """By an assignment."""
        return sum(float(self.loss[layer, one.filter]) for one in segments for layer in one.layers)


Choice = tuple[tuple[Segment, ...], ...]
"""The segments of every length, which differ in their budgets alone; none where it is dense."""
_ANY = DecodeBudget(tokens=1)


def _inside(entry: LengthProfile, options: Settled) -> list[DecodeTrial]:
    """The trials of a length inside the gate that use what is asked for; not those that were given up."""
    prompts = max((trial.prompts for trial in entry.trials), default=0)
    most = entry.length if options.any_budget else options.decode_budget.resolve(entry.length)
    return [
        trial
        for trial in entry.trials
        if trial.prompts == prompts
        and trial.kl_bound <= options.decode_bound
        and all(segment.budget.resolve(entry.length) <= most for segment in trial.segments)
    ]


class _Chooser:
    """The lengths that have decode statistics."""

    def __init__(self, profile: Profile, options: Settled) -> None:
        model = profile.model
        self._options, self._model = options, model
        self._full = model.full_layers
        reuses = [(entry.length, entry.reuse) for entry in profile.lengths if entry.reuse]
        self._tried = takes_trials(profile, options)
        self._trials = [_inside(entry, options) for entry in profile.lengths if entry.reuse]
        self._lengths = [_Statistics.of(length, reuse, options, self._full) for length, reuse in reuses]
        self._longest = self._lengths[-1].length
        self._choice: TokenChoice = reuses[-1][1]

    def choose(self) -> Choice:
        """Returns what each length attends to."""
        if self._options.filter_layers:
            given = following(sorted(self._options.filter_layers), self._full)
            return (tuple(map(self._segment, given)),) * len(self._lengths)
        found = list(self._proven() if self._tried else self._solved())
        return min(found, key=self._spent)

    def without(self, choice: Choice, dense: Collection[int]) -> Choice:
        """The choice, with these lengths dense."""
        pairs = zip(choice, self._lengths, strict=True)
        return tuple(() if one.length in dense else segments for segments, one in pairs)

    def _solved(self) -> Iterator[Choice]:
        """By lost attention mass, where nothing was tried."""
        for first in range(len(self._lengths)):
            assignment = solve_segments(self._problem(first)).segments
            bound = self._options.loss_bound * (1.0 + 1e-9)
            segments = tuple(map(self._segment, assignment))
            yield tuple(segments if one.lost(assignment) <= bound else () for one in self._lengths)

    def _proven(self) -> Iterator[Choice]:
        """By trials inside the gate: nothing, and the cheapest at each length that differ in their budgets alone."""
        yield ((),) * len(self._lengths)
        by_shape: dict[tuple[Segment, ...], list[list[tuple[Segment, ...]]]] = {}
        for position, trials in enumerate(self._trials):
            for trial in trials:
                shape = tuple(segment.model_copy(update={"budget": _ANY}) for segment in trial.segments)
                by_shape.setdefault(shape, [[] for _ in self._lengths])[position].append(trial.segments)
        for found in by_shape.values():
            yield tuple(map(self._cheapest, found, self._lengths))

    def _cheapest(self, found: Sequence[tuple[Segment, ...]], at: _Statistics) -> tuple[Segment, ...]:
        return min(found, key=lambda one: decode_share(one, at.length, self._model), default=())

    def buckets(self, choice: Choice) -> tuple[DecodeBucket, ...]:
        """Ascending, equal neighbours as one, the last open-ended."""
        pairs = zip(self._lengths, choice, strict=True)
        buckets = [DecodeBucket(up_to=one.length, segments=segments, dense=not segments) for one, segments in pairs]
        differing = [bucket for bucket, after in pairwise(buckets) if bucket.segments != after.segments]
        return (*differing, buckets[-1].model_copy(update={"up_to": None}))

    def _spent(self, choice: Choice) -> float:
        """Returns the share of the cached tokens that a step reads, summed over the lengths."""
        pairs = zip(choice, self._lengths, strict=True)
        return sum(decode_share(used, one.length, self._model) for used, one in pairs)

    def _problem(self, first: int) -> SegmentProblem:
        """Over the lengths from the `first` on."""
        options, length = self._options, self._longest
        attended = min(length, options.decode_sink + options.decode_budget.resolve(length) + options.decode_recent)
        groups = self._model.by_layer
        dense = np.array([visible_tokens(groups[layer], length) for layer in range(len(groups))])
        sparse, choose = np.full(len(groups), attended), np.full(len(groups), 1)
        loss = np.max([one.loss for one in self._lengths[first:]], 0)
        return SegmentProblem(dense, sparse, choose, loss, options.loss_bound)

    def _segment(self, found: FilterSegment) -> Segment:
        return segment_of(found, self._choice, self._options.decode_budget, self._longest)


def segment_of(found: FilterSegment, choice: TokenChoice, budget: Budget, length: int) -> Segment:
    """A segment as plans have it.

    Args:
        choice: how tokens were chosen where it was found.
        budget: of its filter layer; a fraction chooses no more than it comes to at `length`.
    """
    at_most = None if budget.fraction is None else budget.resolve(length)
    return Segment(
        filter=found.filter,
        layers=found.layers,
        budget=DecodeBudget(tokens=budget.tokens, fraction=budget.fraction, at_most=at_most),
        sink=choice.sink,
        recent=choice.recent,
    )


def following(filters: Sequence[int], full: Sequence[int]) -> tuple[FilterSegment, ...]:
    """Each filter serves all layers of `full` up to the next one."""
    return tuple(FilterSegment(first, layers) for first, layers in followers(filters, full).items() if layers)


def check_filters(model: ModelInfo, options: Settled) -> None:
    """Finds out, from the model alone, whether it has the filter layers that are given."""
    full = model.full_layers
    unknown = sorted(set(options.filter_layers) - set(full[:-1]))
    if unknown and not full:
        raise UsageError("expected filter layers with full attention, found a model without such layers; plan prefill")
    if unknown:
        raise UsageError(
            f"expected filter layers with full attention below the last such layer, {full[-1]}, found "
            f"{format_ids(unknown)}; choose others"
        )


def check_budget(profile: Profile, options: Settled) -> None:
    """Finds out whether a profile says what the budget loses."""
    for entry in profile.lengths:
        if entry.reuse:
            budget_index(entry.reuse.budgets, options.decode_budget, entry.length)


def check_trials(profile: Profile, options: Settled) -> None:
    """Refuses a bound on divergence with a profile that says nothing of it."""
    if options.decode_kl is not None and not options.filter_layers and not takes_trials(profile, options):
        raise UsageError(
            "expected a profile with decode trials for decode_kl, found none in it; profile again (leave --profile "
            "out), or bound the attention mass that is lost instead (decode_loss)"
        )


def lost_mass(reuse: Reuse, budget: int, full: Sequence[int]) -> Floats:
    """[layer j, layer i]: share of layer j's attention mass that is lost to the choice of layer i; infinite
    where layer j may not attend to it.

    Args:
        budget: position among the measured ones.
    """
    lost = np.ones((len(reuse.importance),) * 2)
    for j, row in enumerate(reuse.kept[budget]):
        lost[j, : j + 1] = 1.0 - np.minimum(row, 1.0)
    for layer in set(range(len(lost))).difference(full):
        lost[layer, :] = lost[:, layer] = np.inf
    return lost


def shares_of(importance: Sequence[float]) -> Floats:
    """Returns the cost of all layers together; positive, so that what is not allowed stays infinite."""
    return np.maximum(np.asarray(importance) / max(sum(importance), 1e-20), 1e-20)


def budget_index(measured: Sequence[Budget], wanted: Budget, length: int) -> int:
    """The position of the largest measured budget within the wanted one: what is lost is then not underestimated."""
    sizes = [(budget.resolve(length), number) for number, budget in enumerate(measured)]
    fitting = [size for size in sizes if size[0] <= wanted.resolve(length)]
    if not fitting:
        raise UsageError(
            f"expected a decode budget of at least {min(sizes)[0]} tokens at {length}, the least that was profiled, "
            f"found {wanted.resolve(length)}; raise it, or profile again with it"
        )
    return max(fitting)[1]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentProblem:
    """Holds what an assignment costs and loses.

    Attributes:
        dense, sparse, choose: per layer; a filter costs dense + choose.
        loss: [layer j, layer i]: what is lost when layer j attends to the choice of layer i < j; infinite
            where it may not.
        most_loss: the sum of losses that is allowed.
    """

    dense: Ints
    sparse: Ints
    choose: Ints
    loss: Floats
    most_loss: float


@dataclass(frozen=True, slots=True)
class FilterSegment:
    """A filter layer, and the layers that use its choice."""

    filter: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A solution; no segments means that all layers are dense."""

    segments: tuple[FilterSegment, ...]
    loss: float


def solve_segments(problem: SegmentProblem) -> Assignment:
    """The assignment of least cost whose loss is allowed; among equals the one of least loss.

    Proven: partial assignments are dropped only where another one with the same filter in force costs no more and
    loses no more, or where the allowed loss is exceeded already.
    """
    trail: list[tuple[int, int, int]] = []  # every step ever taken: the one before it, its layer, its action

    def extended(front: _Front, layer: int, action: int, cost: int, loss: float = 0.0) -> _Front:
        first = len(trail)
        trail.extend((step, layer, action) for _, _, step in front)
        return [(spent + cost, lost + loss, first + n) for n, (spent, lost, _) in enumerate(front)]

    fronts: dict[int, _Front] = {_NO_FILTER: [(0, 0.0, -1)]}
    prices = zip(problem.dense.tolist(), problem.sparse.tolist(), problem.choose.tolist(), strict=True)
    for layer, (dense, sparse, choose) in enumerate(prices):
        everything = _pruned(chain.from_iterable(fronts.values()), problem.most_loss)
        for filter_, front in fronts.items():
            options = extended(front, layer, _DENSE, dense)
            lost = float(problem.loss[layer, filter_])
            if filter_ >= 0 and math.isfinite(lost):
                options += extended(front, layer, _SPARSE, sparse, lost)
            fronts[filter_] = _pruned(options, problem.most_loss)
        fronts[layer] = extended(everything, layer, _FILTER, dense + choose)
    _, loss, step = _pruned(chain.from_iterable(fronts.values()), problem.most_loss)[0]
    actions = []
    while step >= 0:
        step, *action = trail[step]
        actions.append(action)
    return Assignment(_segments_of(reversed(actions)), loss)


# Partial assignments (cost, loss, last step in the trail), ascending in cost and descending in loss.
_Front = list[tuple[int, float, int]]


def _pruned(partial: Iterable[tuple[int, float, int]], most_loss: float) -> _Front:
    front: _Front = []
    for one in sorted(partial):
        if one[1] <= most_loss and (not front or one[1] < front[-1][1]):
            front.append(one)
    return front


def _segments_of(actions: Iterable[Sequence[int]]) -> tuple[FilterSegment, ...]:
    found: list[FilterSegment] = []
    for layer, action in actions:
        if action == _FILTER:
            found.append(FilterSegment(layer, ()))
        elif action == _SPARSE:
            found[-1] = replace(found[-1], layers=(*found[-1].layers, layer))
    return tuple(segment for segment in found if segment.layers)
