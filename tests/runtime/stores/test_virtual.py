"""A store in virtual memory is a list of tokens a row, whatever happens to it, and gives everything back."""

import os

import pytest
import torch
from host_pages import host_pool
from store_operations import run_operations

from sparsekv.runtime.stores.store import Layout

LAYOUT = Layout(1, 3, 8, torch.float32, torch.device("cpu"))  # 96 bytes a token: no divisor of a page


def test_random_operations_agree_with_lists():
    run_operations(host_pool(), 0, 1000, LAYOUT)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_many_random_operations_agree_with_lists():
    for seed in range(int(os.environ.get("FUZZ_COUNT", "10000")) // 2000):
        run_operations(host_pool(), seed + 1, 2000, LAYOUT)
