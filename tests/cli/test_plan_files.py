"""Where plans lie, and what is checked of them without a model; what is said of them is in test_messages.py."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from plans_samples import small_plan

from sparsekv.cli.plan_files import default_plan, outcomes_beside
from sparsekv.plans.files import write_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(small_plan(), path)
    return path


def test_the_pre_commit_hook_checks_the_plans_of_a_model_repository(sparsekv, plan, tmp_path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["language"]) == ("sparsekv-validate", "python")
    for name in ("sparsekv.yaml", "sub/sparsekv.yml", "long.sparsekv.yaml"):
        assert re.search(hook["files"], name)
    for name in ("config.yaml", "notsparsekv.yaml", "sparsekv.yaml.txt", "sparsekv.yaml/x"):
        assert not re.search(hook["files"], name)
    program, *arguments = hook["entry"].split()
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (tmp_path / "sparsekv.yaml").write_bytes(plan.read_bytes())
    assert sparsekv(*arguments, *hook.get("args", ()), plan, tmp_path / "sparsekv.yaml").code == 0


def test_outcomes_are_beside_the_plan_that_a_link_leads_to(tmp_path):
    (tmp_path / "store").mkdir()
    (link := tmp_path / "link.yaml").symlink_to(tmp_path / "store/plan.yaml")
    assert outcomes_beside(link) == outcomes_beside(tmp_path / "store/plan.yaml")
    assert outcomes_beside(link).parent == tmp_path / "store"


def test_schema_is_a_json_schema_that_names_every_part(sparsekv):
    schema = sparsekv("schema").data
    assert {"kind", "model", "prefill", "decode", "quality"} <= schema["properties"].keys()


def test_a_plan_goes_beside_a_model_that_lies_here_and_else_where_the_command_runs(model):
    assert default_plan(str(model)) == model / "sparsekv.yaml"
    assert default_plan("tiny-retriever") == Path("tiny-retriever.sparsekv.yaml")
    assert default_plan("Qwen/Qwen2.5-0.5B") == Path("Qwen2.5-0.5B.sparsekv.yaml")
    assert default_plan("files/small.gguf") == Path("files/sparsekv.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused(sparsekv, model, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    done = sparsekv("plan", model, "-o", tmp_path / "closed/plan.yaml")
    assert (done.code, "cannot be written" in done.err) == (2, True)
