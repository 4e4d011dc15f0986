"""plan from kept files: seconds, no weights, and remarks that reach the user."""

import shutil
from pathlib import Path

import pytest

from sparsekv.cli.plan import PlanFlags, plan
from sparsekv.plans.files import load_plan

AGAIN = ("--lengths", "1k", "--only", "prefill", "--set", "target_density=0.7", "--no-verify")


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile."""
    folder = tmp_path_factory.mktemp("kept")
    small = {"lengths": "1k", "tasks": "kv_retrieval", "calibration_samples": 1, "phases": "prefill", "tile": "64"}
    files = {"out": folder / "plan.yaml", "profile_out": folder / "profile"}
    plan(PlanFlags(model=str(model), **small, **files, target_density="0.7", no_verify=True))
    return folder


@pytest.fixture
def bare(model: Path, tmp_path: Path) -> Path:
    """The model without its weights."""
    return shutil.copytree(model, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))


def test_a_plan_from_files_needs_no_weights_and_says_so(sparsekv, bare, kept, tmp_path):
    done = sparsekv("plan", bare, "-o", tmp_path / "plan.yaml", *AGAIN, "--profile", kept / "profile")
    assert done.code == 0, done.err
    assert "the weights of" in done.err
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.targets == load_plan(kept / "plan.yaml").targets
    assert not plan.prefill.bucket(1024).dense


def test_a_density_without_room_for_mandatory_tiles_is_refused_before_profiling(sparsekv, model, tmp_path):
    done = sparsekv("plan", model, "-o", tmp_path / "plan.yaml", "--lengths", "1k", "--set", "target_density=0.2")
    assert (done.code, done.out) == (2, "")
    assert "0.584" in done.err
    assert "profile (1 of" not in done.err
    assert list(tmp_path.iterdir()) == []
