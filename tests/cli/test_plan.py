"""plan: what goes in, what comes out, and what an interrupted or failed call leaves behind."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from model_folders import save_model
from own_texts import text_of
from plans_samples import quality_at
from tiny_models import tiny_model

from sparsekv.kernels.methods import registry
from sparsekv.planner import eviction_search
from sparsekv.planner.fixed_test import SMALL, Cell, FixedTest
from sparsekv.planner.verify import Verification
from sparsekv.plans.files import load_plan
from sparsekv.runtime.hf.memory import Available

TASK = ("--set", "tasks=kv_retrieval")
FAST = ("--lengths", "1k", *TASK, "--set", "calibration_samples=1")
ONE = (*FAST, "--only", "prefill")  # half the work, where it is not the phases that a test is about
PROVEN = Verification(quality_at(1024), FixedTest(SMALL, 0.025, (), {}), ())
OLDER = "kind: sparsekv.plan\n"
KEYS = {"path", "status", "prefill_density", "predicted_speedup", "filter_layers", "quality", "seconds"}


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options that take what was measured once from files."""
    from sparsekv.cli.main import main

    folder = tmp_path_factory.mktemp("measured")
    call = ("plan", model, "-o", folder / "plan.yaml", *FAST, "--no-verify")
    with pytest.raises(SystemExit) as stop:
        main([str(part) for part in (*call, "--profile-out", folder / "a.profile")])
    assert not stop.value.code
    return ("--profile", folder / "a.profile")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "plan.yaml"


def test_a_plan_is_measured_and_written_and_described(sparsekv, model, measured, out):
    done = sparsekv("plan", model, "-o", out, *measured, *TASK, "--json")
    assert done.code == 0, done.err
    assert done.data.keys() == KEYS
    assert done.data["path"] == str(out)
    assert "too few of these tasks" in done.err
    assert load_plan(out).status == done.data["status"] == "unverified"
    assert 0 < done.data["prefill_density"] < 1
    assert [cell["task"] for cell in done.data["quality"]["cells"]][-3:] == ["quote_text", "quote_code", "turns"]


def test_the_same_files_give_the_same_bytes_and_replace_what_was_there(sparsekv, model, measured, out):
    out.write_text(OLDER)
    assert sparsekv("plan", model, "-o", out, *measured, "--no-verify").code == 2
    assert out.read_text() == OLDER
    assert sparsekv("plan", model, "-o", out, *measured, "--no-verify", "--force").code == 0
    first = out.read_bytes()
    assert sparsekv("plan", model, "-o", out, *measured, "--no-verify", "--force").code == 0
    assert out.read_bytes() == first
    assert list(out.parent.iterdir()) == [out]


def test_files_spare_profiling_also_where_layers_evict_which_the_model_is_loaded_for(
    sparsekv, model, measured, out, monkeypatch
):
    monkeypatch.setattr("sparsekv.planner.plan.profile", None)
    done = sparsekv("plan", model, "-o", out, *measured, "--retain", 0.5, "--no-verify")
    assert done.code == 0, done.err
    assert load_plan(out).evicting


def test_a_plan_from_files_needs_no_weights_and_says_so(sparsekv, model, measured, out, tmp_path):
    bare = shutil.copytree(model, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    done = sparsekv("plan", bare, "-o", out, *measured, "--no-verify")
    assert (done.code, "the weights of" in done.err) == (0, True), done.err
    assert not load_plan(out).prefill.bucket(1024).dense


def test_a_plan_is_searched_and_run_by_a_rule_and_a_score_of_ones_own(sparsekv, model, out, monkeypatch):
    example = Path(__file__).parents[2] / "examples" / "my_method.py"
    mine = ("--methods", example)
    for name in ("pooled", "key_norm"):  # which other tests of this process register
        monkeypatch.delitem(registry(), name, raising=False)
    monkeypatch.setattr(eviction_search, "_SHARES", (0.5, 0.25))
    asked = (*FAST, "--no-verify", "--families", "pooled", "--retain", 0.6, "--score", "key_norm", "--loss", 1)
    assert "found 'pooled'; install its package, or name its file" in sparsekv("plan", model, "-o", out, *asked).err
    done = sparsekv("plan", model, "-o", out, *asked, *mine)
    assert done.code == 0, done.err
    plan = load_plan(out)
    assert plan.prefill.rules == {"pooled"}
    assert {rule.score for rule in plan.evicting.values()} == {"key_norm"}
    assert 0 < plan.cost.lengths[0].prefill.density < 1
    call = ("run", model, "--plan", out, "-p", text_of(0, 900), "--max-new-tokens", 2, "--raw", "--sparse", "always")
    assert sparsekv(*call, *mine).code == 0
    for name in ("pooled", "key_norm"):
        monkeypatch.delitem(registry(), name)
    assert "PrefillRule pooled, which nobody registered here" in sparsekv(*call).err


def test_fixed_filter_layers_and_the_budget_reach_the_plan(sparsekv, model, measured, out):
    fixed = ("--set", "filter_layers=0", "--set", "decode_budget=25%")
    done = sparsekv("plan", model, "-o", out, *measured, "--no-verify", "--json", *fixed)
    assert done.code == 0, done.err
    assert done.data["filter_layers"] == [0]
    (segment,) = load_plan(out).decode.lengths[-1].segments
    assert segment.budget.fraction == 0.25


def misses(*_: object, **__: object) -> Verification:
    cell = Cell("niah_multikey", 1024, 30, 30, 20, 0)
    quality = quality_at(1024).model_copy(update={"missed": (1024,)})
    return Verification(quality, FixedTest(SMALL, 0.025, (cell,), {}), ("loss of niah_multikey at 1k",))


def test_a_plan_that_misses_three_times_is_dense_and_says_what_each_lost(sparsekv, model, measured, out, monkeypatch):
    monkeypatch.setattr("sparsekv.planner.plan.verify", misses)
    done = sparsekv("plan", model, "-o", out, *measured, *TASK, "--only", "decode", "--set", "filter_layers=0")
    assert done.code == 0, done.err
    assert "1k is dense" in done.err
    assert "loss of niah_multikey at 1k 66.7%" in done.err
    assert "dense: nothing gained" in done.out
    said = [sparsekv(*call).out for call in (("show", out), ("verify", model, "--plan", out))]
    assert all("unverified" in text and "dense: nothing gained" in text for text in said)
    assert load_plan(out).decode.bucket(1024).dense
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("is_dense", "as_json"), [(True, True), (False, False)])
def test_a_plan_that_must_be_verified_and_is_not_is_written_and_exits_with_1(
    sparsekv, model, measured, out, monkeypatch, is_dense, as_json
):
    if is_dense:
        monkeypatch.setattr("sparsekv.planner.plan.verify", misses)
    asked = ("--only", "decode", "--set", "filter_layers=0", "--set", "require_verified=true")
    done = sparsekv("plan", model, "-o", out, *measured, *TASK, *asked, *(["--json"] if as_json else []))
    assert done.code == 1, done.err
    assert ("--prompts FILE" in done.err) == (not is_dense)
    assert load_plan(out).status == "unverified"
    assert load_plan(out).decode.bucket(1024).dense == is_dense
    assert list(out.parent.iterdir()) == [out]
    if as_json:
        assert done.data.keys() == {*KEYS, "error"}
        assert done.data["error"]["kind"] == "GateError"
        assert (done.data["path"], done.data["status"]) == (str(out), "unverified")
    else:
        assert "unverified" in done.out


def test_a_plan_that_must_be_verified_and_is_exits_with_0(sparsekv, model, measured, out, monkeypatch):
    from sparsekv.planner import plan as planning

    monkeypatch.setattr(planning, "verify", lambda *_, **__: PROVEN)
    done = sparsekv("plan", model, "-o", out, *measured, *TASK, "--set", "require_verified=true")
    assert done.code == 0, done.err
    assert load_plan(out).status == "verified"


def test_ctrl_c_before_anything_was_measured_leaves_nothing_and_says_so(sparsekv, model, out, ctrl_c_in):
    with ctrl_c_in("profile", steps=0):
        done = sparsekv("plan", model, "-o", out, *ONE, "--no-verify")
    assert done.code == 130
    assert "nothing" in done.err
    assert not list(out.parent.glob(f"{out.name}*"))


@pytest.mark.parametrize("stage", ["profile", "evaluate"])
def test_ctrl_c_in_any_stage_says_what_was_kept(sparsekv, model, out, ctrl_c_in, stage):
    profile = out.with_name("a.profile")
    call = ("plan", model, "-o", out, *ONE, "--profile-out", profile)
    with ctrl_c_in(stage):
        done = sparsekv(*call)
    assert (done.code, done.out) == (130, "")
    assert done.err.splitlines()[-2:-1] == ["interrupted"]
    assert str(profile) in done.err
    assert not out.exists()
    partial = out.with_name("a.profile.partial")
    assert f"{partial}: " in done.err
    assert profile.exists() == (stage != "profile")
    again = sparsekv(*call)
    assert again.code == 0
    assert f"profile resumed: {'33.3' if stage == 'profile' else '100'}% of it" in again.err
    assert sorted(out.parent.iterdir()) == [profile, out]


def test_a_run_with_other_options_does_not_take_up_what_is_left(sparsekv, model, out, ctrl_c_in):
    call = ("plan", model, "-o", out, *ONE, "--no-verify", "--set")
    with ctrl_c_in("profile"):
        assert sparsekv(*call, "seed=1").code == 130
    other = sparsekv(*call, "seed=2")
    assert (other.code, "remove the file" in other.err) == (2, True), other.err
    assert "profile resumed" in sparsekv(*call, "seed=1").err
    assert list(out.parent.iterdir()) == [out]


def test_a_plan_from_a_profile_leaves_the_records_of_an_interrupted_run(sparsekv, model, measured, out, ctrl_c_in):
    partial = out.with_name("b.profile.partial")
    partial.write_text('{"kind": "sparsekv.partial"}')
    call = ("plan", model, "-o", out, *measured, "--profile-out", out.with_name("b.profile"))
    with ctrl_c_in("evaluate"):
        done = sparsekv(*call, *TASK)
    assert done.err.splitlines()[-1] == f"nothing was written to {out}"
    assert sparsekv(*call, "--no-verify").code == 0
    assert partial.exists()


def test_ctrl_c_while_choosing_leaves_the_older_plan(sparsekv, model, measured, out, monkeypatch):
    out.write_text(OLDER)
    monkeypatch.setattr("sparsekv.planner.plan.choose_filter_layers", Mock(side_effect=KeyboardInterrupt))
    done = sparsekv("plan", model, "-o", out, *measured, *TASK, "--json", "--force")
    assert done.code == 130
    assert done.data["error"] == {**done.data["error"], "kind": "Interrupted", "exit_code": 130}
    assert "interrupted" in done.err
    assert list(out.parent.iterdir()) == [out]
    assert out.read_text() == OLDER


def test_a_second_run_into_the_files_of_one_that_profiles_is_refused_before_it_loads_a_model(
    sparsekv, model, out, during, tmp_path
):
    refused, unreadable = [], tmp_path / "model"
    unreadable.mkdir()
    (unreadable / "config.json").write_text("{}")
    call = ("-o", out, *ONE, "--no-verify", "--set")
    during("profile", lambda: refused.append(sparsekv("plan", unreadable, *call, "seed=1")))
    assert sparsekv("plan", model, *call, "seed=0").code == 0
    (second,) = refused
    assert (second.code, second.out) == (1, "")
    assert str(out.with_name("plan.yaml.profile.partial")) in second.err
    assert sorted(out.parent.iterdir()) == [unreadable, out]


def test_a_model_that_is_too_large_for_the_device_is_refused_with_its_estimate_before_it_is_loaded(
    sparsekv, out, tmp_path, monkeypatch
):
    folder = save_model(tiny_model(context=2048), tmp_path / "model")
    (folder / "model.safetensors").unlink()  # would be missed
    for free, named in ((1 << 10, "for the weights of"), (1 << 21, "for keys and values of 2,048 tokens")):
        monkeypatch.setattr("sparsekv.runtime.hf.memory.Available.here", lambda devices, free=free: Available(free, 0))
        done = sparsekv("plan", folder, "-o", out, "--lengths", "2k")
        assert (done.code, done.out) == (2, "")
        assert named in done.err
        assert "device_map=auto" in done.err
    assert not out.exists()


def test_own_calibration_prompts_are_used(sparsekv, model, out, tmp_path):
    lines, text = tmp_path / "prompts.jsonl", tmp_path / "prompt.txt"
    prompt = "a\u2028b " * 250  # with a separator of lines that separates none here
    lines.write_text(json.dumps({"prompt": prompt, "answer": "c" * 40}, ensure_ascii=False) + "\n", encoding="utf-8")
    text.write_text(prompt + "c" * 40, encoding="utf-8")
    own = ("--lengths", "1k")
    digests = []
    for file in (lines, text):
        done = sparsekv("plan", model, "-o", out, *own, "--no-verify", "--only", "decode", "--prompts", file, "--force")
        assert done.code == 0, done.err
        digests.append(load_plan(out).provenance.calibration)
    assert digests[0] == digests[1]


def test_verify_counts_the_same_prompts_as_the_plan_that_was_made_from_them(
    sparsekv, model, out, tmp_path, monkeypatch
):
    monkeypatch.setattr("sparsekv.planner.fixed_test.MEAN_NATS", 100.0)  # of random weights
    monkeypatch.setattr("sparsekv.planner.fixed_test.WORST_NATS", 100.0)
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{text_of(number % 7, 1000)}{number}?", "answer": " 4"} for number in range(12)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    own = ("--lengths", "1k", "--only", "prefill", "--prompts", file)
    done = sparsekv("plan", model, "-o", out, *own, "--set", "calibration_samples=1")
    assert done.code == 0, done.err
    told = re.search(r"(\d) of 6 held-out prompts are different texts at 1k", done.err)
    assert told
    again = sparsekv("verify", model, "--plan", out, "--prompts", file, "--json")
    assert again.code == 0, again.err
    assert told[0] in again.err
    (counted,) = [cell.prompts for cell in load_plan(out).quality.cells]
    assert again.data["quality"]["cells"][0]["prompts"] == int(told[1]) >= counted > 1
