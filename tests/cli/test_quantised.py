"""Quantised checkpoints on the command line: planned by their own weights, and run by the plan of the base model."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from model_folders import save_model, sparse_plan
from quantised_folders import fp8_by_tensor, quantise
from tiny_models import tiny_model

from sparsekv.planner.job import job_of
from sparsekv.planner.options import PlanOptions
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.model import differences
from sparsekv.runtime.hf.load import load_model
from sparsekv.runtime.hf.memory import Available
from sparsekv.runtime.hub import model_folder

FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FAST = (
    "--lengths",
    "1k",
    "--set",
    "tasks=kv_retrieval",
    "--set",
    "calibration_samples=1",
    "--only",
    "prefill",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(context=2048), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def twin(base) -> Path:
    return quantise(base, FP8, fp8_by_tensor)[0]


def run(sparsekv, model, plan):
    return sparsekv("run", model, "--plan", plan, "--prompt", "word " * 60, "--max-new-tokens", 2)


def test_the_plan_of_the_base_model_runs_and_says_in_one_line_that_its_quality_was_measured_on_other_weights(
    sparsekv, base, twin, tmp_path
):
    write_plan(sparse_plan(load_model(base).model), tmp_path / "base.yaml")
    done = run(sparsekv, twin, tmp_path / "base.yaml")
    assert done.code == 0, done.err
    assert ["other weights" in line for line in done.err.splitlines() if line.startswith("warning: ")] == [True]
    assert "quantised weights run as float32" in done.err


def test_a_quantised_model_is_planned_verified_and_run_as_itself(sparsekv, base, twin, tmp_path):
    out = tmp_path / "own.yaml"
    done = sparsekv("plan", twin, "-o", out, *FAST)
    assert done.code == 0, done.err
    assert load_plan(out).model == load_model(twin).info
    assert differences(load_plan(out).model, load_model(base).info) == ()
    assert "other weights" not in run(sparsekv, twin, out).err
    done = sparsekv("verify", twin, "--plan", out, "--write", *FAST[:2])
    assert "other weights" not in done.err
    assert done.code in (0, 1), done.err


def test_weights_that_stay_packed_are_not_refused_for_the_bytes_that_they_would_have(
    sparsekv, base, tmp_path, monkeypatch
):
    def load(*args, **options):
        raise UsageError("its weights are read")

    folder = shutil.copytree(base, tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sparsekv.runtime.hf.memory.Available.here", lambda devices: Available(1 << 10, 0))
    monkeypatch.setattr("sparsekv.runtime.hf.load.load_model", load)
    out = tmp_path / "plan.yaml"
    assert "its weights are read" in sparsekv("plan", folder, "-o", out, *FAST).err
    assert "for the weights of" in sparsekv("plan", base, "-o", out, *FAST).err


def test_a_model_that_was_loaded_quantised_is_refused_before_it_is_profiled(base):
    loaded = load_model(base)
    loaded.model.config.quantization_config = FP8
    with pytest.raises(UsageError, match=r"gradients go through.*fp8"):
        job_of(loaded, PlanOptions(lengths=(1024,)))


def test_a_quantised_model_of_the_hub_is_read_from_its_cache(twin, tmp_path, monkeypatch):
    repository = tmp_path / "models--example--tiny"
    shutil.copytree(twin, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_model("example/tiny", local_files_only=True)
    assert loaded.info.fingerprint == load_model(twin).info.fingerprint
    assert (loaded.info.id, loaded.model.name_or_path) == ("example/tiny", "example/tiny")
    assert model_folder("example/tiny") == repository / "snapshots" / "abc"
    assert model_folder("example/other") is None
