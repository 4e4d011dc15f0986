"""plan from kept files: seconds, no weights, and remarks that reach the user."""

import shutil
from pathlib import Path

import pytest
from model_folders import save_model
from planner_models import made_up_prices
from tiny_models import tiny_model

from sparsekv.cli.plan import PlanFlags, plan
from sparsekv.planner.prices import Prices
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.schema import Target

AGAIN = ("--lengths", "1k", "--only", "prefill", "--set", "target_density=0.7", "--no-verify")


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, and a cost of a device that is not here, where a tile costs a microsecond."""
    folder = tmp_path_factory.mktemp("kept")
    small = {"lengths": "1k", "tasks": "kv_retrieval", "calibration_samples": 1, "phases": "prefill", "tile": "64"}
    files = {"out": folder / "plan.yaml", "profile_out": folder / "profile", "cost_out": folder / "cost"}
    plan(PlanFlags(model=str(model), **small, **files, target_density="0.7", no_verify=True))
    shape = read_measured(Prices, folder / "cost").shape
    write_measured(made_up_prices(device="NVIDIA H200", shape=shape), folder / "cost")
    return folder


@pytest.fixture
def bare(model: Path, tmp_path: Path) -> Path:
    """The model without its weights."""
    return shutil.copytree(model, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))


def files(kept: Path) -> tuple[object, ...]:
    return ("--profile", kept / "profile", "--cost", kept / "cost")


def test_a_plan_from_files_needs_no_weights_and_says_so(sparsekv, bare, kept, tmp_path):
    done = sparsekv("plan", bare, "-o", tmp_path / "plan.yaml", *AGAIN, *files(kept))
    assert done.code == 0, done.err
    assert "the weights of" in done.err
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.targets[0].device == "NVIDIA H200"
    assert not plan.prefill.bucket(1024).dense


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_density_above_the_target_is_explained(sparsekv, bare, kept, tmp_path, as_json):
    shape = read_measured(Prices, kept / "cost").shape
    slow = made_up_prices(tiles=(0.0, 10.0), column=10.0, shape=shape)
    write_measured(slow, tmp_path / "cost")
    out = tmp_path / "plan.yaml"
    done = sparsekv(
        "plan", bare, "-o", out, *AGAIN, "--profile", kept / "profile", "--cost", tmp_path / "cost", *as_json
    )
    assert done.code == 0, done.err
    assert "prefill at 1k: dense is faster" in done.err
    assert "--lengths 1k,2k" in done.err
    assert load_plan(out).prefill.bucket(1024).dense


def test_a_profile_of_another_architecture_exits_with_3(sparsekv, kept, tmp_path):
    other = save_model(tiny_model(layers=2, context=2048), tmp_path / "other")
    done = sparsekv("plan", other, "-o", tmp_path / "plan.yaml", *AGAIN, *files(kept))
    assert done.code == 3
    assert "architecture" in done.err
    assert not (tmp_path / "plan.yaml").exists()


def test_a_plan_measured_elsewhere_is_told_once_by_run(sparsekv, model, kept, tmp_path):
    plan = load_plan(kept / "plan.yaml")
    elsewhere = Target(device="NVIDIA H200", backend="triton", dtype="bfloat16")
    write_plan(plan.model_copy(update={"targets": (elsewhere,)}), tmp_path / "plan.yaml")
    call = ("run", model, "--max-new-tokens", 1, "--prompt", "abc " * 50, "--raw")
    done = sparsekv(*call, "--plan", tmp_path / "plan.yaml")
    assert done.code == 0, done.err
    assert done.err.count("NVIDIA H200") == 1
    assert "warning" not in sparsekv(*call, "--plan", kept / "plan.yaml").err


def test_a_density_without_room_for_mandatory_tiles_is_refused_before_profiling(sparsekv, model, tmp_path):
    done = sparsekv("plan", model, "-o", tmp_path / "plan.yaml", "--lengths", "1k", "--set", "target_density=0.2")
    assert (done.code, done.out) == (2, "")
    assert "0.584" in done.err
    assert "profile (1 of" not in done.err
    assert list(tmp_path.iterdir()) == []
