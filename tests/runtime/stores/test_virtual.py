"""A store in virtual memory is a list of tokens a row, whatever happens to it, and gives everything back."""

import os
import time
from dataclasses import replace
from itertools import count
from threading import Event, Thread

import pytest
import torch
from host_pages import host_pool
from store_operations import run_operations

from sparsekv.kernels.backends import Fallback
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.stores.device import RowStore
from sparsekv.runtime.stores.page_pool import LARGE, PageError, PageWarning
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES, OutsideCaptures
from sparsekv.runtime.stores.reservation import Reservation
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore

LAYOUT = Layout(1, 3, 8, torch.float32, torch.device("cpu"))  # 96 bytes a token: no divisor of a page


@pytest.mark.filterwarnings("ignore::sparsekv.runtime.stores.page_pool.PageWarning")
def test_random_operations_agree_with_lists():
    run_operations(host_pool(), 0, 1000, LAYOUT)


@pytest.mark.filterwarnings("ignore::sparsekv.runtime.stores.page_pool.PageWarning")
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


class _Growing(VirtualStore):
    """The thread takes note of more pages whenever it can."""

    _extent = property(lambda self: next(self._counts), lambda self, value: setattr(self, "_counts", count(value)))


def test_keys_and_values_are_as_long_as_each_other_while_the_thread_maps_more():
    store = _Growing(host_pool(), 500)
    store.append(*torch.randn(2, 1, 3, 50, 8))
    k_shape, v_shape = (x.shape for x in store.tensors)
    assert k_shape == v_shape


def test_room_is_told_of_once_the_tensors_reach_it(monkeypatch):
    store, seen = VirtualStore(host_pool(), 500), []
    store.append(*torch.randn(2, 1, 3, 50, 8))
    counted = Reservation.bytes.fget
    monkeypatch.setattr(
        Reservation, "bytes", property(lambda self: (seen.append(store.capacity), counted(self))[1])
    )  # asked in the midst of taking note
    store.expect([400])
    assert seen == [128]
    assert store.capacity >= 400


def test_a_truncation_that_fails_promises_no_room_that_a_row_lacks():
    pool = host_pool()
    store = VirtualStore(pool, 500)
    store.append(*torch.randn(2, 2, 3, 50, 8))
    RowStore(store, 1, 2).append(*torch.randn(2, 1, 3, 250, 8))
    pool.driver.fail = "unmap"
    with pytest.raises(PageError, match="unmap"):
        store.truncate((50, 10))
    assert (store.lengths, store.capacity) == ((50, 10), 128)


def test_tokens_that_are_taken_back_and_written_again_cost_no_call():
    pool = host_pool()
    store = VirtualStore(pool, 2000)
    store.append(*torch.randn(2, 1, 3, 500, 8))
    cycles = 0
    for _ in range(300):
        before = dict(pool.driver.calls)
        store.append(*torch.randn(2, 1, 3, 10, 8))
        store.truncate((store.length - 9,))
        cycles += pool.driver.calls != before
    assert pool.driver.calls.get("settle", 0) == 0
    assert cycles <= 5


@pytest.mark.parametrize("tokens", [1, 128, 129, 300])
def test_what_is_missing_is_counted_in_pages(tokens):
    pool = host_pool()
    store, layout = VirtualStore(pool, 500), replace(LAYOUT, batch=2)
    for wanted in ([tokens, 1], [tokens + 150, tokens]):
        before, missing = pool.used, store.missing(wanted, layout)
        store.expect(wanted, layout)
        assert pool.used == before + missing


def test_nothing_is_mapped_nor_waited_for_while_another_thread_captures(monkeypatch):
    """Whoever needs it waits, the thread that maps ahead too; a capture that runs out of memory can trim meanwhile."""
    pool, seen, done = host_pool(at_once=False), [], Event()
    called = pool.driver._called
    monkeypatch.setattr(
        pool.driver, "_called", lambda name: (seen.append((name, OUTSIDE_CAPTURES._captures)), called(name))
    )

    def work():
        for _ in range(20):
            store = VirtualStore(pool, 2000)
            store.expect([300, 300], replace(LAYOUT, batch=2))
            store.append(*torch.zeros(2, 2, 3, 300, 8))
            store.append(*torch.zeros(2, 2, 3, 700, 8))
            store.select([1, 1])
            store.truncate([100, 200])
            del store
        done.set()

    thread = Thread(target=work)
    thread.start()
    while not done.is_set():
        with OUTSIDE_CAPTURES.put_off():
            time.sleep(1e-3)
            pool.trim()
        time.sleep(1e-3)
    thread.join()
    assert {name for name, _ in seen} == {"create", "reserve", "map", "allow", "settle", "unmap", "free"}
    assert not any(captures for _, captures in seen)


@pytest.mark.parametrize(("call", "left"), [("settle", 12), ("unmap", 1), ("free", 0)])
def test_a_closing_that_fails_frees_the_rest_and_is_tried_again(call, left):
    pool = host_pool()
    store = VirtualStore(pool, 500)
    store.append(*torch.randn(2, 2, 3, 30, 8))  # 3 pages each of 2 rows' keys and values
    pool.driver.fail = call
    with pytest.warns(PageWarning, match=f"{call} failed"):
        del store
    assert (pool.used, len(pool.driver.mapped)) == (left * pool.driver.granularity, left)
    with pool.first():
        pass
    assert (pool.used, pool.driver.mapped, pool.driver.reserved) == (0, {}, {})


class Late:
    """The thread comes when it is told to."""

    def __init__(self):
        self.methods = []

    def run(self, method):
        self.methods.append(method)

    def come(self):
        while self.methods:
            self.methods.pop()()


EXPECTED = (300, 200)
BEFORE = {
    "nothing": lambda store: None,
    "reserved": lambda store: store.reserve(400),
    "tokens": lambda store: store.append(*torch.zeros(2, 2, 3, 20, 8)),
}
AFTER = {
    "reserve": lambda store: store.reserve(400),
    "a failed first pass": lambda store: store.truncate(()),
    "a failed pass": lambda store: store.truncate((20, 10)),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nothing", "reserve"), ("tokens", "reserve"), ("nothing", "a failed first pass"),
        ("reserved", "a failed first pass"), ("tokens", "a failed pass"),
    ],
)  # fmt: skip
def test_what_is_mapped_does_not_depend_on_when_the_thread_comes(before, after):
    found = []
    for comes_first in (True, False):
        pool = host_pool()
        pool.ahead = Late()
        store, states = VirtualStore(pool, 500), []
        BEFORE[before](store)
        store.expect(EXPECTED, replace(LAYOUT, batch=2))
        if comes_first:
            pool.ahead.come()
        AFTER[after](store)
        for tokens in (0, 1, 120, 200):
            if tokens:
                store.append(*torch.zeros(2, 2, 3, tokens, 8))
            pool.ahead.come()
            states.append((store.capacity, pool.used, store.bytes.device))
        found.append(states)
    assert found[0] == found[1]
    assert (found[0][0] == (0, 0, 0)) == ((before, after) == ("nothing", "a failed first pass"))


@pytest.mark.parametrize("is_expected", [True, False])
@pytest.mark.parametrize(("rows", "others"), [(4, 2), (2, 4)])
def test_behind_a_first_pass_that_failed_there_may_be_another_number_of_rows(rows, others, is_expected):
    pool = host_pool()
    pool.ahead = Late()
    store = VirtualStore(pool, 500)
    store.reserve(400)  # else the store would let go of what was expected
    store.expect((300,) * rows, replace(LAYOUT, batch=rows))
    store.truncate(())
    if is_expected:
        store.expect((300,) * others, replace(LAYOUT, batch=others))
        pool.ahead.come()
    store.append(*torch.ones(2, others, 3, 20, 8))
    pool.ahead.come()
    assert store.lengths == (20,) * others


def test_the_thread_survives_a_store_that_there_are_no_addresses_for():
    pool = host_pool(at_once=False)
    pool.driver.addresses = 1 << 20
    large, small = VirtualStore(pool, 1 << 20), VirtualStore(pool, 500)
    large.expect((100,), LAYOUT)
    small.expect((300,), LAYOUT)
    until = time.monotonic() + 60
    while small.capacity < 300 and time.monotonic() < until:
        time.sleep(1e-3)
    assert small.capacity >= 300


def test_a_copy_of_a_row_has_one_page_of_its_own():
    pool = host_pool(granularity=1 << 16)
    store, page = VirtualStore(pool, 20_000), pool.driver.granularity
    store.append(*torch.zeros(2, 2, 3, LARGE * page // 96 - 100, 8))  # as many pages as a large one has
    store.select([0, 0])
    assert pool.used == 2 * (LARGE + 1) * page


def test_the_thread_waits_for_nobody_whom_an_interrupt_has_ended(monkeypatch):
    pool = host_pool()

    def press(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(OutsideCaptures, "enter", press)
    with pytest.raises(KeyboardInterrupt), pool.first():
        pass
    assert pool.waiting == 0


def test_the_thread_survives_what_torch_refuses():
    pool, done = host_pool(at_once=False), Event()

    class Work:
        def refuse(self):
            raise RuntimeError("a capture is under way")

        def go_on(self):
            done.set()

    work = Work()
    pool.ahead.run(work.refuse)
    pool.ahead.run(work.go_on)
    assert done.wait(60)
