"""What the documents point at is there, and the page of commands says what the command line does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def test_the_page_of_models_is_what_the_records_and_the_tests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from build_models_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/build_models_page.py"


def test_the_tables_of_quality_go_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr("sparsekv.bench.quality_file.read_quality", lambda path: path.name)
    monkeypatch.setattr("sparsekv.bench.quality_file.markdown", lambda found: [f"table of {found}"])
    monkeypatch.delitem(sys.modules, "build_quality_page", raising=False)
    from build_quality_page import BEGIN, END, PAGE, page

    once = page(PAGE.read_text(), [Path("a.json"), Path("b.json")])
    assert f"{BEGIN}table of a.json\n\ntable of b.json\n{END}" in once
    assert page(once, [Path("a.json"), Path("b.json")]) == once
    assert page(once, []) == page(PAGE.read_text(), [])


def test_the_table_of_engine_settings_is_what_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from build_settings_table import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/build_settings_table.py"


def test_the_page_of_commands_is_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "build_command_page", raising=False)
    from build_command_page import PAGE, page

    assert PAGE.read_text() == page(), "run python tools/build_command_page.py"


def test_the_page_of_the_api_is_what_signatures_and_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from build_api_page import PAGE, page

    assert PAGE.read_text() == page(), "run python tools/build_api_page.py"
