"""Plans of the reference model that were made bad are never verified: their outcomes on held-out samples, recorded by
tools/record_bad_plans.py, are drawn again and again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sparsekv.planner.evaluation.results import EvalResult, TaskResult
from sparsekv.planner.gates import Measured, claims_of
from sparsekv.planner.options import Gate
from sparsekv.planner.outcomes_file import ModeOutcomes
from sparsekv.plans.schema import Claim

PLANS = json.loads((Path(__file__).parents[1] / "data" / "bad_plans.json").read_text())["plans"]
BAD = tuple(name for name in PLANS if name != "good")
ROUNDS = 60  # samples of each task: 480 prompts, three times what a good plan takes


def recorded(name: str) -> tuple[str, EvalResult]:
    found = ModeOutcomes.model_validate(PLANS[name])
    return found.mode, found.result


def claims(phase: str, result: EvalResult) -> list[Claim]:
    """Those after all of its samples. What was met at an earlier look is met there."""
    found = claims_of({phase: [Measured.of(result, None)]}, Gate(), bounded=False)
    return [claim for _, claim in found[phase].named]


def resampled(result: EvalResult, rng: np.random.Generator) -> EvalResult:
    def of(task: TaskResult) -> TaskResult:
        drawn: Sequence[int] = rng.integers(len(task.dense), size=ROUNDS)
        return TaskResult(tuple(task.dense[at] for at in drawn), tuple(task.sparse[at] for at in drawn))

    return EvalResult(result.lengths, {name: of(task) for name, task in result.tasks.items()}, result.spent)


def times_verified(name: str, resamples: int) -> int:
    phase, result = recorded(name)
    rng = np.random.default_rng(0)
    again = (claims(phase, resampled(result, rng)) for _ in range(resamples))
    return sum(all(claim.outcome == "met" for claim in found) for found in again)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_never_verified(name: str) -> None:
    assert any(claim.mean > claim.gate for claim in claims(*recorded(name)))  # it is bad
    assert times_verified(name, 200) == 0


def test_a_good_plan_mostly_is() -> None:
    assert times_verified("good", 20) >= 18
