"""Which plan is taken: that beside a model, and of a folder the one that fits."""

from pathlib import Path

import pytest
from model_folders import sparse_plan
from plans_samples import small_plan
from tiny_models import tiny_model

from sparsekv.cli.arguments import Subject
from sparsekv.cli.plan_choice import chosen_plan
from sparsekv.plans.errors import PlanMismatchError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan


def own_plan() -> Plan:
    return sparse_plan(tiny_model(context=2048))


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """Of another model, of this one, and one that was edited; and files that are no plans."""
    folder = tmp_path / "plans"
    folder.mkdir()
    write_plan(small_plan(), folder / "a.yaml")
    write_plan(own_plan(), folder / "c.yml")
    edited = folder / "d.yaml"
    write_plan(own_plan(), edited)
    edited.write_text(edited.read_text().replace("tokens: 64", "tokens: 128", 1))
    (folder / "values.yaml").write_text("kind: other\n")
    (folder / "notes.txt").write_text("kind: sparsekv.plan\n")
    return folder


def test_run_takes_the_plan_of_a_folder_that_fits_and_says_which(sparsekv, model, plans):
    call = ("run", model, "--plan", plans, "--device", "cpu", "-p", "a b c", "--max-new-tokens", 1)
    done = sparsekv(*call)
    assert done.code == 0, done.err
    assert f"plan: {plans}/c.yml (unverified, " in done.err
    assert "left out: " in done.err
    assert "seal" in done.err


def test_nothing_is_chosen_between_several_plans_or_of_another_model(model, plans):
    with pytest.raises(UsageError, match="name the model"):
        chosen_plan(plans, None)
    write_plan(own_plan(), plans / "e.yaml")
    with pytest.raises(UsageError, match=r"found several:\n  .*c\.yml \(unverified, .*\n  .*e\.yaml"):
        chosen_plan(plans, str(model))
    for name in ("c.yml", "e.yaml"):
        (plans / name).unlink()
    with pytest.raises(PlanMismatchError, match="example/model"):
        chosen_plan(plans, str(model))
    assert chosen_plan(plans, None) == plans / "a.yaml"


def test_a_folder_of_plans_of_the_zoo_is_no_plan_and_says_which_it_holds(sparsekv, tmp_path):
    for name in ("one", "two"):
        write_plan(small_plan(), tmp_path / f"{name}.sparsekv.yaml")
    done = sparsekv("show", tmp_path)
    assert done.code == 2
    assert "expected sparsekv.yaml, found one.sparsekv.yaml, two.sparsekv.yaml; name one" in done.err


@pytest.mark.parametrize("name", ["", "model.gguf"])
def test_the_plan_beside_a_gguf_file_is_its_plan(tmp_path, name):
    (tmp_path / "model.gguf").touch()
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    assert Subject.named(str(tmp_path / name)).path == tmp_path / "sparsekv.yaml"


@pytest.mark.parametrize("name", ["config.json", "model.gguf"])
def test_a_plan_inside_a_models_folder_is_run_on_that_model(tmp_path, name):
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    alone = Subject.named(None, tmp_path / "sparsekv.yaml")
    assert alone.model == small_plan().model.id
    (tmp_path / name).write_text("{}")
    for place in (tmp_path, tmp_path / "sparsekv.yaml"):
        beside = Subject.named(None, place)
        assert (beside.model, beside.from_plan) == (str(tmp_path), True)
    assert Subject.named("other", tmp_path).model == "other"
