"""The interpreter runs Triton kernels where there is no GPU; it must be chosen before triton is imported."""

import os

import pytest
import torch
from torch_threads import torch_threads

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads(1):
        yield
