"""Progress where there is no terminal."""

import io

from rich.console import Console

from sparsekv.planner.progress import BarProgress, Stages


def told(seconds: float, steps: int) -> list[str]:
    text = io.StringIO()
    with BarProgress(Console(file=text, width=200), seconds).stage("evaluate", total=3) as step:
        for number in range(steps):
            step.advance(note=f"prompt {number + 1}")
    return text.getvalue().splitlines()


def test_a_log_hears_of_a_stage_before_it_ends() -> None:
    first, *between, last = told(0.0, 2)
    assert first == "evaluate ..."
    assert between == ["evaluate: 33%, prompt 1", "evaluate: 67%, prompt 2"]
    assert last.startswith("evaluate: done")


def test_a_log_is_not_flooded() -> None:
    assert len(told(3600.0, 3)) == 2


def test_what_is_said_once_reaches_the_log_as_it_is() -> None:
    text = io.StringIO()
    Stages(BarProgress(Console(file=text, width=20)), ("profile",)).say("profile resumed: [1] of 12 samples")
    assert text.getvalue() == "profile resumed: [1] of 12 samples\n"


def test_stages_of_a_longer_run_are_numbered() -> None:
    text = io.StringIO()
    stages = Stages(BarProgress(Console(file=text, width=200)), ("profile", "cost", "evaluate"))
    with stages.stage("cost", total=1):
        pass
    assert text.getvalue().startswith("cost (2 of 3) ...")
