"""Progress where there is no terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from sparsekv.planner.progress import BarProgress, prefill_work


def told(step_seconds: float, steps: int, total: float | None = 4, **console: Any) -> list[str]:
    """What is printed of a stage with steps of so many seconds each."""
    text, now = io.StringIO(), [0.0]
    with BarProgress(Console(file=text, get_time=lambda: now[0], **console)).stage("evaluate", total) as step:
        for number in range(steps):
            now[0] += step_seconds
            step.advance(note=f"prompt {number + 1}")
    return text.getvalue().splitlines()


def test_a_log_hears_of_a_stage_before_it_ends_how_far_it_is_and_how_long_it_will_take() -> None:
    assert told(100.0, 3) == [
        "evaluate ...",
        "evaluate: 25% in 0:01:40, prompt 1",
        "evaluate: 50% in 0:03:20, about 0:03:20 left, prompt 2",
        "evaluate: 75% in 0:05:00, about 0:01:40 left, prompt 3",
        "evaluate: done in 300 s",
    ]


@pytest.mark.parametrize("console", [{"width": 80}, {"width": 80, "force_terminal": True, "color_system": None}])
def test_no_time_left_is_told_of_the_first_units_which_pay_for_warming_up(console: dict[str, Any]) -> None:
    early, later = (" ".join(told(100.0, steps, total=100, **console)) for steps in (4, 6))
    left = "2:36:40"  # 94 of 100 units
    assert left in later
    assert "2:40:00" not in early  # 96 units


def test_a_prompt_counts_by_its_time_not_as_one() -> None:
    assert prefill_work(2048) > 2 * prefill_work(1024)
    assert prefill_work(1 << 17) > 3.5 * prefill_work(1 << 16)
