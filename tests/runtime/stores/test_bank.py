"""Copies to the host run late and in any company, and everybody who reads them comes after them."""

import gc

import pytest
import torch
from kv_stores import (
    BATCH,
    CPU,
    GROUPS,
    LAYOUT,
    SIZE,
    TOKEN_BYTES,
    LateMemory,
    filled,
    holds,
    rows,
    seen_in,
)

from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import tokens
from sparsekv.runtime.stores import host as packed
from sparsekv.runtime.stores import pinned as memory
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.pinned import HostMemory, check_room

LEAVING = 64  # tokens that move to the host at a time


@pytest.mark.parametrize("late", [False, True])
def test_the_stream_of_these_tests_is_late(late):
    memory = LateMemory() if late else HostMemory()
    store = HostStore(tokens(5), memory)
    store.reserve(200)
    store.append(*rows(180, 0))
    store.rows.on_host.zero_()
    assert bool(seen_in(store)[0][:, :, :128].any()) == late


def test_memory_goes_from_one_store_to_the_next():
    shared = LateMemory()
    first = HostStore(tokens(7), shared)
    first.reserve(800, LAYOUT)
    place = first.rows.on_host.data_ptr()
    filled(first, [300, 400])
    del first
    gc.collect()
    assert shared.late.waiting  # its copies have not run yet: they must not land in what the next one writes
    second = HostStore(tokens(7), shared)
    second.reserve(760, LAYOUT)
    assert second.rows.on_host.data_ptr() == place
    assert holds(second, *filled(second, [100, 550]))
    third = HostStore(tokens(7), shared)
    third.reserve(800, LAYOUT)
    assert third.rows.on_host.data_ptr() != place
    del second
    gc.collect()
    small = HostStore(tokens(7), shared)
    small.reserve(100, LAYOUT)
    assert small.bytes.host == 100 * TOKEN_BYTES  # not in the large block
    shared.close()
    del third, small
    gc.collect()
    assert shared._free == {}


@pytest.mark.parametrize("make", [DeviceStore, lambda: HostStore(tokens(7))], ids=["device", "host"])
@pytest.mark.parametrize("layout", [None, LAYOUT], ids=["at the first append", "at once"])
def test_what_is_reserved_is_allocated_once_and_exactly(make, layout):
    store = make()
    store.reserve(1000, layout)
    assert (store.bytes.device > 0) == (layout is not None)
    sizes, k, v = set(), [], []
    for seed, count in enumerate([600, 1, 1, 398]):
        new = rows(count, seed)
        store.append(*new)
        k.append(new[0])
        v.append(new[1])
        sizes.add((store.bytes.device, store.bytes.host))
    assert len(sizes) == 1
    on_device = 1000 if isinstance(store, DeviceStore) else LEAVING
    assert sizes == {(on_device * TOKEN_BYTES, (1000 if on_device < 1000 else 0) * TOKEN_BYTES)}
    store.append(*(last := rows(1, 7)))  # and beyond
    assert holds(store, torch.cat((*k, last[0]), 2), torch.cat((*v, last[1]), 2))
    store.reserve(5000)
    assert holds(store, torch.cat((*k, last[0]), 2), torch.cat((*v, last[1]), 2))
    assert store.bytes.device + store.bytes.host >= 5000 * TOKEN_BYTES


def test_the_machine_is_asked_before_it_runs_out_of_memory(monkeypatch):
    check_room(1 << 20, 0)  # a small block
    check_room(100 << 30, None)  # nobody knows
    check_room(100 << 30, 101 << 30)
    with pytest.raises(UsageError, match=r"60\.0 GiB"):
        check_room(100 << 30, 60 << 30)
    assert memory.available_bytes() is None or memory.available_bytes() > 1 << 20
    monkeypatch.setattr(memory, "_of_group", lambda root: 5)
    assert memory.available_bytes() == 5


def test_what_only_looks_packed_is_copied():
    whole_SBPGD = torch.randn(50, BATCH, 2, GROUPS, SIZE)
    k, v = packed.unpacked(whole_SBPGD)
    assert packed.packed(k, v).data_ptr() == whole_SBPGD.data_ptr()
    fused_BSPGD = torch.randn(BATCH, 50, 2, GROUPS, SIZE)  # batch rows apart, as a fused projection has them
    rows_apart = [fused_BSPGD[:, :, pair].transpose(1, 2) for pair in (0, 1)]
    for keys, values in [(v, k), (k, k), rows_apart, (k, v.clone())]:
        store = HostStore(tokens(7))
        store.append(keys, values)
        assert holds(store, keys, values)


def free_bytes(memory):
    return sum(len(block.data) for blocks in memory._free.values() for block in blocks)


def test_stores_that_grow_leave_no_trail_of_blocks():
    memory = HostMemory()
    stores = [HostStore(tokens(5), memory) for _ in range(4)]
    for step in range(8):
        for store in stores:
            store.append(*rows(400, step))
    held = sum(len(store.rows.block.data) for store in stores)
    assert held > 4 * 3000 * 2 * BATCH * GROUPS * SIZE * 4
    assert free_bytes(memory) < held / 4  # the last block that the last store left


def test_blocks_of_shorter_prompts_go_when_a_longer_one_comes():
    memory = HostMemory()
    for length in (500, 1000, 2000):
        stores = [HostStore(tokens(5), memory) for _ in range(3)]
        for store in stores:
            store.reserve(length, LAYOUT)
        held = sum(len(store.rows.block.data) for store in stores)
        del stores, store
        assert free_bytes(memory) == held


def test_free_blocks_are_given_up_before_a_prompt_is_refused(monkeypatch):
    shared, left = HostMemory(), [3 << 30, 100]  # nothing is written to these blocks, so that they take no memory
    block = shared.take(2 << 30, CPU)
    shared.give(block, CPU)
    del block
    monkeypatch.setattr(memory, "available_bytes", lambda: left.pop(0))
    shared.take(1 << 30, CPU)
    assert free_bytes(shared) == 2 << 30  # there is room: it may serve the next long prompt
    shared.take(1 << 30, CPU)
    assert free_bytes(shared) == 0


def test_what_was_written_to_room_is_not_packed_again(monkeypatch):
    store, made = HostStore(tokens(3), LateMemory()), []
    store.reserve(500, LAYOUT)
    k, v = store.room(190, LAYOUT)
    given = rows(190, 0)
    k.copy_(given[0])
    v.copy_(given[1])
    monkeypatch.setattr(packed, "empty_packed", lambda *args: made.append(args))
    store.commit(k, v)
    store._memory.late.settle()
    assert made == []
    store.append(*rows(2, 1))  # what it evicts is
    with pytest.raises(TypeError):
        store._memory.late.settle()
    assert made == [(62, LAYOUT)]
