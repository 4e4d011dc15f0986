"""Sentences of Markdown pages, and what style forbids in them."""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST, AVERAGE = 25, 14  # words of a sentence
# Forms that need a second reading: a clause as the subject, a verb that hides who acts, a word that is not the field's.
FORBIDDEN = re.compile(
    r"^(?:What|That|Those|Of|Whether) [^?]*\.$"
    r"|\b(?:is|are|says|holds|returns|prints|tells|by|to|of) what\b|\bis told\b|\bnobody\b|\bwhoever\b|\bas ever\b"
    r"|\bthe very\b|\bof ours\b|\bof its own\b|\bby itself\b|\bwhere it says so\b|\bkeeping less\b",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[.?!])\s+(?=[^\s\d])|(?<=[.?!][)\"])\s+")
_ITEM = re.compile(r"^ *(?:[-*+]|\d+[.)]) +")
_MADE = re.compile(r"<!-- made by .*?<!-- end.*?-->|^```.*?^```|<!--.*?-->", re.DOTALL | re.MULTILINE)  # by tools, code


def sentences(page: str) -> Iterator[str]:
    """Sentences of paragraphs, list items and table cells; code, headings, pictures and blocks of tools have none."""
    text = _MADE.sub("", page)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_prose = bool(line.strip()) and not re.match(r"[|#]|!\[|    +\S", line)
        if block and (not is_prose or _ITEM.match(line)):
            yield from _split(" ".join(block))
            block = []
        if is_prose:
            block.append(_ITEM.sub("", line))
        elif line.startswith("|") and not line.startswith("|--"):
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                yield from _split(cell)


def _split(text: str) -> Iterator[str]:
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    plain = re.sub(r"`[^`]*`(?:, `[^`]*`)*", "`code`", plain).replace("**", "").replace("*", "")
    yield from (part.strip() for part in _END.split(plain) if re.search("[a-z]", part))


def words(sentence: str) -> int:
    return len(re.findall(r"[\w`][\w`.,'/+-]*", sentence))
