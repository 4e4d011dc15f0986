"""What every planner test relies on: short filler text, and a small model with its tokenizer."""

import pytest
from planner_models import loaded_tiny
from quick_timings import quick_timings as quick_timings
from short_filler import short_filler as short_filler

from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_tiny()
