"""Little filler text, encoded once: all of it by single characters, as tiny models read it, takes seconds a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sparsekv.planner import tasks
from sparsekv.planner.tasks.text import Filler, PieceEncoder

CHARACTERS = 60_000


@pytest.fixture(autouse=True, scope="session")
def short_filler() -> Iterator[None]:
    whole = tasks.load_filler_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "load_filler_text", lambda split: whole(split)[:CHARACTERS])
        patch.setattr(Filler, "from_text", _once(Filler.from_text))
        yield


def _once(from_text: Callable[[str, PieceEncoder], Filler]) -> Callable[[str, PieceEncoder], Filler]:
    """Encodes a text once for all tokenizers that read it by the same single characters."""
    found: dict[object, Filler] = {}

    def remembered(text: str, encoder: PieceEncoder) -> Filler:
        lines, letters = text[:2000].splitlines(keepends=True), sorted({*text})
        if [*map(len, encoder.encode_lines(lines))] != [*map(len, lines)]:
            return from_text(text, encoder)
        key = (text, *(tuple(ids) for ids in encoder.encode_lines(letters)))
        if key not in found:
            found[key] = from_text(text, encoder)
            found[key].ids.flags.writeable = found[key].line_ends.flags.writeable = False
        return found[key]

    return remembered
