"""validate, show, seal and schema: commands that need a plan file and nothing else."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from plans_samples import full_plan, small_plan

from sparsekv.cli.plan_files import outcomes_beside
from sparsekv.plans.files import dump_plan, write_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(small_plan(), path)
    return path


def test_validate_json_tells_sound_and_unsound_plans_apart(sparsekv, plan):
    assert sparsekv("validate", plan, "--json").data["valid"] is True
    plan.write_text(plan.read_text().replace("tokens: 1024", "tokens: 2048"))
    done = sparsekv("validate", plan, "--json")
    assert done.code == done.data["error"]["exit_code"] == 1
    assert done.data["valid"] is False
    assert "seal" in done.data["error"]["message"]


def test_validate_takes_several_files_and_says_which_are_unsound(sparsekv, plan, tmp_path):
    edited, sound = tmp_path / "edited.yaml", tmp_path / "sound.yaml"
    sound.write_bytes(plan.read_bytes())
    edited.write_text(plan.read_text().replace("tokens: 1024", "tokens: 2048"))
    done = sparsekv("validate", plan, sound)
    assert (done.code, done.err, done.out.count(": valid, ")) == (0, "", 2)
    done = sparsekv("validate", plan, edited, sound)
    assert (done.code, done.out.count(": valid, ")) == (1, 2)
    assert f"error: {edited}: " in done.err
    done = sparsekv("validate", plan, edited, "--json")
    assert (done.code, done.data["valid"]) == (1, False)
    assert [(file["path"], file["valid"]) for file in done.data["files"]] == [(str(plan), True), (str(edited), False)]
    assert sparsekv("validate", plan, sound, "--json").data["valid"] is True


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


def test_diff_says_what_changed_and_exits_1(sparsekv, plan, tmp_path):
    other = tmp_path / "other.yaml"
    write_plan(small_plan(status="imported", decode=None), other)
    done = sparsekv("diff", plan, other)
    assert (done.code, done.err) == (1, "")
    assert {"-status: unverified", "+status: imported", "-decode:"} <= set(done.out.splitlines())
    assert "integrity" not in done.out
    assert sparsekv("diff", plan, other, "--json").data == {"changed": True, "diff": done.out.rstrip("\n")}


def test_a_hunk_of_a_diff_says_at_which_length_it_is(sparsekv, tmp_path):
    texts = dump_plan(full_plan()), dump_plan(full_plan()).replace("keep: {fraction: 0.06}", "keep: {fraction: 0.07}")
    for name, text in zip(("one", "two"), texts, strict=True):
        (tmp_path / name).write_text(text)
    lines = sparsekv("diff", tmp_path / "one", tmp_path / "two").out.splitlines()
    (hunk,) = (line for line in lines if line.startswith("@@"))
    assert hunk.endswith("prefill: lengths: up_to: 131072 heads:")
    assert [line[0] for line in lines[3:]] == [*"   -+   "]


def test_diff_reads_an_edited_plan_before_it_is_sealed_and_says_so(sparsekv, plan, tmp_path):
    edited = tmp_path / "an edited.yaml"
    edited.write_text(plan.read_text().replace("tokens: 1024", "tokens: 2048"))
    done = sparsekv("diff", plan, edited)
    assert done.code == 1
    assert "window: {tokens: 2048}" in done.out
    assert f"`sparsekv seal '{edited}'`" in done.err
    assert f"`sparsekv seal '{edited}'`" in sparsekv("validate", edited).err


def test_outcomes_are_beside_the_plan_that_a_link_leads_to(tmp_path):
    (tmp_path / "store").mkdir()
    (link := tmp_path / "link.yaml").symlink_to(tmp_path / "store/plan.yaml")
    assert outcomes_beside(link) == outcomes_beside(tmp_path / "store/plan.yaml")
    assert outcomes_beside(link).parent == tmp_path / "store"


def test_diff_refuses_what_is_no_plan(sparsekv, plan, tmp_path):
    (tmp_path / "empty.yaml").touch()
    for pair in ((plan, tmp_path / "empty.yaml"), (tmp_path / "none.yaml", plan)):
        done = sparsekv("diff", *pair, "--json")
        assert done.code == done.data["error"]["exit_code"] == 2


def test_show_prints_every_phase_of_a_plan_that_uses_every_field(sparsekv, tmp_path):
    path = tmp_path / "full.yaml"
    write_plan(full_plan(), path)
    done = sparsekv("show", path, "--full")
    assert done.code == 0
    for word in ("vertical_slash", "block_sparse", "Filter", "offloaded", "NVIDIA H200"):
        assert word in done.out


def test_an_alias_in_place_of_a_plan_is_answered_by_the_command_that_makes_one(sparsekv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = sparsekv("show", "tiny-retriever")
    assert done.code == 2
    assert "sparsekv plan tiny-retriever" in done.err
    write_plan(full_plan(), "tiny-retriever")
    assert sparsekv("show", "tiny-retriever").code == 0


def test_schema_is_a_json_schema_that_names_every_part(sparsekv):
    schema = sparsekv("schema").data
    assert {"kind", "model", "prefill", "decode", "quality"} <= schema["properties"].keys()
    assert sparsekv("schema", "--json").data == schema


BROKEN = {
    "truncated": (lambda text: text[: len(text) // 2], "line"),
    "huge": (lambda text: text + "# " + "x" * (9 << 20), "8,388,608 bytes"),
    "newer schema": (lambda text: text.replace("schema_version: 1", "schema_version: 2"), "newer"),
    "overlapping heads": (lambda text: text.replace("layer: 3,", "layer: 2,"), "heads 0-1 of layer 2 again"),
    "a model's config.json": (lambda text: json.dumps({"model_type": "llama"}), "config.json"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plan_is_refused_and_left_as_it_was(sparsekv, plan, fault):
    breaks, word = BROKEN[fault]
    broken = breaks(plan.read_text())
    plan.write_text(broken)
    done = sparsekv("validate", plan)
    assert (done.code, done.out) == (1, "")  # the check has failed
    assert word in done.err
    assert "Traceback" not in done.err
    for command in ("seal", "show"):
        assert sparsekv(command, plan).code == 2  # it cannot be used
    assert plan.read_text() == broken
    assert list(plan.parent.iterdir()) == [plan]


@pytest.mark.parametrize("command", ["validate", "show", "seal"])
def test_what_is_no_file_is_wrong_usage_not_a_failed_check(sparsekv, tmp_path, command):
    (tmp_path / "file").write_text("x")
    none = tmp_path / "none.yaml"
    for path, word in [
        (none, str(none)),
        (tmp_path, str(tmp_path)),
        (tmp_path / "file" / "plan.yaml", "Not a directory"),
    ]:
        done = sparsekv(command, path, "--json")
        assert done.code == done.data["error"]["exit_code"] == 2
        assert word in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("command", ["validate", "show", "seal"])
def test_a_file_without_permission_is_wrong_usage(sparsekv, plan, command):
    plan.chmod(0)
    done = sparsekv(command, plan)
    assert (done.code, done.out) == (2, "")
    assert "Permission denied" in done.err


WEIRD = {
    "empty": "",
    "an alias bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "a Python object": "kind: !!python/object/apply:os.system [echo]\n",
    "control characters": "kind: \x1b[31mred\n",
    "half a surrogate": 'kind: "\\ud800"\n',
}


@pytest.mark.parametrize("fault", WEIRD)
@pytest.mark.parametrize(("command", "code"), [("validate", 1), ("show", 2), ("seal", 2)])
def test_yaml_that_is_no_plan_is_refused_in_a_few_lines(sparsekv, tmp_path, fault, command, code):
    path = tmp_path / "plan.yaml"
    path.write_text(WEIRD[fault])
    done = sparsekv(command, path)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error: {path}")
    assert done.err.count("\n") <= 4
    assert "unexpected" not in done.err
    assert "\x1b" not in done.err
    assert path.read_text() == WEIRD[fault]


def test_show_as_markdown_has_the_verdict_and_the_tables_and_no_second_form_beside_it(sparsekv, plan):
    done = sparsekv("show", plan, "--markdown")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("### Sparsity plan of example/model: unverified\n\n| length | ")
    assert "\n| --- | --- |" in done.out
    done = sparsekv("show", plan, "--markdown", "--json")
    assert (done.code, "--json" in done.err) == (2, True)
