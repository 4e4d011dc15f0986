"""Wraps the paragraphs and list items of Markdown pages to 120 columns: `python tools/wrap_pages.py PAGE...`."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 120
_ITEM = re.compile(r" *(?:[-*+]|\d+[.)]) +")
_NO_PROSE = re.compile(r"[|#<>]|!\[|\[[^\]]+\]: |[-=]{3,}\s*$|\s*$")
_CODE = re.compile(r" {4}(?! *(?:[-*+]|\d+[.)]) )")  # where no paragraph goes on
_OPENS = re.compile(r" (?=(?:[-*+>|=]|\d+[.)]|#+|[-=]{3,})(?: |$))")  # before what would open a list, table or heading
_GLUE = "\x00"


def blocks(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Yields the lines of a page that belong together, and whether they are a paragraph or a list item."""
    block: list[str] = []  # of the paragraph or item so far
    fenced = False
    for line in text.splitlines():
        is_mark = line.startswith("```")
        is_code = fenced or is_mark or (not block and bool(_CODE.match(line)))
        is_prose = not (is_code or _NO_PROSE.match(line))
        if block and (_ITEM.match(line) or not is_prose):
            yield True, block
            block = []
        if is_prose:
            block.append(line)
        else:
            yield False, [line]
        fenced ^= is_mark
    if block:
        yield True, block


def wrapped(text: str) -> str:
    """Returns the page with its paragraphs and list items wrapped; tables, headings and code stay as they are."""
    lines = (line for is_prose, block in blocks(text) for line in (_wrapped(block) if is_prose else block))
    return "\n".join(lines) + "\n"


def _wrapped(block: list[str]) -> list[str]:
    item = _ITEM.match(block[0])
    first = item[0] if item else " " * (len(block[0]) - len(block[0].lstrip()))
    words = _OPENS.sub(_GLUE, " ".join(" ".join(block).split()).removeprefix(" ".join(first.split())).lstrip())
    indents = {"initial_indent": first, "subsequent_indent": " " * len(first)}
    found = textwrap.wrap(words, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)
    return [line.replace(_GLUE, " ") for line in found]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(wrapped(Path(name).read_text()))
