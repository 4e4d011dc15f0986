"""Progress where there is no terminal."""

import io
import re

from rich.console import Console

from sparsekv.planner.progress import BarProgress


def told(seconds: float, steps: int) -> list[str]:
    text = io.StringIO()
    with BarProgress(Console(file=text, width=200), seconds).stage("evaluate", total=3) as step:
        for number in range(steps):
            step.advance(note=f"prompt {number + 1}")
    return re.sub(r"in \d+ s$", "in N s", text.getvalue(), flags=re.MULTILINE).splitlines()


def test_a_log_hears_of_a_stage_before_it_ends() -> None:
    assert told(0.0, 2) == [
        "evaluate ...",
        "evaluate: 1 of 3 prompt 1",
        "evaluate: 2 of 3 prompt 2",
        "evaluate: done in N s",
    ]


def test_a_log_is_not_flooded() -> None:
    assert told(3600.0, 3) == ["evaluate ...", "evaluate: done in N s"]
