"""The tools are scripts of the checkout: they are imported from their folder."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from reference_model.corpus import standard_library

_PACKAGES = ("json", "logging", "importlib", "wsgiref")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the standard library."""
    folder = tmp_path_factory.mktemp("library")
    for package in _PACKAGES:
        shutil.copytree(standard_library() / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
