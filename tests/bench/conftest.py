"""What tests of the laboratory rely on: the command line, short filler text, and a small model with its tokenizer."""

from pathlib import Path

import pytest
from command_line import asked as asked
from command_line import sparsekv as sparsekv
from model_folders import save_model, sparse_plan
from planner_models import loaded_tiny
from short_filler import short_filler as short_filler
from tiny_models import tiny_model

from sparsekv.plans.files import write_plan
from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return loaded_tiny()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a plan beside it, which no test writes to."""
    model = tiny_model(context=2048)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(sparse_plan(model), folder / "sparsekv.yaml")
    return folder
