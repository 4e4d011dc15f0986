"""A plan as Markdown, for pull requests and model cards: the tables of `show`, with nothing in them that is markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

# Markup, HTML, formulas, mentions and addresses anywhere; lists, headings and rules at the start of a line.
_MARKUP = re.compile(r"[&<>`*_~$|\\[\]]|[#@](?=\w)|:(?=//)|(?<=www)\.|^[-+=#]|^\d(?=\d*[.)](?:\s|$))", re.IGNORECASE)
_LINKED = "#@"  # issues and people, by GitHub also where they are entities: what follows is kept apart
# Turns text around, or does not show.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def cell(text: str) -> str:
    """A text in one line of Markdown that shows as it is, wherever it stands."""
    seen = _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], " ".join(text.split()))
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};{'&#8203;' * (found[0] in _LINKED)}", seen)


def table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    """A table of texts, whose rows may end early; `numbers` says which columns are aligned to the right."""
    sides = numbers or [False] * len(names)
    head = (list(map(cell, names)), ["--:" if right else "---" for right in sides])
    body = ([*map(cell, row), *[""] * (len(names) - len(row))] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *body))


def markdown(parts: Iterable[RenderableType]) -> str:
    return "\n\n".join(part for one in parts for part in _part(one)) + "\n"


def _part(part: RenderableType) -> Iterator[str]:
    if isinstance(part, Text):
        text = part.plain.strip("\n")
        yield f"```\n{text.replace('```', '')}\n```" if "\n" in text else _titled(text, bool(part.style))
    elif isinstance(part, Table):
        if part.title:
            yield _titled(str(part.title), True)
        columns = part.columns
        names = [str(column.header) if part.show_header else "" for column in columns]
        rows = zip(*([_plain(one) for one in column.cells] for column in columns), strict=True)
        yield table(names, rows, [column.justify == "right" for column in columns])


def _titled(text: str, bold: bool) -> str:
    return f"**{cell(text)}**" if bold else cell(text)


def _plain(found: RenderableType) -> str:
    return found.plain if isinstance(found, Text) else str(found)
