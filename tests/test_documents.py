"""What the documents point at is there, and the page of commands says what the command line does."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparsekv.plans.patterns import PATTERNS
from sparsekv.plans.schema import Status
from sparsekv.runtime.settings import Backend, Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "zoo" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_ROWS, MOST_OF_PLAN, MOST_SETTINGS = 130, 20, 170
MADE = ("commands.md", "api.md", "provenance.md")  # by tools, a paragraph a line
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_between_pages_leads_somewhere(page: Path) -> None:
    for place, anchor in LINK.findall(page.read_text()):
        target = (page.parent / place) if place else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_a_clone_shows_no_change_after_the_commands_of_the_readme() -> None:
    outputs = re.findall(r"sparsekv (?:plan|import) .*? -o (\S+\.yaml)", (ROOT / "README.md").read_text())
    written = {name for out in outputs for name in (out, f"{out}.profile.partial")}
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    ignored = subprocess.run((*git, "check-ignore", *written), capture_output=True, text=True, check=False)
    assert {*ignored.stdout.split()} == written
    hidden = subprocess.run((*git, "ls-files", "--cached", "--ignored", "--exclude-standard"), capture_output=True)
    assert (hidden.returncode, hidden.stdout) == (0, b"")


def test_the_page_of_models_is_what_the_records_and_the_tests_say_and_lists_every_causal_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from build_models_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/build_models_page.py"
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "of_the_next_release", "")
    with pytest.raises(ValueError, match=r"found of_the_next_release in none .* add a record to ARCHITECTURES or"):
        page(PAGE.read_text())


def test_options_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page of commands lists, by its generator: rows of options, keys of `--set`, and variables."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "build_command_page", raising=False)
    from build_command_page import commands

    found = {name: rows for name, _, rows, _ in commands()}
    keys = {label.split("=")[0] for _, _, _, rows in commands() for label, _ in rows}
    assert sum(map(len, found.values())) <= MOST_ROWS
    assert len(found["sparsekv plan"]) <= MOST_OF_PLAN
    assert sum(map(len, found.values())) + len(keys) + len(fields(Settings)) <= MOST_SETTINGS


def test_the_page_of_commands_is_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "build_command_page", raising=False)
    from build_command_page import PAGE, page

    assert PAGE.read_text() == page(), "run python tools/build_command_page.py"


def test_the_page_of_the_api_is_what_signatures_and_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from build_api_page import PAGE, page

    assert PAGE.read_text() == page(), "run python tools/build_api_page.py"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in MADE], ids=lambda page: page.name)
def test_paragraphs_are_wrapped(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from wrap_pages import wrapped

    assert page.read_text() == wrapped(page.read_text()), f"run python tools/wrap_pages.py {page.relative_to(ROOT)}"


PAGE_OF_ALL = """# A heading, {words}

A paragraph with a word
alone
on a line, and `code - with a dash`, which must not begin a line {words} - nor may this dash.

1. An item, {words}
   which goes on.
   - One within it, {words}

    sparsekv run --plan plan.yaml {words}

```sh
sparsekv run --plan plan.yaml {words}
```

| a | table |
|---|---|
| {words} | |
""".replace("{words}", "and so on " * 14)


def test_wrapping_a_page_changes_line_ends_of_its_prose_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from wrap_pages import blocks, wrapped

    once = wrapped(PAGE_OF_ALL)
    assert once.split() == PAGE_OF_ALL.split()
    assert wrapped(once) == once
    prose = [line for is_prose, block in blocks(once) if is_prose for line in block]
    assert max(map(len, prose)) <= 120
    assert not [line for line in prose if line.lstrip().startswith("- ") and not line.startswith("   - One")]
    whole = [line for line in PAGE_OF_ALL.splitlines() if line.startswith(("#", "    ", "```", "sparsekv", "|"))]
    assert [line for line in once.splitlines() if line in whole] == whole


# Of the field, as pages, `--help` and the verdict of a plan use them.
FIELD_TERMS = """nats, divergence, sinks, captured step, A-shape, vertical-slash, antidiagonal, filter layer
follower, segment, crossover, draft, verify, accept, drafter, budget, share, density, floor, cell
held-out, top-1, calibration, damage, profile, bucket, tile, column, hot set, offload
KV cache eviction, block table, prefix caching, preemption, RULER, planted, fingerprint, seal
backend, selector, miss rate, virtual memory, chunk, preset, recurrent""".replace("\n", ", ").split(", ")


def test_the_glossary_explains_the_terms_of_the_field_and_the_values_of_a_plan() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert {len(row) for row in cells} == {2}
    terms = " ".join(term for term, _ in cells).lower()
    values = (*PATTERNS, *get_args(Status), *get_args(Backend))
    named = " ".join(" ".join(row) for row in cells)
    assert not [term for term in FIELD_TERMS if term.lower() not in terms]
    assert not [value for value in values if value != "auto" and value not in named]
