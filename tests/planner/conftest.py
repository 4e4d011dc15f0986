"""What every planner test relies on: short filler text, and a small model with its tokenizer."""

from collections.abc import Iterator

import pytest
from planner_models import QUICK, loaded_tiny
from short_filler import short_filler as short_filler

from sparsekv.planner.fixed_test import SIZES
from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_tiny()


@pytest.fixture(scope="session", autouse=True)
def quick_tests() -> Iterator[None]:
    """A verification has two prompts a cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "small", QUICK)
        yield
