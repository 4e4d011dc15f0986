"""Choosing filter layers: which layers decode densely and choose tokens for the layers after them (OmniKV).

Segments that were tried out on the model (decode_search.py) are taken: those that read least among the ones whose
divergence from dense stays inside the loss, or the caller's own filter layers. All sparse lengths of a plan share their
segments, so that one captured step serves them; budgets may differ where they were tried. A length at which no trial of
these segments stayed inside the loss goes dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

from sparsekv.planner.options import Settled
from sparsekv.planner.predict import decode_share
from sparsekv.planner.profile.profile_data import LengthProfile, Profile, TokenChoice
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload, Segment, followers
from sparsekv.plans.types import format_ids

Segments = tuple[Segment, ...]
Choice = tuple[Segments, ...]
"""The segments of every length, which differ in their budgets alone; none where it is dense."""

_LEAST_HOT = 4096
_ANY = DecodeBudget(tokens=1)


def choose_filter_layers(profile: Profile, options: Settled) -> DecodePlan:
    """The decode phase of a plan: the same segments at every length that is sparse.

    The lengths of `options.dense` are dense; the others keep what they would have beside them.
    """
    check_filters(profile.model, options)
    entries = [entry for entry in profile.lengths if entry.reuse]
    choose = _given if options.filter_layers else _proven
    buckets = _buckets(entries, choose(profile.model, entries, options), options.dense)
    plan = DecodePlan(lengths=buckets)
    layers = tuple(sorted(plan.follower_layers - profile.model.sharing)) if options.offload else ()
    if not layers:
        return plan
    budgets = [segment.budget for bucket in buckets for segment in bucket.segments]
    return plan.model_copy(update={"offload": Offload(layers=layers, hot=hot_set(budgets, entries[-1].length))})


def hot_set(budgets: Iterable[DecodeBudget], longest: int) -> Budget:
    """Tokens on the device for layers that choose so many at contexts of up to `longest`: twice the largest budget, and
    never few."""
    return tokens(max(_LEAST_HOT, 2 * max(budget.resolve(longest) for budget in budgets)))


def _given(model: ModelInfo, entries: Sequence[LengthProfile], options: Settled) -> Choice:
    """The caller's own filter layers, with the budget asked for; with twice as much for each time that a length missed
    its test."""
    longest, filters = entries[-1], sorted(options.filter_layers)
    assert longest.reuse is not None
    own = segments_of(filters, model.full_layers, longest.reuse, options.decode_budget, longest.length)
    return tuple(tuple(with_budget(one, 2.0 ** options.missed_at(entry.length)) for one in own) for entry in entries)


def with_budget(segment: Segment, factor: float) -> Segment:
    if factor == 1.0:
        return segment
    budget, most = segment.budget, max(1, round(factor * segment.budget.most))
    if budget.fraction is None:
        scaled = DecodeBudget(tokens=most)
    else:
        scaled = DecodeBudget(fraction=min(1.0, float(f"{factor * budget.fraction:.3g}")), at_most=most)
    return segment.model_copy(update={"budget": scaled})


def segments_of(
    filters: Sequence[int], full: Sequence[int], choice: TokenChoice, budget: Budget, length: int
) -> Segments:
    """Segments in which each filter serves all layers of `full` up to the next one.

    Args:
        choice: how tokens are chosen.
        budget: of each filter layer; a fraction chooses no more than it comes to at `length`.
    """
    at_most = None if budget.fraction is None else budget.resolve(length)
    own = DecodeBudget(tokens=budget.tokens, fraction=budget.fraction, at_most=at_most)
    return tuple(
        Segment(filter=first, layers=layers, budget=own, sink=choice.sink, recent=choice.recent)
        for first, layers in followers(filters, full).items()
        if layers
    )


def _proven(model: ModelInfo, entries: Sequence[LengthProfile], options: Settled) -> Choice:
    """By trials inside the loss; at lengths that missed their test, inside half of what the plan before lost there."""
    most = [options.phase_loss] * len(entries)
    choice = _sparsest(model, entries, options, most)
    for number in range(max(options.missed.values(), default=0)):
        for position, (entry, segments) in enumerate(zip(entries, choice, strict=True)):
            if number < options.missed_at(entry.length):
                lost = (trial.kl_bound for trial in entry.trials if trial.segments == segments)
                most[position] = next(lost, 0.0) / 2
        choice = _sparsest(model, entries, options, most)
    return choice


def _sparsest(model: ModelInfo, entries: Sequence[LengthProfile], options: Settled, most: Sequence[float]) -> Choice:
    """Segments that differ in their budgets alone and read least over all lengths together."""
    by_shape: dict[Segments, list[list[Segments]]] = {}
    for position, entry in enumerate(entries):
        budget = entry.length if options.any_budget else options.decode_budget.resolve(entry.length)
        for trial in entry.trials:
            is_small = all(segment.budget.resolve(entry.length) <= budget for segment in trial.segments)
            if is_small and trial.kl_bound <= most[position]:
                shape = tuple(segment.model_copy(update={"budget": _ANY}) for segment in trial.segments)
                by_shape.setdefault(shape, [[] for _ in entries])[position].append(trial.segments)

    def share(segments: Segments, entry: LengthProfile) -> float:
        return decode_share(segments, entry.length, model)

    choices: list[Choice] = [((),) * len(entries)]
    for tried in by_shape.values():
        pairs = zip(tried, entries, strict=True)
        choices.append(tuple(min(some, key=partial(share, entry=entry), default=()) for some, entry in pairs))
    return min(choices, key=lambda choice: sum(map(share, choice, entries)))


def _buckets(entries: Sequence[LengthProfile], choice: Choice, dense: Sequence[int]) -> tuple[DecodeBucket, ...]:
    """Ascending, equal neighbours as one, the last open-ended."""
    lengths = [entry.length for entry in entries]
    sparse = [() if at in dense else segments for at, segments in zip(lengths, choice, strict=True)]
    pairs = zip(lengths, sparse, strict=True)
    buckets = [DecodeBucket(up_to=at, segments=segments, dense=not segments) for at, segments in pairs]
    differing = [bucket for bucket, after in pairwise(buckets) if bucket.segments != after.segments]
    return (*differing, buckets[-1].model_copy(update={"up_to": None}))


def check_filters(model: ModelInfo, options: Settled) -> None:
    """Refuses filter layers that a model does not have."""
    full = model.full_layers
    unknown = sorted(set(options.filter_layers) - set(full[:-1]))
    if unknown and not full:
        raise UsageError("expected filter layers with full attention, found a model without such layers; plan prefill")
    if unknown:
        raise UsageError(
            f"expected filter layers with full attention below the last such layer, {full[-1]}, found "
            f"{format_ids(unknown)}; choose others"
        )
