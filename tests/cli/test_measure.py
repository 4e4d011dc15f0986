"""eval and verify: a model on held-out samples, dense and with its plan."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from model_folders import save_model
from plans_samples import quality_at
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_plans import drops, plan_for

from sparsekv.planner.fixed_test import SIZES, Cell, FixedTest
from sparsekv.planner.records import only_run
from sparsekv.planner.verify import Verification
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.phases import DecodeBucket, PrefillBucket

SMALL = ("--set", "tasks=kv_retrieval,perplexity")


def test_eval_says_where_a_plan_is_dense_at_the_length(sparsekv, copy, monkeypatch):
    monkeypatch.setattr("sparsekv.bench.suite.run_suite", lambda *_, **__: None)
    plan = load_plan(copy / "sparsekv.yaml")
    phases = {"prefill": PrefillBucket(up_to=1024, dense=True), "decode": DecodeBucket(up_to=512, dense=True)}
    late = {
        name: getattr(plan, name).model_copy(update={"lengths": (short, *getattr(plan, name).lengths)})
        for name, short in phases.items()
    }
    write_plan(plan.model_copy(update=late), copy / "sparsekv.yaml")
    call = ("eval", copy, "--length")
    assert "at 512" in sparsekv(*call, "512").err
    assert "dense is compared" not in sparsekv(*call, "768").err
    assert "at 768" in sparsekv(*call, "768", "--only", "prefill").err


def test_verify_exits_with_1_when_the_plan_loses_too_much(sparsekv, copy, monkeypatch):
    cell = Cell("niah_multikey", 1024, 30, 30, 20, 0)
    quality = quality_at(1024).model_copy(update={"missed": (1024,), "reason": "loss of niah_multikey"})
    missed = Verification(quality, FixedTest(SIZES["small"], 0.025, (cell,), {}), ("loss of niah_multikey",))
    monkeypatch.setattr("sparsekv.planner.verify.verify", lambda *_, **__: missed)
    done = sparsekv("verify", copy, "--plan", copy / "sparsekv.yaml", "--write", "--json")
    assert done.code == 1
    assert (done.data["passed"], done.data["verified"]) == (False, False)
    assert done.data["error"]["kind"] == "GateError"
    assert "test missed: loss of niah_multikey" in done.err
    assert f"`sparsekv plan {copy} -o {copy / 'sparsekv.yaml'} --force`" in done.err
    assert load_plan(copy / "sparsekv.yaml").quality.missed == (1024,)


def test_verify_finds_out_before_it_measures_that_the_plan_cannot_be_written(sparsekv, folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_bytes, (folder / "sparsekv.yaml").read_bytes())
        done = sparsekv(*call_on("verify", folder, pipe), "--write")
        written.result()
    assert (done.code, done.out) == (2, "")
    assert "regular" in done.err
    assert "evaluate" not in done.err


def test_verify_writes_what_it_measured_where_that_is_asked_for(sparsekv, copy):
    call = ("verify", copy, *SMALL, "--lengths", "1k")
    done, full = sparsekv(*call), sparsekv(*call, "--full")
    assert (done.code, full.code) == (0, 0), done.err
    assert len(done.out.splitlines()) <= 15
    assert "chosen by --lengths, --set tasks" in " ".join(done.out.split())
    assert ["kv_retrieval", "not", "judged:", "0"] in [line.split()[:4] for line in full.out.splitlines()]
    for run, seed in enumerate(((), ("--set", "seed=3")), start=1):
        told = sparsekv(*call, "--write", "--json", *seed).data
        assert (told["passed"], told["verified"]) == (True, False)
        written = load_plan(copy / "sparsekv.yaml")
        assert (written.status, written.quality.run) == ("unverified", run)
        assert {cell.length for cell in written.quality.cells} == {1024}
        assert not (copy / "sparsekv.yaml.outcomes").exists()


def test_phases_are_told_apart_as_a_diagnosis_that_writes_nothing(sparsekv, copy):
    before = (copy / "sparsekv.yaml").read_bytes()
    done = sparsekv("verify", copy, "--set", "tasks=kv_retrieval", "--lengths", "512", "--phases")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [[phase, "kv_retrieval", "512"] for phase in ("prefill", "decode", "both")]
    tiles, read = ([float(row[at]) for row in rows] for at in (-2, -1))
    assert tiles[1] == read[0] == 1.0
    assert tiles[0] == tiles[2] < 1.0
    assert read[1] == read[2] < 1.0
    assert sparsekv("verify", copy, *SMALL, "--phases", "--write").code == 2
    assert (copy / "sparsekv.yaml").read_bytes() == before


def test_a_run_that_decides_nothing_counts_and_leaves_a_verified_plan(sparsekv, copy):
    path = copy / "sparsekv.yaml"
    write_plan(load_plan(path).model_copy(update={"status": "verified", "quality": quality_at(1024)}), path)
    done = sparsekv("verify", copy, *SMALL, "--lengths", "1k", "--write")
    assert done.code == 0, done.err
    written = load_plan(path)
    assert (written.status, written.quality.run, written.quality.cells) == ("verified", 2, ())


def test_a_second_run_into_one_plan_is_refused_before_it_measures(sparsekv, copy):
    with only_run(copy / "sparsekv.yaml.outcomes"):
        done = sparsekv("verify", copy, "--write", *SMALL)
    assert (done.code, "found one that is under way; wait for its end" in done.err) == (1, True), done.err


def test_an_interrupted_run_is_gone_on_with(sparsekv, copy, ctrl_c_in):
    call = ("verify", copy, "--set", "tasks=kv_retrieval,two_stage", "--lengths", "1k", "--write")
    outcomes = copy / "sparsekv.yaml.outcomes"
    with ctrl_c_in("evaluate", steps=4):
        stopped = sparsekv(*call)
    assert (stopped.code, f"until then is in {outcomes}" in stopped.err) == (130, True), stopped.err
    assert len(outcomes.read_text().splitlines()) == 2  # its settings and a cell
    assert sparsekv(*call).code == 0
    assert not outcomes.exists()


def test_a_plan_that_drops_tokens_alone_is_verified_and_show_says_what_that_did_to_answers(sparsekv, copy):
    write_plan(plan_for(tiny_model(context=2048), None, None, drops((0, 1), 64)), copy / "sparsekv.yaml")
    done = sparsekv("verify", copy, "--lengths", "1k", "--write")
    assert done.code == 0, done.err
    told = " ".join(done.out.split())
    assert "niah_multikey at 1k" in " ".join(told.split())
    assert "second_question at 1k" in told  # of a random model
    assert told.split("unverified (small)")[1].partition("next:")[0] in " ".join(sparsekv("show", copy).out.split())


def test_verify_does_not_write_what_was_measured_on_other_weights(sparsekv, folder, copy, tmp_path):
    tuned = save_model(tiny_model(seed=7, context=2048), tmp_path / "tuned")
    done = sparsekv("verify", tuned, "--plan", copy / "sparsekv.yaml", *SMALL, "--lengths", "1k", "--write")
    assert done.code == 2
    assert "--write" in done.err
    assert (copy / "sparsekv.yaml").read_bytes() == (folder / "sparsekv.yaml").read_bytes()


def test_verify_refuses_a_checkpoint_that_lacks_a_layers_mlp(sparsekv, copy):
    tensors = load_file(copy / "model.safetensors")
    save_file({name: data for name, data in tensors.items() if "layers.1.mlp" not in name}, copy / "model.safetensors")
    before = (copy / "sparsekv.yaml").read_bytes()
    done = sparsekv("verify", copy, *SMALL, "--lengths", "1k", "--write")
    assert done.code == 2
    assert "3 missing (model.layers.1.mlp.down_proj.weight" in done.err
    assert (copy / "sparsekv.yaml").read_bytes() == before


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another architecture."""
    return save_model(tiny_model(layers=4, context=2048), tmp_path_factory.mktemp("models") / "other")


def call_on(command: str, model: Path, plan: Path) -> tuple[object, ...]:
    few = ("--set", "tasks=kv_retrieval") if command == "verify" else ("--samples", 1)
    return (command, model, "--plan", plan, "--length", "1k", *few)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (None, "other weights"),
        ("sha256-all:" + "0" * 64, "a float32 checkpoint in float16"),
        ("sha256:" + "0" * 64, "a fingerprint of another kind"),
    ],
)
def test_a_plan_that_does_not_say_its_weights_is_never_written_as_verified(sparsekv, copy, weights, said):
    plan = load_plan(copy / "sparsekv.yaml")
    unknown = plan.model.fingerprint.model_copy(update={"weights": weights})
    write_plan(
        plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": unknown})}),
        copy / "sparsekv.yaml",
    )
    done = sparsekv(*call_on("verify", copy, copy / "sparsekv.yaml"), "--write")
    assert done.code == 2
    assert said in done.err
    assert load_plan(copy / "sparsekv.yaml").status == "unverified"


@pytest.mark.parametrize(("command", "written"), [("eval", False), ("verify", True)])
def test_ctrl_c_while_measuring_ends_with_130_and_leaves_the_plan(sparsekv, copy, ctrl_c_in, command, written):
    before = (copy / "sparsekv.yaml").read_bytes()
    with ctrl_c_in("evaluate"):
        done = sparsekv(*call_on(command, copy, copy / "sparsekv.yaml"), *(["--write"] if written else []))
    assert (done.code, done.out) == (130, "")
    assert done.err.splitlines()[-1].startswith("interrupted")
    assert (copy / "sparsekv.yaml").read_bytes() == before


@pytest.mark.parametrize("edit", ["budget", "comment", "removal"])
def test_verify_overwrites_no_plan_that_was_edited_while_it_ran(sparsekv, copy, during, edit):
    path = copy / "sparsekv.yaml"
    text = path.read_text()
    edited = {"budget": text.replace("tokens: 64", "tokens: 65"), "comment": f"# mine\n{text}", "removal": None}[edit]
    assert edited != text

    def change() -> None:
        path.unlink() if edited is None else path.write_text(edited)

    during("evaluate", change)
    done = sparsekv(*call_on("verify", copy, path), "--write", "--json")
    assert (done.code, done.data["error"]["kind"]) == ((2, "UsageError") if edited is None else (1, "ConflictError"))
    assert str(path) in done.err
    assert done.data["quality"]["cells"]
    assert (path.read_text() if path.exists() else None) == edited
