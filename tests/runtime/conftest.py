"""Calls of these tests are small: one thread of torch is the fastest."""

import pytest
from torch_state import torch_threads


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads(1):
        yield
