"""Writes the tables of docs/quality.md from files of `sparsekv compare`: `python tools/build_quality_page.py
compare.jsonl ...`, in that order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from sparsekv.bench.compare_file import CompareFile, CompareRun, rows, sentences, table_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
BEGIN, END = "<!-- made by tools/build_quality_page.py -->\n", "<!-- end -->\n"


def markdown(file: CompareFile) -> Iterator[str]:
    """Lines of a page: what was run, the table, and a sentence for each comparison."""
    settings, every = file.settings, list(rows(file))
    yield f"{settings.model}, {settings.dtype}, {settings.device}, {settings.phase}, {settings.suite}:\n"
    header, *lines = (f"| {' | '.join(row)} |" for row in table_of(file, every))
    yield from (header, "|---" * (header.count(" | ") + 1) + "|", *lines)
    yield ""
    yield from (f"- {sentence}" for sentence in sentences(file, every))


def page(text: str, files: list[Path]) -> str:
    """Returns the page with the tables of these files in their place."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"expected {BEGIN.strip()} and {END.strip()} in {PAGE}, found no pair of them")
    found = "\n".join("\n".join(markdown(CompareFile.read(CompareRun, file))) + "\n" for file in files)
    return before + BEGIN + found + END + after


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    PAGE.write_text(page(PAGE.read_text(), [*map(Path, sys.argv[1:])]))
