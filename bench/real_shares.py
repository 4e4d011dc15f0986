"""Shares of attention that plans of real models came to, by length: for shapes, whose random weights have none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sparsekv.bench.own_file import OwnFile, OwnLength, OwnRun, plan_of
from sparsekv.planner.options import density_for
from sparsekv.plans.types import and_listed, format_length

RESULTS = Path(__file__).parent / "results"
_DEFAULT = "vertical_slash"  # the family that `plan` searches by default


@dataclass(frozen=True, slots=True)
class RealShare:
    """The share of a prompt's tiles that is computed, by heads of these families; and whose share that is."""

    prefill: float
    families: tuple[str, ...]
    words: str


def share_at(length: int, folder: Path = RESULTS) -> RealShare:
    """The geometric mean over the plans in `folder` that reach a length on both sides, each interpolated in log length;
    where none does, the usual share of the planner."""
    files = [OwnFile.read(OwnRun, path) for path in sorted(folder.glob("*.json"))]
    shares = {file.settings.model: _interpolated(plan_of(file).lengths, length) for file in files}
    found = {model: share for model, share in shares.items() if share is not None}
    if not found:
        words = (
            f"as the planner begins at {format_length(length)}: no plan of a real model that was measured is so long"
        )
        return RealShare(density_for(length), (_DEFAULT,), words)
    families = dict.fromkeys(name for file in files if file.settings.model in found for name in plan_of(file).families)
    mean = math.exp(math.fsum(map(math.log, found.values())) / len(found))
    of_plans = "of the plan" if len(found) == 1 else "of the plans, their mean,"
    return RealShare(round(mean, 4), tuple(families), f"{of_plans} of {and_listed(found)} at {format_length(length)}")


def _interpolated(lengths: Sequence[OwnLength], length: int) -> float | None:
    points = [(one.length, one.prefill) for one in lengths if one.prefill < 1.0]
    for low, high in pairwise([*points, *points[-1:]]):
        if low[0] <= length <= high[0]:
            part = math.log(length / low[0]) / math.log(high[0] / low[0]) if high[0] > low[0] else 0.0
            return math.exp(math.log(low[1]) + part * math.log(high[1] / low[1]))
    return None
