"""The pattern of each head: one loss for the whole model.

The loss is given, the share is found: every head of every layer takes one of its candidates, or stays dense, such that
the sum of their damages (profile/head_errors.py) stays inside the loss and the computed tiles are fewest. Or a target
density is given, a budget of tiles for which the damage is least. So heads get what they need, from the mandatory
tiles to everything, instead of one density each (MInference 1.0, section 3.2, algorithm 1, as the preset does it). The
damage that comes out is the same on every device. For as little damage a device may have a faster choice, by the time
of tiles, single columns and indices there: heads and families are ranked by damage a microsecond. Its density may be a
little above that. Where sparse attention is faster at all, the host finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from sparsekv.planner.options import Family, Settled
from sparsekv.planner.predict import ABSENT, DENSE, Choice, Mask, ScoreTables, head_times
from sparsekv.planner.prices import Floats, Prices
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.profile.search_space import ROUNDING
from sparsekv.plans.patterns import Pattern
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.types import format_length

# A density may be so much above its target: the mean of all prompts, of candidates that a preset fitted on one; and a
# faster choice.
TOLERANCE = 1.1
_DENSER = 1.3  # where a density is asked for, of a plan behind one that missed its test


def allocate(profile: Profile, cost: Prices, options: Settled, say: Callable[[str], None] | None = None) -> PrefillPlan:
    """The prefill phase of a plan: one bucket a profiled length, and an open-ended one with the tokens of the last. It
    is dense up to half of the shortest length, where nothing was measured. Above, budgets are shares of the context, so
    that early chunks of a prompt are about as dense as all of it.

    The damage of each bucket is at most the loss of the phase, or half of what the plan before lost at a length that
    missed its test; of a `target_density`, the density is at most that. The lengths of `options.dense` are dense.

    Args:
        options: settled for the profile.
        say: gets a line a length: the damage of the allocation, and how far above the least possible it may be.
    """
    buckets: list[PrefillBucket] = []
    last = PrefillBucket(up_to=None, dense=True)
    for entry in (entry for entry in profile.lengths if entry.layers):
        length = _Length(profile, entry, cost, options)
        choice = length.chosen(options)
        buckets.append(length.bucket(choice))
        last = length.beyond(choice)
        if say is not None and (line := length.told()):
            say(line)
    if buckets[0].up_to and buckets[0].up_to > 1:
        buckets.insert(0, PrefillBucket(up_to=buckets[0].up_to // 2, dense=True))
    # A dense bucket that a longer dense one follows is part of it.
    lengths = [bucket for bucket, after in pairwise([*buckets, last]) if not (bucket.dense and after.dense)]
    return PrefillPlan(tile=profile.tile, lengths=(*lengths, last))


def at_target(tables: ScoreTables, families: Collection[Family], target: float) -> Allocation:
    """The least damage at a mean density over all heads, or at the least one where nothing is so sparse."""
    present_LH, own_LCH = tables.present_LH, tables.of_families(families)
    cheapest_LH = np.minimum(np.where(own_LCH, tables.density_LCH, np.inf).min(1), 1.0)
    budget = max(target * int(present_LH.sum()), float(cheapest_LH[present_LH].sum())) * (1.0 + 1e-12)
    allocation = solve(tables.density_LCH, tables.damage_LCH, own_LCH, present_LH, budget)
    assert allocation is not None
    return allocation


def at_loss(tables: ScoreTables, families: Collection[Family], most: float) -> tuple[Choice, float]:
    """The least mean density over all heads with at most so much damage, and the damage."""
    own_LCH = tables.of_families(families)
    return least_cost(tables.density_LCH, tables.damage_LCH, own_LCH, tables.present_LH, most)


class _Length:
    """The allocation of one length."""

    def __init__(self, profile: Profile, entry: LengthProfile, cost: Prices, options: Settled) -> None:
        self._profile, self._entry = profile, entry
        self.tables = ScoreTables.of(entry)
        self._time_LCH = head_times(cost, self.tables)
        self._own_LCH = self.tables.of_families(options.families)
        self._families = options.families
        self._found: Allocation | None = None  # of the last budget that was asked for

    def chosen(self, options: Settled) -> Choice:
        """The least damage at the density that the options have, or that their loss gives; dense where they say so."""
        length, missed = self._entry.length, options.missed_at(self._entry.length)
        if length in options.dense or (self._profile.preset and missed):
            return self._dense
        if self._profile.preset:
            return self._least_damage(self._entry.densities[-1])
        if (target := options.target_at(length)) is None:
            return self._within(self._density_of(options.phase_loss, missed))
        return self._within(min(1.0, target * _DENSER**missed))

    def _density_of(self, loss: float, missed: int) -> float:
        """The least density whose damage is within the loss, of each plan behind one that missed its test half of the
        damage before."""
        choice, damage = at_loss(self.tables, self._families, loss)
        for _ in range(missed):
            choice, damage = at_loss(self.tables, self._families, damage / 2)
        return self.tables.density(choice)

    @property
    def _dense(self) -> Choice:
        return np.where(self.tables.present_LH, DENSE, ABSENT)

    def told(self) -> str | None:
        """The gap of the allocation to its bound, in a sentence; None of a preset."""
        if self._found is None:
            return None
        damage, bound = self._found.damage, self._found.bound
        gap = (damage - bound) / damage if damage > 0.0 else 0.0
        return (
            f"allocation at {format_length(self._entry.length)}: damage {damage:.3g} nats, "
            f"proven to be within {gap:.2%} of the least for its density"
        )

    def bucket(self, choice: Choice) -> PrefillBucket:
        """The choice as a bucket of this length, budgets as shares of the context."""
        groups = self._groups(choice, lambda pattern: pattern.of_context(self._entry.length))
        return PrefillBucket(up_to=self._entry.length, heads=groups, dense=not groups)

    def beyond(self, choice: Choice) -> PrefillBucket:
        """The choice at longer lengths, none of which was profiled: the same tokens however long, so that density
        falls."""
        groups = self._groups(choice, lambda pattern: pattern)
        return PrefillBucket(up_to=None, heads=groups, dense=not groups, extrapolated=bool(groups))

    def _groups(self, choice: Choice, written: Callable[[Pattern], Pattern]) -> tuple[HeadGroup, ...]:
        return tuple(
            HeadGroup(layer=scores.layer, heads=(head,), pattern=written(self.tables.pattern(choice, row, head)))
            for row, scores in enumerate(self._entry.layers)
            for head in np.flatnonzero(choice[row] >= 0).tolist()
        )

    def _within(self, target: float) -> Choice:
        """The least damage at a mean density over all heads."""
        self._found = self._faster(at_target(self.tables, self._families, target))
        return np.where(self.tables.present_LH, self._found.choice, ABSENT)

    def _faster(self, base: Allocation) -> Allocation:
        """The least time on the device for the damage of an allocation, or that itself where it is faster."""
        tables, time_LCH = self.tables, self._time_LCH
        most = base.damage * (1.0 + ROUNDING)
        choice, damage = least_cost(time_LCH, tables.damage_LCH, self._own_LCH, tables.present_LH, most)
        ours, theirs = (float(tables.take(time_LCH, pick, 1.0).sum()) for pick in (choice, base.choice))
        denser, dense = (float(tables.take(tables.density_LCH, pick, 1.0).sum()) for pick in (choice, base.choice))
        is_better = ours < theirs and denser <= TOLERANCE * dense
        return Allocation(choice, damage, min(base.bound, damage)) if is_better else base

    def _least_damage(self, target: float) -> Choice:
        """Algorithm 1 of MInference: for each head by itself, among candidates of one cost; a head without one is
        dense."""
        tables = self.tables
        # A range whose smallest pattern costs more than the target is not at the target cost.
        usable_LCH = self._own_LCH & (tables.density_LCH <= target * TOLERANCE)
        damage_LCH = np.where(usable_LCH, tables.damage_LCH, np.inf)
        return np.where(usable_LCH.any(1), damage_LCH.argmin(1), self._dense)


# --- one candidate for every head -------------------------------------------------------------------------------------

# Solved by the relaxation in which a head may take a mixture of candidates: on the lower convex hull of each head's
# (cost, damage), segments are bought in order of the damage that they save for their cost. The relaxed optimum bounds
# the real one from below, which gives the proven gap. Shapes: L layers, C slots of candidates, H heads.


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A choice for every head.

    Attributes:
        damage: the sum over all heads.
        bound: what no choice within the budget is below; never more than `damage`.
    """

    choice: Choice
    damage: float
    bound: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One segment of a head's hull, from the slot before it to a dearer one that does less damage."""

    slope: float  # damage for cost, negative
    layer: int
    head: int
    slot: int
    price: float
    saved: float


class _Hulls:
    """The hulls of all heads: the cheapest choice, and the steps from it, in order of the damage that they save for
    their cost."""

    def __init__(self, cost_LCH: Floats, damage_LCH: Floats, allowed_LCH: Mask, present_LH: Mask) -> None:
        self.choice = np.where(present_LH, DENSE, ABSENT)
        self.cost = self.damage = 0.0
        steps = []
        for layer, head in np.argwhere(present_LH).tolist():
            slots = np.flatnonzero(allowed_LCH[layer, :, head]).tolist()
            hull = _hull([(float(cost_LCH[layer, c, head]), float(damage_LCH[layer, c, head]), c) for c in slots])
            cheapest, least, self.choice[layer, head] = hull[0]
            self.cost, self.damage = self.cost + cheapest, self.damage + least
            for (low, worse, _), (high, better, slot) in pairwise(hull):
                saved, price = worse - better, high - low
                steps.append(_Step(-saved / price, layer, head, slot, price, saved))
        self.steps = sorted(steps, key=astuple)


def solve(
    cost_LCH: Floats, damage_LCH: Floats, allowed_LCH: Mask, present_LH: Mask, budget: float
) -> Allocation | None:
    """Least damage at a total cost of at most `budget`; None where the cheapest choice costs more, rounding aside.

    Args:
        cost_LCH, damage_LCH: of each slot; a dense head costs 1 and does no damage.
        allowed_LCH: slots that may be taken; a dense head always may.
        present_LH: heads that exist.
    """
    hulls = _Hulls(cost_LCH, damage_LCH, allowed_LCH, present_LH)
    choice, damage, left = hulls.choice, hulls.damage, budget - hulls.cost
    if left < -ROUNDING * budget:
        return None
    bound, is_bounded, stopped = damage, False, set()
    for step in hulls.steps:
        if not is_bounded:  # the relaxation takes the part of this step that fits, and nothing after it
            is_bounded = step.price > left
            bound -= min(step.saved, -step.slope * max(left, 0.0))
        if (step.layer, step.head) in stopped:
            continue
        if step.price <= left:
            choice[step.layer, step.head], left, damage = step.slot, left - step.price, damage - step.saved
        else:
            stopped.add((step.layer, step.head))  # later steps of a head stand on the earlier ones
    return Allocation(choice, max(damage, 0.0), max(min(bound, damage), 0.0))


def least_cost(
    cost_LCH: Floats, damage_LCH: Floats, allowed_LCH: Mask, present_LH: Mask, most: float
) -> tuple[Choice, float]:
    """Returns the choice of least cost whose damage is at most `most`, within one step of the best, and its damage."""
    hulls = _Hulls(cost_LCH, damage_LCH, allowed_LCH, present_LH)
    choice, damage = hulls.choice, hulls.damage
    for step in hulls.steps:
        if damage <= most:
            break
        choice[step.layer, step.head], damage = step.slot, damage - step.saved
    return choice, max(damage, 0.0)


def _hull(points: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """The lower convex hull of (cost, damage, slot) and of dense, ascending in cost, descending in damage."""
    hull: list[tuple[float, float, int]] = []
    for point in sorted([*points, (1.0, 0.0, DENSE)]):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _lies_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _lies_above(
    middle: tuple[float, float, int], left: tuple[float, float, int], right: tuple[float, float, int]
) -> bool:
    rise = (left[1] - middle[1]) * (right[0] - middle[0])
    return rise <= (middle[1] - right[1]) * (middle[0] - left[0])
