"""Shares of attention that plans of real models came to, by length: for shapes, whose random weights have none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from sparsekv.bench.own_file import OwnFile, OwnPlan, OwnRun, plan_of
from sparsekv.planner.options import density_for
from sparsekv.planner.records import RunFile
from sparsekv.plans.types import and_listed, format_length

RESULTS = Path(__file__).parent / "results"
_DEFAULT = "vertical_slash"  # the family that `plan` searches by default


@dataclass(frozen=True, slots=True)
class RealShare:
    """The share of a prompt's tiles that is computed, by heads of these families, that of the cached tokens that a step
    reads, and whose shares these are; a plan that is dense there counts as such. `decode` is None where none is sparse.
    """

    prefill: float
    families: tuple[str, ...]
    words: str
    decode: float | None = None
    verdicts: str = ""


def share_at(length: int, folder: Path = RESULTS) -> RealShare:
    """The geometric mean over the plans in `folder` that reach a length on both sides, each interpolated in log length
    unless it is dense at one of both; where none is sparse, the usual share of the planner."""
    files = {file.settings.model: plan_of(file) for file in map(_read, sorted(folder.glob("*.json")))}
    prefill = _interpolated(files, length, "prefill")
    if not prefill:
        words = f"as the planner begins at {format_length(length)}: no plan of a real model is measured as sparse there"
        return RealShare(density_for(length), (_DEFAULT,), words)
    decode = _interpolated(files, length, "decode")
    families = dict.fromkeys(name for model, share in prefill.items() if share < 1.0 for name in files[model].families)
    of_plans = "of the plan" if len(prefill) == 1 else "of the plans, their mean,"
    return RealShare(
        _mean(prefill),
        tuple(families),
        f"{of_plans} of {and_listed(prefill)} at {format_length(length)}",
        _mean(decode) if decode else None,
        "; ".join(f"{model}: {files[model].verdict}" for model in decode),
    )


def _read(path: Path) -> OwnFile:
    file: OwnFile = RunFile.read(OwnRun, path)
    return file


def _mean(shares: Mapping[str, float]) -> float:
    return round(math.exp(math.fsum(map(math.log, shares.values())) / len(shares)), 4)


def _interpolated(files: Mapping[str, OwnPlan], length: int, phase: Literal["prefill", "decode"]) -> dict[str, float]:
    """By model, of those whose plan tells it; none where all are dense."""
    shares = {model: _between(_points(plan, phase), length) for model, plan in files.items()}
    known = {model: share for model, share in shares.items() if share is not None}
    return known if any(share < 1.0 for share in known.values()) else {}


def _points(plan: OwnPlan, phase: str) -> list[tuple[int, float]]:
    shares = [(one.length, getattr(one, phase)) for one in plan.lengths]
    return [(length, share) for length, share in shares if share is not None]


def _between(points: Sequence[tuple[int, float]], length: int) -> float | None:
    for low, high in pairwise(points):
        if low[0] < length < high[0] and (low[1] < 1.0) == (high[1] < 1.0):
            part = math.log(length / low[0]) / math.log(high[0] / low[0])
            return math.exp(math.log(low[1]) + part * math.log(high[1] / low[1]))
    return dict(points).get(length)
