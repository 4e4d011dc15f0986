"""Pages are read by strangers: a README of one page, short sentences, figures that name their source."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from prose import AVERAGE, FORBIDDEN, LONGEST, sentences, words

from sparsekv.plans.files import load_plan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "provenance.md"),
]  # of figures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short_and_plain(page: Path) -> None:
    found = [*sentences(page.read_text())]
    assert not [said for said in found if words(said) > LONGEST]
    assert not [said for said in found if FORBIDDEN.search(said)]
    in_text = [*sentences(re.sub(r"^\|.*$", "", page.read_text(), flags=re.MULTILINE))]
    assert fmean(map(words, in_text)) <= AVERAGE


def test_the_sentences_of_a_page_are_found_wherever_they_stand() -> None:
    prose, code, cells = (
        "One is here. Two\nis there: `a. B`.\n\n- Three.\n  Still.",
        "Not this.",
        "| Four. Five. |\n|---|",
    )
    page = f"# A head\n\n{prose}\n\n```sh\n{code}\n```\n\n{cells}\n"
    assert [*sentences(page)] == ["One is here.", "Two is there: `code`.", "Three.", "Still.", "Four.", "Five."]
    assert FORBIDDEN.search("What it gains is little.")
    assert not FORBIDDEN.search("What does it gain?")


def test_the_readme_is_a_page() -> None:
    text = README.read_text()
    assert text.count("\n") <= 90
    assert len(text.split()) <= 800
    assert len(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\]\([^)]*\)", "", text))) <= 60
    assert not re.search(r"\b[0-9a-f]{7,40}\b|\b20\d\d-\d\d-\d\d\b", re.sub(r"\]\([^)]*\)", "", text))
    table = re.findall(r"^\|.*$", text, re.MULTILINE)
    assert len(table) <= 2 + 5, "one table of at most five rows"


def test_the_docs_are_an_evening() -> None:
    lines = {page: page.read_text().count("\n") for page in (ROOT / "docs").glob("*.md")}
    assert sum(lines.values()) <= 2300
    assert lines[ROOT / "docs" / "vllm.md"] <= 110


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    done = subprocess.run(site, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("plan", sorted((ROOT / "zoo").glob("*.yaml")), ids=lambda plan: plan.name)
def test_a_plan_of_the_zoo_is_sound_and_listed(plan: Path) -> None:
    assert load_plan(plan).planned_lengths
    assert len(repr(load_plan(plan))) < 80
    assert f"({plan.name})" in (ROOT / "zoo" / "README.md").read_text()
    measured = ROOT / "bench" / "results" / plan.name.replace(".sparsekv", "")
    assert not measured.exists() or measured.read_bytes() == plan.read_bytes()
