"""publish: a plan beside its model, in a folder or on the hub, and a section of the card that says what it is."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_folders import sparse_plan
from plans_samples import full_plan, small_plan
from tiny_models import tiny_model

from sparsekv.cli import exchange
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Cost, Estimate, Plan, Prediction, Target
from sparsekv.runtime import hub

FOLDER = ModelSource("/")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(sparse_plan(tiny_model(context=2048)), path)
    return path


def section(plan: Plan, source: ModelSource = FOLDER) -> str:
    return "\n".join(exchange.section(plan, source))


def test_a_published_plan_is_found_beside_its_model_and_again_changes_nothing(sparsekv, plan, copy):
    (copy / "README.md").write_text("---\nlanguage: no\n---\n")
    (copy / "sparsekv.yaml").unlink()
    dry = sparsekv("publish", plan, copy, "--dry-run")
    assert (dry.code, (copy / "sparsekv.yaml").exists()) == (0, False), dry.err
    done = sparsekv("publish", plan, copy)
    assert (done.code, done.out) == (0, dry.out), done.err
    assert "[`sparsekv.yaml`](sparsekv.yaml)" in done.out
    assert "sparsekv run tests/tiny " in done.out
    assert (copy / "sparsekv.yaml").read_bytes() == plan.read_bytes()
    assert (copy / "README.md").read_text() == "---\nlanguage: no\n---\n"
    assert sparsekv("validate", copy).code == 0
    data = sparsekv("publish", copy, copy, "--json").data
    assert data == {"to": str(copy / "sparsekv.yaml"), "written": False, "section": done.out.rstrip("\n")}


def test_the_plan_of_another_model_is_not_put_beside_this_one_and_no_option_is_offered(sparsekv, copy, tmp_path):
    before = (copy / "sparsekv.yaml").read_bytes()
    write_plan(sparse_plan(tiny_model(layers=4, context=2048)), tmp_path / "other.yaml")
    done = sparsekv("publish", tmp_path / "other.yaml", copy)
    assert (done.code, "layers: plan 4, model 3" in done.err) == (3, True), done.err
    assert "--allow-mismatch" not in done.err
    assert (copy / "sparsekv.yaml").read_bytes() == before


def test_files_that_are_not_the_users_are_not_written(sparsekv, plan, copy, tmp_path):
    for call in (("tiny-retriever",), (copy, "--create-pr")):
        done = sparsekv("publish", plan, *call)
        assert (done.code, "expected" in done.err) == (2, True)
    (copy / "sparsekv.yaml").write_text("mine: true\n")
    done = sparsekv("publish", plan, copy)
    assert (done.code, "another file" in done.err) == (2, True)
    (copy / "sparsekv.yaml").unlink()
    os.symlink(tmp_path / "blob", copy / "sparsekv.yaml")
    done = sparsekv("publish", plan, copy)
    assert (done.code, "link" in done.err) == (2, True)
    assert not (tmp_path / "blob").exists()


def priced(**times: float) -> Plan:
    estimate = Estimate(dense_us=100.0, density=0.2, **times)
    return small_plan(cost=Cost(device="H200", backend="triton", lengths=(Prediction(length=8192, prefill=estimate),)))


@pytest.mark.parametrize(
    ("plan", "told", "untold"),
    [
        (full_plan(), ("verified (small): 54 prompts", "is excluded (95%)", "4.00x", "lossy"), "unverified"),
        (small_plan(), ("| prefill computes | gains |", "unverified: its quality was not measured"), "predicted"),
        (small_plan(status="imported"), ("imported: its quality",), "erified"),
        (small_plan(prefill=None, decode=None), ("dense: nothing gained",), "unverified"),
        (priced(sparse_us=125.0), ("| none |", "predicted, of attention alone on H200"), "not known"),
    ],
)
def test_the_section_has_gains_and_losses_by_length_and_says_what_was_measured(plan, told, untold):
    made = section(plan)
    assert [part for part in (*told, "git clone THIS_REPOSITORY") if part not in made] == []
    assert untold not in made


def test_a_name_in_a_plan_is_no_markup_of_the_section():
    made = section(small_plan(targets=(Target(device="<b> [a](b) #12", backend="triton", dtype="float16"),)))
    assert not any(part in made for part in ("<b>", "[a]", "#12"))


def test_a_hub_model_gets_the_plan_uploaded_and_a_refusal_says_what_to_do(monkeypatch):
    source, sent = ModelSource("example/tiny", trouble=""), []

    def upload(self, *, path_or_fileobj, path_in_repo, repo_id, create_pr):
        sent.append((path_or_fileobj, path_in_repo, repo_id))
        return SimpleNamespace(commit_url="commit", pr_url="request" if create_pr else None)

    monkeypatch.setattr(hub.HfApi, "upload_file", upload)
    assert [hub.upload_plan(source, b"plan", create_pr) for create_pr in (False, True)] == ["commit", "request"]
    assert sent == 2 * [(b"plan", "sparsekv.yaml", "example/tiny")]
    monkeypatch.delattr(hub.HfApi, "upload_file")
    for found in (source, ModelSource("example/tiny", trouble="offline")):
        with pytest.raises(UsageError, match="hf auth login"):
            hub.upload_plan(found, b"plan")
