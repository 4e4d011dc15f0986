"""One candidate for every head: least damage within a budget.

Solved by the relaxation in which a head may take a mixture of candidates: on the lower convex hull of each head's
(cost, damage), segments are bought in order of the damage that they save for their cost. The relaxed optimum bounds the
real one from below, which gives the proven gap.

Shapes: L layers, C slots of candidates, H heads.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from sparsekv.planner.predict import ABSENT, DENSE, Choice, Mask
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.search_space import ROUNDING


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
