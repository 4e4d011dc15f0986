"""Stands in for SGLang's compiled kernels, of which there is no build for every CPU: SGLang imports names of it, and
computes with torch where the kernels are not there."""

from typing import Any
from unittest.mock import MagicMock


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
