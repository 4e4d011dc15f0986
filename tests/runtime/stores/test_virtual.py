"""A store in virtual memory is a list of tokens a row, whatever happens to it, and gives everything back."""

import os

import pytest
import torch
from host_pages import host_pool
from store_operations import run_operations

from sparsekv.kernels.backends import Fallback
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.stores.page_driver import PageError
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore

LAYOUT = Layout(1, 3, 8, torch.float32, torch.device("cpu"))  # 96 bytes a token: no divisor of a page


def test_random_operations_agree_with_lists():
    run_operations(host_pool(), 0, 1000, LAYOUT)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_many_random_operations_agree_with_lists():
    for seed in range(int(os.environ.get("FUZZ_COUNT", "10000")) // 2000):
        run_operations(host_pool(), seed + 1, 2000, LAYOUT)


def test_what_runs_out_of_memory_is_begun_again_once_free_pages_are_given_back():
    pool = host_pool()
    store = VirtualStore(pool, 500)
    store.append(*torch.zeros(2, 1, 3, 100, 8))
    del store

    def call(backend: str) -> int:
        if pool.bytes:
            raise torch.OutOfMemoryError("out of memory")
        return 7

    fallback = Fallback("cpu", pool.trim)
    assert pool.bytes
    assert (fallback.run(call, torch.zeros(1, 1, 1, 8)), fallback.failed) == (7, {})
    with pytest.raises(torch.OutOfMemoryError):
        fallback.decode(lambda backend: store_of_no_memory(), "cpu", LAYOUT.device)


def store_of_no_memory() -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_a_thread_maps_pages_while_others_wait_for_theirs():
    pool = host_pool(at_once=False)
    stores = [VirtualStore(pool, 50_000) for _ in range(8)]
    for store in stores:
        store.expect([40_000], LAYOUT)
    for store in reversed(stores):
        k, v = torch.randn(2, 1, 3, 40_000, 8)
        store.append(k, v)
        assert torch.equal(store.view(torch.tensor([40_000])).k[:, :, :40_000], k)
    assert pool.used == sum(store.bytes.device for store in stores)


def test_more_rows_than_there_are_addresses_for_are_refused_with_those_that_fit():
    pool = host_pool()
    pool.driver.addresses = 2 * 3 * 96 * 4096 + 4096
    with pytest.raises(UsageError, match="4 rows of 4,096 tokens in a layer, found some for 3"):
        VirtualStore(pool, 4096).append(*torch.zeros(2, 4, 3, 10, 8))
    assert (pool.used, pool.driver.reserved) == (0, {})


def test_a_call_that_fails_is_named_and_leaves_the_store_as_it_was():
    pool = host_pool()
    store = VirtualStore(pool, 500)
    k, v = torch.randn(2, 1, 3, 50, 8)
    store.append(k, v)
    before = pool.used, store.capacity
    for name in ("map", "allow"):
        pool.driver.fail = name
        with pytest.raises(PageError, match=name):
            store.append(*torch.randn(2, 1, 3, 400, 8))
        assert (pool.used, store.capacity, store.lengths) == (*before, (50,))
        assert torch.equal(store.view(torch.tensor([50])).k[:, :, :50], k)
