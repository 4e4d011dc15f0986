"""Command lines that documents show: blocks of code, and spans of code in prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MARK = re.compile(r"\s*\(?at\s+([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class Shown:
    """A block of code, or a span of it.

    Attributes:
        lines: without comments; one that goes on behind a backslash is one line.
        commit: that is named behind a span, or at the end of the line before a block.
        is_span: it stands in prose.
    """

    lines: tuple[str, ...]
    commit: str = ""
    is_span: bool = False


def shown(text: str) -> Iterator[Shown]:
    """The blocks of a page, then its spans. Blocks of Python are no command lines."""
    prose, block, fence = [], [], None
    for line in [*text.splitlines(), ""]:
        is_fence = line.lstrip().startswith("```")
        inside = fence is not None or bool(re.match(r"    \S", line)) or bool(block and block[-1].endswith("\\"))
        if inside and not is_fence:
            block.append(line)
        elif block:
            if fence != "python":
                yield Shown(tuple(_lines(block)), _commit_of(prose))
            block = []
        if is_fence:
            fence = None if fence is not None else line.strip().strip("`")
        prose.append("" if inside or is_fence else line)
    for paragraph in "\n".join(prose).split("\n\n"):
        for span in re.finditer(r"`([^`]+)`", paragraph):
            mark = MARK.match(paragraph, span.end())
            yield Shown((" ".join(span[1].split()),), mark[1] if mark else "", is_span=True)


def _commit_of(prose: list[str]) -> str:
    mark = re.search(r"\(at ([0-9a-f]{7,40})\):$", next((line for line in reversed(prose) if line), ""))
    return mark[1] if mark else ""


def _lines(block: list[str]) -> Iterator[str]:
    joined = re.sub(r"\\+\n\s*", " ", "\n".join(line.split(" #")[0].rstrip() for line in block))
    yield from (line.strip() for line in joined.splitlines())
