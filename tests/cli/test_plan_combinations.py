"""plan: what was measured before, what is left out, and what is planned, in every combination."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from plans_samples import quality_at

from sparsekv.planner.eviction_search import rules_of
from sparsekv.planner.fixed_test import SMALL, FixedTest
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.planner.verify import Verification
from sparsekv.plans.files import load_plan

PROVEN = Verification(quality_at(1024), FixedTest(SMALL, 0.025, (), {}), ())
CHOICES: dict[str, tuple[Any, ...]] = {
    "profile": (None, "of tasks", "of own texts"),
    "samples": (None, 1),
    "no_verify": (False, True),
    "retain": (None, 0.5),
    "only": (None, "prefill", "decode"),
}


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with profiles."""
    from sparsekv.cli.main import main

    folder = tmp_path_factory.mktemp("kept")
    quick = ("--lengths", "1k", "--set", "calibration_samples=1", "--set", "tasks=kv_retrieval", "--no-verify")
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(model), "-o", str(folder / "plan"), *quick, "--profile-out", str(folder / "of tasks")])
    assert not stop.value.code
    own = read_measured(Profile, folder / "of tasks").model_copy(update={"tasks": ()})
    write_measured(own, folder / "of own texts")
    return folder


@pytest.fixture
def stand_ins(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that draw their prompts, and measure nothing."""
    instead = {
        "profile": lambda job, *_: (job.prompts, read_measured(Profile, kept / "of tasks"))[1],
        "refine": lambda job, measured, *_: measured,
        "measure_trials": lambda job, measured, *_: measured,
        "search_eviction": lambda job, *_: (job.calibration_prompts(1024, 1) and rules_of(job.model, {0: 0.5}), ()),
        "verify": lambda *_, **__: PROVEN,
    }
    for name, stage in instead.items():
        monkeypatch.setattr(f"sparsekv.planner.plan.{name}", stage)
    monkeypatch.setattr("sparsekv.planner.job.solved_tasks", lambda *_, **__: ())


@pytest.mark.parametrize(tuple(CHOICES), [*product(*CHOICES.values())])
def test_every_combination_makes_a_plan_or_is_refused(
    sparsekv, model, kept, tmp_path, stand_ins, profile, samples, no_verify, retain, only
):
    given = {"--retain": retain, "--only": only}
    given |= {"--set": samples and f"calibration_samples={samples}"}
    given |= {"--profile": profile and kept / profile}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    out = tmp_path / "plan.yaml"
    done = sparsekv("plan", model, "-o", out, "--lengths", "1k", "--json", *flags, *["--no-verify"] * no_verify)
    if (profile and samples) or (retain and only):
        assert done.code == 2, done.err
        assert not out.exists()
        return
    assert done.code == 0, done.err
    plan = load_plan(out)
    assert (plan.prefill is None, plan.decode is None) == (only == "decode", only == "prefill" or bool(retain))
    assert bool(plan.evicting) == bool(retain)
