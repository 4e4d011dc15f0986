"""Exact output: what drafts are predicted to gain, and the line that says so."""

import pytest
from plans_samples import quality_at, small_plan

from sparsekv.plans.brief import DRAFTS, exact_gains, exact_line, gain_of, tokens_a_cycle
from sparsekv.plans.schema import Cost, Prediction, WholeStep


def planned(steps: dict[int, tuple[float, float]], top1: float | None = 0.975, own: dict[int, float] | None = None):
    """A plan with dense and sparse steps of so many milliseconds at each length."""
    lengths = tuple(
        Prediction(length=length, step=WholeStep(dense_us=1e3 * dense, sparse_us=1e3 * sparse, token_us=0.0))
        for length, (dense, sparse) in steps.items()
    )
    measured = [quality_at(n, agreed=(own or {}).get(n, top1)).lengths[0] for n in steps]
    quality = quality_at().model_copy(update={"lengths": tuple(measured)})
    return small_plan(cost=Cost(device="made up", backend="flash", lengths=lengths), quality=quality)


def test_tokens_of_a_cycle_are_those_of_every_outcome() -> None:
    """Drafts count up to the first that does not, and a token follows."""
    share, drafted = 0.9, 4
    expected = sum(share**n * (1 - share) * (n + 1) for n in range(drafted)) + share**drafted * (drafted + 1)
    assert tokens_a_cycle(share, drafted) == pytest.approx(expected)
    assert tokens_a_cycle(1.0, drafted) == drafted + 1
    assert tokens_a_cycle(0.5, 0) == 1


@pytest.mark.parametrize(
    ("dense_ms", "sparse_ms", "gain"), [(11.3, 8.1, 1.2), (24.4, 10.8, 1.77), (23.0, 9.3, 1.9), (23.0, 10.7, 1.7)]
)
def test_steps_measured_on_a_gpu_gain_what_paper_and_pencil_give(dense_ms, sparse_ms, gain) -> None:
    step = WholeStep(dense_us=1e3 * dense_ms, sparse_us=1e3 * sparse_ms, token_us=0.0)
    assert gain_of(step, 0.975, 6) == pytest.approx(gain, rel=0.03)
    slower = step.model_copy(update={"token_us": 150.0})
    cycle_us = 1e3 * dense_ms + 6 * (1e3 * sparse_ms + 150.0)
    assert gain_of(slower, 0.975, 6) == pytest.approx(tokens_a_cycle(0.975, 6) * 1e3 * dense_ms / cycle_us)


def test_the_line_names_the_first_length_from_which_on_it_pays() -> None:
    plan = planned({8192: (6.0, 6.1), 32768: (7.0, 5.0), 65536: (8.0, 8.0), 131072: (11.3, 8.1), 524288: (23.0, 10.0)})
    line = exact_line(plan)
    assert line is not None
    assert all(said in line for said in ("1.23x", "128k", "4 drafts", "97.5%"))
    assert [gain.drafted in DRAFTS for gain in exact_gains(plan)] == [True] * 5
    assert next(iter(exact_gains(plan))).ratio == 1.0


def test_a_length_that_was_measured_has_an_agreement_of_its_own() -> None:
    plan = planned({32768: (24.4, 10.8), 131072: (24.4, 10.8)}, own={131072: 0.5})
    assert [gain.agreement for gain in exact_gains(plan)] == [0.975, 0.5]
    assert "not pay" in (exact_line(plan) or "")


def test_nothing_is_said_where_steps_or_agreement_are_not_known() -> None:
    plan = planned({32768: (24.4, 10.8)})
    assert exact_line(planned({32768: (24.4, 10.8)}, top1=None)) is None
    assert exact_line(plan.model_copy(update={"quality": None})) is None
    assert exact_line(plan.model_copy(update={"cost": None})) is None
