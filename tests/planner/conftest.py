"""What every planner test relies on: short filler text, and a small model with its tokenizer."""

from collections.abc import Iterator

import pytest
from planner_models import loaded_tiny

from sparsekv.planner.tasks import samples
from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(autouse=True, scope="session")
def _short_filler() -> Iterator[None]:
    """Little filler text: encoding it by single characters takes seconds."""
    whole = samples.load_filler_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "load_filler_text", lambda split: whole(split)[:60_000])
        yield


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_tiny()
