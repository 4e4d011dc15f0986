"""verify --write --more: goes on from what an undecided verification left beside the plan, or says why it can't."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from model_folders import save_model, sparse_plan
from plans_samples import full_plan
from tiny_models import tiny_model

from sparsekv.cli import commands
from sparsekv.cli.main import main
from sparsekv.cli.verdict import DRAWN_BY, GATED_BY, RUN_BY, Ended, repeated, run_by
from sparsekv.cli.verify import VerifyFlags
from sparsekv.planner.outcomes import Outcomes
from sparsekv.planner.records import only_run
from sparsekv.plans.files import load_plan, seal, write_plan
from sparsekv.plans.schema import Claim, Measurement, Plan, Quality

SMALL = ("--set", "tasks=kv_retrieval", "--lengths", "1k")
LOOSE = ("--set", "max_kl=100")  # see conftest.py


def plan_in(folder: Path) -> Path:
    return folder / "sparsekv.yaml"


def outcomes_in(folder: Path) -> Path:
    return folder / "sparsekv.yaml.outcomes"


@pytest.fixture(scope="module")
def once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose plan was verified on one sample, which no test writes to."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("verified") / "tiny")
    write_plan(sparse_plan(tiny_model(context=2048)), plan_in(folder))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(folder), *map(str, (*SMALL, *LOOSE)), "--samples", "1", "--write"])
    assert not stop.value.code
    return folder


@pytest.fixture
def begun(once: Path, tmp_path: Path) -> Path:
    """That folder, to be changed."""
    return shutil.copytree(once, tmp_path / "begun")


def first(sparsekv, folder: Path, samples: int = 1):
    done = sparsekv("verify", folder, *SMALL, *LOOSE, "--samples", samples, "--write")
    assert done.code == 0, done.err
    return done


def test_more_samples_are_drawn_behind_those_of_the_first_run(sparsekv, copy, begun):
    assert "--more" not in sparsekv("show", copy).out
    first(sparsekv, copy, 3)
    kept = json.loads(outcomes_in(begun).read_text())
    assert kept["settings"]["chosen"] == ["--lengths", "--set tasks"]
    assert "--write --verify-time 1800" in sparsekv("show", begun).out
    unchosen = kept | {"settings": kept["settings"] | {"chosen": []}}
    assert unchosen.pop("seconds") > 0
    for seconds, said in (({}, "--more --verify-time 1800"), ({"seconds": 300.2}, "--more --verify-time 451")):
        outcomes_in(copy).write_text(json.dumps(unchosen | seconds))
        assert f"--write {said}" in sparsekv("show", copy).out
    sparsekv("report", copy, "-o", copy / "page.html")
    assert f"--write {said}" in (copy / "page.html").read_text()
    outcomes_in(copy).write_text(json.dumps(unchosen | {"seconds": "long"}))
    assert "--write --verify-time 1800" in sparsekv("show", copy).out
    outcomes_in(copy).write_text("no JSON")
    assert "--more" not in sparsekv("show", copy).out
    outcomes_in(copy).unlink()
    assert kept["settings"]["tasks"] == ["kv_retrieval"]
    done = sparsekv("verify", begun, "--write", "--more", "--samples", 3, "--json")  # tasks, lengths, gates as before
    assert done.code == 0, done.err
    assert "--write --verify-time" in done.err, "samples of chosen tasks verify nothing, however many are drawn"
    assert load_plan(plan_in(begun)).quality == load_plan(plan_in(copy)).quality
    assert any("--set tasks" in line for line in done.data["reasons"])  # chosen samples are chosen still
    both = [path.read_bytes() for path in (plan_in(begun), outcomes_in(begun))]
    told = first(sparsekv, begun, 1).out  # less than is known there: neither file is written
    assert "--more" not in told
    assert both == [path.read_bytes() for path in (plan_in(begun), outcomes_in(begun))]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--set", "seed=3"), "seed: none there, 3 here"),
        (("--set", "tasks=niah_single"), "tasks: kv_retrieval there, niah_single here"),
        (("--lengths", "2k"), "lengths: 1024 there, 2048 here"),
        (("--set", "max_kl=0.01"), "max kl decode: 100.0 there, 0.01 here"),
        (("--dtype", "bfloat16"), "dtype: float32 there, bfloat16 here"),
        (("--set", "backend=reference"), "backend: cpu there, reference here"),
        (("--samples", 1), "more than the 1 that were drawn"),
    ],
)
def test_other_settings_are_refused_by_name_and_change_nothing(sparsekv, begun, asked, said):
    before = [path(begun).read_bytes() for path in (plan_in, outcomes_in)]
    done = sparsekv("verify", begun, "--write", "--more", *asked)
    assert done.code == 2, done.err
    assert said in done.err
    assert "evaluate" not in done.err
    assert [path(begun).read_bytes() for path in (plan_in, outcomes_in)] == before


def test_outcomes_of_a_plan_that_was_edited_are_not_gone_on_from(sparsekv, begun):
    plan_in(begun).write_text(plan_in(begun).read_text().replace("tokens: 64", "tokens: 65"))
    seal(plan_in(begun))
    done = sparsekv("verify", begun, "--write", "--more")
    assert done.code == 2
    assert "plan: sha256:" in done.err


def test_a_second_run_into_one_plan_is_refused_before_it_measures(sparsekv, copy):
    with only_run(outcomes_in(copy)):
        done = sparsekv("verify", copy, "--write", "--samples", 1, *SMALL)
        assert (done.code, "found one that is under way; wait for its end" in done.err) == (1, True), done.err
        assert sparsekv("verify", copy, "--samples", 1, *SMALL).code in (0, 1)
    assert sparsekv("verify", copy, "--write", "--samples", 1, *SMALL).code in (0, 1)


def test_more_needs_write_and_a_first_run(sparsekv, copy):
    done = sparsekv("verify", copy, "--more")
    assert (done.code, done.out) == (2, "")
    assert "--write" in done.err
    done = sparsekv("verify", copy, "--write", "--more")
    assert (done.code, done.out) == (2, "")
    assert f"{outcomes_in(copy)}, found no such file" in done.err


def test_a_file_of_another_kind_is_not_replaced_by_outcomes(sparsekv, copy):
    outcomes_in(copy).write_text("mine\n")
    done = sparsekv("verify", copy, *SMALL, "--samples", 1, "--write")
    assert done.code == 2
    assert "found another file" in done.err
    assert outcomes_in(copy).read_text() == "mine\n"


def decided(folder: Path, outcome: str) -> Plan:
    claim = Claim(gate=0.05, mean=0.0, bound=0.04, prompts=90, outcome=outcome)
    measured = Measurement(lengths=(1024,), density=0.5, claims={"divergence": claim})
    quality = Quality(prefill=measured, evidence=full_plan().quality.evidence)
    return load_plan(plan_in(folder)).model_copy(update={"quality": quality})


@pytest.mark.parametrize(("outcome", "code"), [("met", 0), ("missed", 1)])
def test_a_decided_verification_says_that_nothing_is_left(sparsekv, copy, outcome, code):
    write_plan(decided(copy, outcome), plan_in(copy))
    done = sparsekv("verify", copy, "--write", "--more")
    assert done.code == code
    assert "nothing is left to be drawn" in done.err


def test_what_is_decided_leaves_no_outcomes(sparsekv, copy):
    strict = ("--set", "max_kl=0", "--write")
    done = sparsekv("verify", copy, *SMALL, *strict, "--samples", 1)
    assert done.code == 0, done.err
    assert outcomes_in(copy).exists()
    done = sparsekv("verify", copy, "--write", "--more", "--samples", 30)
    assert done.code == 1, done.err
    assert "gate missed" in done.err
    assert not outcomes_in(copy).exists()
    assert "nothing is left to be drawn" in sparsekv("verify", copy, "--write", "--more").err


def test_an_interruption_loses_no_more_than_a_round(sparsekv, begun, monkeypatch):
    before = json.loads(outcomes_in(begun).read_text())["drawn"] if outcomes_in(begun).exists() else []
    looks, given = [], Outcomes.look

    def look(self: Outcomes, **options: bool) -> None:
        looks.append(None)
        if len(looks) > 2:
            raise KeyboardInterrupt
        given(self, **options)

    monkeypatch.setattr(Outcomes, "look", look)
    sparsekv("verify", begun, "--write", "--more", "--samples", 6)
    monkeypatch.undo()
    ((length, drawn),) = json.loads(outcomes_in(begun).read_text())["drawn"]
    assert [[length, drawn]] != before
    done = sparsekv("verify", begun, "--write", "--more", "--samples", drawn + 1)
    assert done.code == 0, done.err


def test_the_next_command_repeats_what_outcomes_were_made_with():
    ended = Ended(goes_on=True, needed=1e9, asked=("--dtype float32", "--prompts 'my prompts.jsonl'"))
    assert ended.flags == "--dtype float32 --prompts 'my prompts.jsonl' --write --more --verify-time 1000000"
    assert Ended(spent=400).flags == "--write --verify-time 1800"
    assert Ended(writes=False, measured=("--lengths 4k",)).flags == "--lengths 4k --verify-time 1800"


ASKED = {
    "device": "cpu",
    "dtype": "float32",
    "backend": "reference",
    "prefill_chunk": 512,
    "prompts_file": Path("my prompts/v1.0"),
    "lengths": (1000, 4096),
    "tasks": ("kv_retrieval", "vt"),
    "seed": 3,
    "max_accuracy_drop": 1.0,
    "max_kl": 0.0123456789,
    "max_decode_kl": 0.0,
}
# The next command names the plan and its model, writes, has a time of its own, and prints what it says by default.
NOT_REPEATED = {"target", "model", "plan", "as_json", "full", "write", "more", "verify_samples", "verify_time"}


def test_prompts_that_are_used_up_are_not_given_again() -> None:
    flags = VerifyFlags(plan=Path("p"), prompts_file=Path("p.jsonl"), prefill_chunk=512)
    assert run_by(flags, False) == ("--prefill-chunk 512", "--prompts p.jsonl")
    assert run_by(flags, True) == ("--prefill-chunk 512",)


def test_every_option_of_a_verification_is_repeated_or_named_by_the_next_command():
    named = {*(one.name for one in VerifyFlags.spelled()), *VerifyFlags.set_keys()}
    assert named == NOT_REPEATED | {
        *RUN_BY,
        *DRAWN_BY,
        *GATED_BY,
    }
    assert ASKED.keys() == {*RUN_BY, *DRAWN_BY, *GATED_BY}


@pytest.mark.parametrize("leave_out", [("prompts_file",), DRAWN_BY], ids=str)  # prompts are drawn from one or the other
def test_repeated_options_are_read_back_as_they_were_given(leave_out):
    given = VerifyFlags(**{name: value for name, value in ASKED.items() if name not in leave_out})
    found = []

    def note(flags: VerifyFlags) -> None:
        found.append(flags)

    words = shlex.split(" ".join(repeated(given, (*RUN_BY, *DRAWN_BY, *GATED_BY))))
    commands.app(commands.command(note))(words, standalone_mode=False)
    assert found == [given]


@pytest.mark.parametrize("asked", [(), ("--set", "max_kl=0.01"), ("--prefill-chunk", "512")], ids=str)
def test_the_printed_next_command_measures_the_same(sparsekv, copy, asked):
    done = sparsekv("verify", copy, *SMALL, "--samples", 1, *asked)
    assert done.code == 0, done.err
    command = done.out[done.out.index("next: sparsekv verify") :].splitlines()[0]
    assert "--lengths 1k --set tasks=kv_retrieval" in command
    assert " ".join(asked) in command


def test_a_plan_of_other_weights_is_not_written_by_the_next_command(sparsekv, copy, tmp_path):
    other = save_model(tiny_model(context=2048, seed=1), tmp_path / "other")
    done = sparsekv("verify", other, "--plan", plan_in(copy), *SMALL, "--samples", 1)
    assert done.code == 0, done.err
    assert "next: sparsekv verify" in done.out
    assert "--write" not in done.out


def test_a_plan_leaves_outcomes_that_verify_goes_on_from(sparsekv, model, tmp_path):
    out = tmp_path / "plan.yaml"
    fast = (
        "--lengths",
        "1k",
        "--set",
        "tasks=kv_retrieval",
        "--only",
        "decode",
        "--set",
        "filter_layers=0",
        "--no-crossover",
    )
    planned = sparsekv(
        "plan", model, "-o", out, *fast, *LOOSE, "--set", "calibration_samples=1", "--set", "verify_samples=1"
    )
    assert planned.code == 0, planned.err
    gates = " ".join(map(str, LOOSE))
    assert f"sparsekv verify {model} --plan {out} {gates} --write --verify-time" in planned.out
    done = sparsekv("verify", model, "--plan", out, "--write", "--more", "--samples", 2)
    assert done.code == 0, done.err
    assert load_plan(out).quality.evidence.prompts == 2
