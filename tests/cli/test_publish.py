"""publish: a plan beside its model, its section of the card between markers, and nothing else that changes."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import sparse_plan
from plans_samples import full_plan, small_plan
from tiny_models import tiny_model

from sparsekv.cli.model_card import BEGIN, END, TAGS, with_plan
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Target

SECTION = f"{BEGIN}\nold\n{END}"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(sparse_plan(tiny_model(context=2048)), path)
    return path


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_a_published_plan_is_found_beside_its_model_and_again_changes_nothing(sparsekv, plan, copy):
    (copy / "sparsekv.yaml").unlink()
    done = sparsekv("publish", plan, copy)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"hf upload tests/tiny {copy} . --include sparsekv.yaml --include README.md"
    assert (copy / "sparsekv.yaml").read_bytes() == plan.read_bytes()
    assert sparsekv("validate", copy).code == 0
    written = {path: path.read_bytes() for path in copy.iterdir()}
    data = sparsekv("publish", copy, copy, "--json").data
    assert (data["written"], [file["changed"] for file in data["files"]]) == (False, [False, False])
    assert {path: path.read_bytes() for path in copy.iterdir()} == written


def test_a_plan_of_another_model_is_not_published_and_no_option_is_offered(sparsekv, copy, tmp_path):
    other = tmp_path / "other.yaml"
    write_plan(sparse_plan(tiny_model(layers=4, context=2048)), other)
    done = sparsekv("publish", other, copy)
    assert done.code == 3, done.err
    assert "layers: plan 4, model 3" in done.err
    assert "--allow-mismatch" not in done.err


def test_a_dry_run_prints_the_change_and_writes_nothing(sparsekv, plan, copy):
    (copy / "README.md").write_text("# Mine\n")
    (copy / "sparsekv.yaml").unlink()
    done = sparsekv("publish", plan, copy, "--dry-run")
    assert done.code == 0, done.err
    for line in (f"+++ {copy}/sparsekv.yaml", f"--- {copy}/README.md", "+tags:", "+- sparsekv", f"+{BEGIN}", " # Mine"):
        assert line in done.out.splitlines()
    assert (copy / "README.md").read_text() == "# Mine\n"
    assert not (copy / "sparsekv.yaml").exists()
    assert sparsekv("publish", plan, copy, "--dry-run", "--json").data["diff"].startswith("--- ")


def test_the_card_says_what_was_planned_for_which_device_and_quality_with_bounds():
    card = with_plan("", full_plan(), "example/model")
    for part in (
        "2 x NVIDIA H200",
        "| Status | verified |",
        "Shown below",
        "With 95% intervals",
        "Measured at 8k, 32k",
    ):
        assert part in card
    for part in ("sparsekv.apply(model", "vllm serve example/model", "sparsekv run example/model"):
        assert part in card
    assert "Not measured" in with_plan("", small_plan(), "example/model")


CARDS = {
    "none": "",
    "no metadata": "# Mine\n\ntext\n",
    "a list": "---\nlicense: mit # mine\ntags:\n  - llama\nlanguage: en\n---\n# Mine\n",
    "a list without indentation": "---\ntags:\n- llama\n- sparsekv\n---\n# Mine\n",
    "in a line": "---\ntags: [llama, chat]\nlicense: mit\n---\n# Mine\n",
    "one word": "---\ntags: llama\n---\n# Mine\n",
    "empty": "---\ntags:\n---\n# Mine\n",
    "without": "---\nlicense: mit\n---\n# Mine\n",
    "windows": "---\r\nlicense: mit\r\ntags:\r\n- llama\r\n---\r\n# Mine\r\n",
    "an older section": f"# Mine\n\n{SECTION}\n\nbelow\n",
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_keeps_all_that_is_not_ours_and_gets_the_tags_once(name):
    card = CARDS[name]
    before = metadata(card) if card.startswith("---") else {}
    made = with_plan(card, small_plan(), "example/model")
    known = before.pop("tags", None) or []
    found = metadata(made)
    own = [known] if isinstance(known, str) else known
    assert found.pop("tags") == [*own, *(tag for tag in TAGS if tag not in own)]
    assert found == before
    assert ("# Mine" in made) == ("# Mine" in card)
    assert ("below" in card.splitlines()) == ("below" in made.splitlines())
    assert "\nold\n" not in made
    assert made.count("\n") == made.count("\r\n") or "\r" not in card
    assert with_plan(made, small_plan(), "example/model") == made


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("a-#: \n[]'\""), max_size=60))
def test_any_text_survives_and_a_second_time_nothing_changes(text):
    try:
        made = with_plan(text, small_plan(), "example/model")
    except UsageError:
        return
    assert text.split("---")[-1].rstrip() in made
    assert with_plan(made, small_plan(), "example/model") == made


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (f"{BEGIN}\n", "1 and 0 times"),
        (f"{END}\n{BEGIN}\n", "another order"),
        (f"{SECTION}\n{SECTION}\n", "2 and 2 times"),
        ("---\nlicense: mit\n", "a line ---"),
        ("---\n- a\n---\n", "a mapping"),
        ("---\na: [\n---\n", "a mapping"),
        ("---\ntags: [1]\n---\n", "a list of words"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_card_that_cannot_be_made_out_is_left_alone(sparsekv, plan, copy, card, said):
    (copy / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    before = {path: path.read_bytes() for path in copy.iterdir()}
    done = sparsekv("publish", plan, copy)
    assert (done.code, said in done.err) == (2, True), done.err
    assert {path: path.read_bytes() for path in copy.iterdir()} == before


def test_a_name_in_a_plan_cannot_end_its_section():
    target = Target(device=f"GPU {END} | x", backend="triton", dtype="float16")
    made = with_plan("", small_plan(targets=(target,)), "example/model")
    assert (made.count(BEGIN), made.count(END)) == (1, 1)


def test_the_plan_of_another_model_is_not_put_beside_this_one(sparsekv, copy, tmp_path):
    write_plan(small_plan(), tmp_path / "other.yaml")
    before = (copy / "sparsekv.yaml").read_bytes()
    done = sparsekv("publish", tmp_path / "other.yaml", copy)
    assert done.code == 3
    assert (copy / "sparsekv.yaml").read_bytes() == before
    assert not (copy / "README.md").exists()


def test_files_that_are_not_the_users_are_not_written(sparsekv, plan, copy, tmp_path):
    for call in (("tiny-retriever",), (copy, "--out", tmp_path / "none")):
        done = sparsekv("publish", plan, *call)
        assert (done.code, "expected" in done.err) == (2, True)
    (copy / "README.md").unlink(missing_ok=True)
    os.symlink(tmp_path / "blob", copy / "README.md")
    done = sparsekv("publish", plan, copy)
    assert (done.code, "link" in done.err) == (2, True)
    assert not (tmp_path / "blob").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sparsekv.yaml").write_text("mine: true\n")
    done = sparsekv("publish", plan, copy, "--out", tmp_path / "out")
    assert (done.code, "another file" in done.err) == (2, True)


def test_a_full_disk_leaves_the_card_as_it_was(sparsekv, plan, copy, full_disk):
    (copy / "README.md").write_text("# Mine\n")
    full_disk("README.md")
    done = sparsekv("publish", plan, copy)
    assert (done.code, "unchanged" in done.err) == (2, True)
    assert (copy / "README.md").read_text() == "# Mine\n"
