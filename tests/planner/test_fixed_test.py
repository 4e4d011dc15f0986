"""The fixed test by itself: bounds by enumeration, and how often plans of known losses are verified."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import comb

import numpy as np
import pytest
from scipy.stats import beta, binom

from sparsekv.planner.fixed_test import (
    FULL,
    LONG,
    RUNGS,
    SMALL,
    TURNS,
    Cell,
    FixedTest,
    Sizes,
    divergence_bounds,
    level_of_run,
    loss_bound,
    mean_bound,
    missing_prompts,
    more_prompts,
    net_loss_bound,
    net_loss_score,
)
from sparsekv.planner.verify_cells import TESTED, cells_tested

SEEDS, LENGTH = 1000, 8192
RIGHT = (0.65, 0.80, 0.95, 1.0)
CASES = [*product((SMALL, FULL), (1, 3), RIGHT)]
NAMES = [f"{'small' if size == SMALL else 'full'}-{lengths}-{right}" for size, lengths, right in CASES]


@dataclass(frozen=True)
class Made:
    """A plan of known losses: shares of prompts lost and won, and of the answered ones of one cell lost."""

    lost: float
    won: float
    cell: float | None = None
    nats: float = 0.01


def lossless(right: float) -> Made:
    return Made(0.02, 0.02) if right < 1.0 else Made(0.01, 0.0)


def drawn(made: Made, sizes: Sizes, cells: int, right: float, seeds: int) -> np.ndarray:
    """[seed, cell, 4]: prompts, answered, lost and won, by the rules that a run draws by."""
    rng, most = np.random.default_rng(0), sizes.tried + 2 * sizes.judged // cells
    dense, chance = rng.random((seeds, cells, most)) < right, rng.random((seeds, cells, most))
    losing = np.full((cells, 1), made.lost / right)
    losing[0] = losing[0] if made.cell is None else made.cell
    lost, won = dense & (chance < losing), ~dense & (chance < made.won / max(1.0 - right, 1e-9))
    answered = dense[..., : sizes.tried].cumsum(2)
    is_judged = answered[..., -1] >= sizes.answered
    prompts = np.where(is_judged, (answered < sizes.answered).sum(2) + 1, sizes.tried)
    first = np.where(is_judged, prompts, 0).sum(1)
    more = np.ceil(np.maximum(0, sizes.judged - first) / np.maximum(1, is_judged.sum(1))).astype(int)
    prompts = prompts + is_judged * more[:, None]
    counts = np.arange(most) < prompts[..., None]
    return np.stack([prompts, *((one & counts).sum(2) for one in (dense, lost, won))], 2)


def verifies(test: FixedTest) -> bool:
    return not test.too_few and all(bound.is_met for bound in test.bounds)  # up to the first one that is not


def passes(
    made: Made, sizes: Sizes, lengths: int, right: float, *levels: float, judged: bool = False
) -> tuple[np.ndarray, int]:
    """The seeds that a plan is verified in, by level, and of how many; where asked for, of those with its worst cell
    judged."""
    tested = cells_tested((*TESTED, TURNS), range(LENGTH, LENGTH * (lengths + 1), LENGTH))
    counts = drawn(made, sizes, len(tested), right, SEEDS)
    rng, passed, runs = np.random.default_rng(1), np.zeros(len(levels)), 0
    for rows in counts.tolist():
        cells = tuple(Cell(task, length, *row) for (length, task), row in zip(tested, rows, strict=True))
        excess = {
            length: made.nats * rng.lognormal(-0.5, 1.0, sum(one.prompts for one in cells if one.length == length))
            for length in range(LENGTH, LENGTH * (lengths + 1), LENGTH)
        }
        if judged and cells[0].answered < sizes.answered:
            continue
        runs += 1
        passed += [verifies(FixedTest(sizes, level, cells, excess)) for level in levels]
    return passed, runs


def verified(*args: object) -> list[float]:
    """The share of seeds that a plan is verified in, by level."""
    passed, runs = passes(*args)
    return (passed / runs).tolist()


def upper99(passed: np.ndarray, runs: int) -> float:
    return float(beta.ppf(0.99, passed[0] + 1, runs - passed[0]))


@pytest.mark.parametrize(("size", "lengths", "right"), CASES, ids=NAMES)
def test_lossless_plans_are_verified(size: Sizes, lengths: int, right: float) -> None:
    first, second = verified(lossless(right), size, lengths, right, *RUNGS[:2])

    assert first >= 0.93
    assert second >= 0.90


@pytest.mark.parametrize(("size", "lengths", "right"), CASES, ids=NAMES)
def test_plans_that_lose_what_is_excluded_are_not(size: Sizes, lengths: int, right: float) -> None:
    sizes, won = size, 0.02 if right < 1.0 else 0.0
    overall = passes(Made(sizes.net_loss + won, won), sizes, lengths, right, RUNGS[0])
    no_loss = lossless(right)
    cell, windows = (
        passes(Made(no_loss.lost, no_loss.won, share), sizes, lengths, right, RUNGS[0], judged=True)
        for share in (sizes.cell_loss, 0.6)
    )

    assert upper99(*overall) < 0.05
    assert upper99(*cell) < 0.05
    assert windows[0] == [0]


def test_a_plan_far_from_dense_is_not_verified_whatever_it_answers() -> None:
    assert verified(Made(0.0, 0.0, nats=0.04), SMALL, 1, 0.95, RUNGS[0]) == [0.0]


def test_cells_that_dense_cannot_answer_pass_nothing() -> None:
    names = ("a", "b", TURNS, "c", "d", "e")
    cells = tuple(Cell(name, LENGTH, 40, 40 if i < 3 else 3, 0, 0) for i, name in enumerate(names))
    found = FixedTest(SMALL, RUNGS[0], cells, {})

    assert [one.task for one in found.judged] == ["a", "b", TURNS]
    assert found.too_few == (LENGTH,)
    assert not verifies(found)


def test_long_prompts_are_tested_together() -> None:
    def run(lost: int, answered: int) -> FixedTest:
        cells = tuple(Cell(f"{i}", 2 * LONG, 12, answered, lost if i == 0 else 0, 5) for i in range(6))
        return FixedTest(SMALL, RUNGS[0], cells, {})

    assert [bound.limit for bound in run(1, 8).bounds] == [0.20]  # of losses alone: wins count for nothing
    assert verifies(run(4, 8))
    assert not verifies(run(5, 8))
    assert run(0, 7).too_few == (2 * LONG,)


def test_a_cell_is_given_up_once_it_cannot_be_judged() -> None:
    small = SMALL
    draws = [missing_prompts(small, *tried) for tried in ((0, 0), (21, 20), (21, 21), (40, 20), (22, 2), (21, 2))]

    assert draws == [21, 1, 0, 0, 0, 19]


def test_more_prompts_are_drawn_evenly() -> None:
    cells = [Cell(f"{i}", LENGTH, 22, 21, 0, 0) for i in range(6)]

    assert more_prompts(SMALL, cells) == 26
    assert more_prompts(SMALL, cells * 3) == 0
    assert more_prompts(SMALL, []) == 0


def test_levels_of_all_runs_stay_within_the_budget() -> None:
    runs = [level_of_run(number) for number in range(1, 10_000)]

    assert runs[0] == RUNGS[0]
    assert sum(RUNGS) == 0.05
    assert sum(RUNGS) + sum(runs[1:]) <= 0.075


@pytest.mark.parametrize(("prompts", "share"), [(21, 0.40), (47, 0.25), (48, 0.20)])
def test_losses_of_a_cell_are_bounded_exactly(prompts: int, share: float) -> None:
    for level in (0.025, 0.0125, 0.05 / 6):
        allowed = [lost for lost in range(prompts) if loss_bound(lost, prompts, level) <= share]

        assert binom.cdf(allowed[-1], prompts, share) <= level < binom.cdf(allowed[-1] + 1, prompts, share)


@pytest.mark.parametrize("prompts", [60, 120])
@pytest.mark.parametrize("won", [0.0, 0.02, 0.1])
def test_net_loss_is_bounded_at_its_level(prompts: int, won: float) -> None:
    level, share = 0.025, 0.10
    lost, wins = share + won, won
    wrong = sum(
        comb(prompts, b) * comb(prompts - b, c) * lost**b * wins**c * (1 - lost - wins) ** (prompts - b - c)
        for b in range(prompts + 1)
        for c in range(prompts + 1 - b)
        if net_loss_score(b, c, prompts, share) <= -1.95996
    )

    assert wrong <= 1.1 * level  # a score test of counts exceeds its level by little


def test_net_loss_bounds_are_where_the_score_is() -> None:
    for lost, won, prompts in ((0, 0, 288), (6, 6, 288), (3, 9, 288), (20, 1, 720)):
        bound = net_loss_bound(lost, won, prompts, 0.025)

        assert net_loss_score(lost, won, prompts, bound) == pytest.approx(-1.95996, abs=1e-4)


def test_means_of_skewed_values_are_bounded() -> None:
    rng = np.random.default_rng(0)
    below = np.mean([mean_bound(rng.lognormal(-0.5, 1.0, 96)) < 1.0 for _ in range(2000)])

    assert below < 0.08


def test_the_worst_tenth_is_bounded_above_its_mean() -> None:
    values = np.r_[np.zeros(90), np.full(10, 0.15)]
    mean, worst = divergence_bounds(LENGTH, values)

    assert worst.mean == pytest.approx(0.15)
    assert mean.mean < mean.upper
    assert worst.mean < worst.upper
