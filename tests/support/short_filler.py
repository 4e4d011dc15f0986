"""Little filler text: encoding all of it by single characters, as tiny models read it, takes seconds a plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparsekv.planner.tasks import samples

CHARACTERS = 60_000


@pytest.fixture(autouse=True, scope="session")
def short_filler() -> Iterator[None]:
    whole = samples.load_filler_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "load_filler_text", lambda split: whole(split)[:CHARACTERS])
        yield
