"""KV stores hold every token once, where they say, and give back what was put in."""

import pytest
import torch
from host_pages import host_pool
from kv_stores import (
    BATCH,
    TOKEN_BYTES,
    assert_gathers,
    filled,
    holds,
    lengths_of,
    rows,
    seen_in,
    selecting,
    with_more,
)

from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import Budget, fraction, tokens
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore, grown
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore

HOT = [tokens(0), tokens(1), tokens(7), tokens(300), tokens(5000), fraction(0.1), fraction(1.0)]


def on_device(kind: str | None) -> DeviceStore:
    return VirtualStore(host_pool(), 500) if kind == "virtual" else DeviceStore()


def test_a_gather_reads_from_the_host_only_what_is_not_hot():
    store = HostStore(tokens(10), None, Reads((tokens(4),), recent=5))
    filled(store, [200])
    steps = [([3, 50, 89, 191], 4), ([3, 50, 90, 192], 1), ([3, 89, 191, 192], 0), ([3, 50, 90, 195], 0)]
    for chosen, fetched in steps:
        before = store.counts.fetched
        store.gather(selecting(torch.tensor([[chosen]] * BATCH), recent=5), lengths_of(store))
        assert store.counts.fetched - before == fetched * BATCH
    assert (store.counts.steps, store.counts.chosen) == (4, (4 + 3 + 3 + 3) * BATCH)


@pytest.mark.parametrize("hot", HOT, ids=str)
@pytest.mark.parametrize("chunks", [[40], [1000], [500, 500, 1], [300] + [1] * 300])
def test_what_is_on_the_device_is_bounded_by_the_hot_set(hot: Budget, chunks: list[int]):
    reads, total = Reads((tokens(20),), 2, 8), sum(chunks)
    store = HostStore(hot, None, reads)
    store.reserve(total)
    filled(store, chunks)
    most = max(hot.resolve(total), 30 + 8 + 64)
    expected = min(most, total), total - 8 if total > most else 0
    assert (store.bytes.device, store.bytes.host) == tuple(TOKEN_BYTES * count for count in expected)
    assert HostStore.allocated(Layout.of(store.keys), hot, reads, total) == store.bytes


def test_a_context_that_is_attended_to_as_a_whole_stays_on_the_device():
    store = HostStore(tokens(10), None, Reads((tokens(20),), 2, 8, whole_up_to=500))
    store.reserve(600)
    k, v = filled(store, [499, 1])
    assert seen_in(store)[0].data_ptr() == seen_in(store)[0].data_ptr()  # nothing is copied
    assert store.bytes.device == 500 * TOKEN_BYTES
    assert holds(store, *with_more(store, k, v, 1, 9))
    assert store.bytes.device == (30 + 8 + 64) * TOKEN_BYTES


@pytest.mark.parametrize("reads", [Reads(), Reads((fraction(1.0),))], ids=["nothing known", "a share of all"])
def test_where_steps_read_everything_a_gather_gives_everything(reads: Reads):
    store = HostStore(tokens(10), None, reads)
    k, v = filled(store, [200])
    selection = selecting(torch.tensor([[[3, 9]]] * BATCH))
    assert store.gather(selection, lengths_of(store))[1] is selection
    assert_gathers(store, selection, k, v)
    assert store.bytes.device == 64 * TOKEN_BYTES


def test_bytes_are_those_of_the_storages():
    store = HostStore(tokens(8))
    filled(store, [100, 30])
    held = [tensor for tensor in vars(store.rows).values() if isinstance(tensor, torch.Tensor)]
    assert store.bytes.device + store.bytes.host == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_decoding_a_thousand_tokens_copies_the_cache_a_handful_of_times():
    copies, capacity = 0, 0
    for length in range(8192, 9192):
        larger = grown(capacity, length)
        copies, capacity = copies + (larger != capacity), larger
    assert copies <= 2
    assert grown(1_000_000, 1_000_001) - 1_000_001 <= 65_536


@pytest.mark.parametrize("kind", ["contiguous", "virtual"])
def test_a_store_keeps_no_graph(kind):
    store = on_device(kind)
    k, v = rows(4, 0)
    store.append(k.requires_grad_(), v)
    assert not seen_in(store)[0].requires_grad


@pytest.mark.parametrize(
    "store", [DeviceStore(), on_device("virtual"), HostStore(tokens(4))], ids=["device", "virtual", "host"]
)
def test_another_batch_in_a_filled_store_is_refused(store):
    filled(store, [10])
    k, v = rows(1, 0)
    with pytest.raises(ShapeError, match="new cache"):
        store.append(k[:1], v[:1])
    with pytest.raises(ShapeError, match="must both be"):
        store.append(k, v[:, :, :0])
