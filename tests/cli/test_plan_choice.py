"""Which plan is taken: that beside a model, and of a folder the one that fits; doctor says which fit."""

from pathlib import Path

import pytest
from model_folders import sparse_plan
from plans_samples import full_plan, small_plan
from tiny_models import tiny_model

from sparsekv.cli.arguments import Subject
from sparsekv.cli.plan_choice import best_of, candidates, chosen_plan, device_called
from sparsekv.plans.errors import PlanMismatchError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.phases import PrefillBucket
from sparsekv.plans.schema import Plan, Target


def plan_of(device: str | None, up_to: int | None = None, **fields) -> Plan:
    plan = sparse_plan(tiny_model(context=2048))
    targets = (Target(device=device, backend="cpu", dtype="float32"),) if device else ()
    if up_to is not None:
        sparse = plan.prefill.lengths[0].model_copy(update={"up_to": up_to})
        buckets = (sparse, PrefillBucket(up_to=None, dense=True))
        fields["prefill"] = plan.prefill.model_copy(update={"lengths": buckets})
    return Plan.model_validate(dict(plan) | {"targets": targets} | fields)


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """Of another model, of another device, of this one, and one that was edited; and files that are no plans."""
    folder = tmp_path / "plans"
    folder.mkdir()
    write_plan(small_plan(), folder / "a.yaml")
    write_plan(plan_of("NVIDIA H200"), folder / "b.sparsekv.yaml")
    write_plan(plan_of(device_called("cpu"), 1024), folder / "c.yml")
    edited = folder / "d.yaml"
    write_plan(plan_of(None), edited)
    edited.write_text(edited.read_text().replace("tokens: 64", "tokens: 128", 1))
    (folder / "values.yaml").write_text("kind: other\n")
    (folder / "notes.txt").write_text("kind: sparsekv.plan\n")
    return folder


def test_doctor_says_which_plans_fit_a_model(sparsekv, model, plans):
    done = sparsekv("doctor", model, "--plan", plans, "--device", "cpu")
    assert done.code == 0, done.err
    *lines, following = done.out.splitlines()
    assert following == f"next: sparsekv verify {model} --plan {plans / 'c.yml'} --write"
    assert [Path(line.split(" (")[0]).name for line in lines] == ["a.yaml", "b.sparsekv.yaml", "c.yml"]
    assert "does not fit, of another model: " in lines[0]
    assert lines[1].endswith(": fits")
    assert lines[2].endswith(": fits; the best")
    assert "left out: " in done.err
    assert "seal" in done.err
    data = sparsekv("doctor", model, "--plan", plans, "--device", "cpu", "--json").data
    assert [(plan["fits"], plan["best"]) for plan in data["plans"]] == [(False, False), (True, False), (True, True)]


def test_run_takes_the_plan_of_a_folder_that_fits_and_says_which(sparsekv, model, plans):
    call = ("run", model, "--plan", plans, "--device", "cpu", "-p", "a b c", "--max-new-tokens", 1)
    done = sparsekv(*call)
    assert done.code == 0, done.err
    assert f"plan: {plans}/c.yml (unverified, " in done.err


def test_doctor_leaves_out_a_damaged_plan_beside_the_model_and_one_that_is_named(sparsekv, copy, plans):
    damaged = copy / "sparsekv.yaml"
    write_plan(plan_of(None), damaged)
    damaged.write_text(damaged.read_text().replace("tokens: 64", "tokens: 128", 1))
    done = sparsekv("doctor", copy, "--plan", plans, "--device", "cpu")
    assert (done.code, "left out: " in done.err, "; the best" in done.out) == (0, True, True), done.err
    done = sparsekv("doctor", copy, "--plan", plans / "d.yaml", "--device", "cpu")
    assert (done.code, done.err.count("left out: "), done.out) == (1, 2, ""), done.err


def test_a_verified_plan_of_another_device_goes_before_an_unverified_one_and_of_equal_ones_that_of_this_device():
    quality = full_plan().quality
    verified = plan_of("far", 512, status="verified", quality=quality)
    found = [(Path(f"{number}"), one) for number, one in enumerate((plan_of("here", 512), verified))]
    assert best_of(candidates(found, verified.model, "here")).path == Path("1")
    found = [(Path(device), plan_of(device, 512)) for device in ("far", "here")]
    assert best_of(candidates(found, verified.model, "here")).path == Path("here")


def test_nothing_is_chosen_between_plans_that_fit_alike_or_of_another_model(model, plans):
    with pytest.raises(UsageError, match="name the model"):
        chosen_plan(plans, None, "cpu")
    write_plan(plan_of(device_called("cpu"), 1024), plans / "e.yaml")
    with pytest.raises(UsageError, match="several alike"):
        chosen_plan(plans, str(model), "cpu")
    for name in ("b.sparsekv.yaml", "c.yml", "e.yaml"):
        (plans / name).unlink()
    with pytest.raises(PlanMismatchError, match="example/model"):
        chosen_plan(plans, str(model), "cpu")
    assert chosen_plan(plans, None, "cpu") == plans / "a.yaml"


def test_a_length_takes_the_plan_that_reaches_it_by_the_least(plans):
    found = [(Path(str(up_to)), plan_of("here", up_to)) for up_to in (256, 512, 1024)]
    beside = candidates(found, found[0][1].model, "here")
    chosen = {length: int(str(best_of(beside, length).path)) for length in (100, 256, 300, 1024, 2048)}
    assert chosen == {100: 256, 256: 256, 300: 512, 1024: 1024, 2048: 1024}
    assert best_of(beside).path == Path("1024")
    assert best_of([]) is None


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
