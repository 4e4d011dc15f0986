"""What tests of the laboratory rely on: the command line, short filler text, and a small model with its tokenizer."""

import pytest
from command_line import asked as asked
from command_line import sparsekv as sparsekv
from planner_models import loaded_tiny
from short_filler import short_filler as short_filler

from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_tiny()
