"""Every store meets the contract that it is typed by: a source of keys, one that is appended to, a whole store."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from host_pages import host_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.keys import PLAIN
from sparsekv.plans.patterns import tokens
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore, RowStore
from sparsekv.runtime.stores.evicting import EvictingStore
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.store import Binding, CachedRows, HotRows, KVStore, Layout, Resident, Seen, WholeStore
from sparsekv.runtime.stores.virtual import VirtualStore

BATCH, GROUPS, SIZE = 1, 2, 8
WHOLE: dict[str, Callable[[], WholeStore]] = {
    "device": DeviceStore,
    "virtual": lambda: VirtualStore(host_pool(), 4096),
    "short in host memory": lambda: HostStore(tokens(5000), None, Reads((tokens(9),), 2, 3)),
    "long in host memory": lambda: HostStore(tokens(0), None, Reads((tokens(9),), 2, 3)),
    "evicting": lambda: EvictingStore(8),
}
STORES: dict[str, Callable[[], KVStore]] = WHOLE | {"row": lambda: RowStore(DeviceStore(), 0, BATCH)}
SOURCES: dict[str, Callable[[KVStore], object]] = {
    "store": lambda store: store,
    "with softmax": lambda store: Seen(store, partial(replace, softmax=PLAIN)),
    "resident": lambda store: Resident(store.view(length_of(store))),
}


def length_of(store: KVStore) -> torch.Tensor:
    return torch.tensor(store.lengths, dtype=torch.int32)


def new_tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(BATCH, GROUPS, count, SIZE, generator=source) for _ in range(2))
    return k, v


@pytest.mark.parametrize("wrapped", SOURCES)
@pytest.mark.parametrize("name", [name for name in STORES if name != "evicting"])
def test_a_source_gives_what_attention_to_the_selected_tokens_needs(name: str, wrapped: str) -> None:
    store, (k, v) = STORES[name](), new_tokens(300)
    store.append(k, v)
    chosen = torch.randperm(280, generator=torch.Generator().manual_seed(1))[:9].sort().values.int() + 2
    selection = Selection(chosen.view(1, 1, 9), torch.tensor([9], dtype=torch.int32), 2, 3)
    source, q = SOURCES[wrapped](store), torch.randn(BATCH, 4, 1, SIZE)
    keys, found, window = source.gather(selection, length_of(store))
    attended = decode_attention(q, keys, found, scale=0.3, window=window, backend="cpu").out_BHSD
    at = torch.cat((torch.arange(2), chosen.long(), torch.arange(297, 300)))
    weights = torch.softmax(q.unflatten(1, (GROUPS, 2))[..., 0, :] @ k[:, :, at].mT * 0.3, -1)
    torch.testing.assert_close(attended[:, :, 0], (weights @ v[:, :, at]).flatten(1, 2))


@pytest.mark.parametrize("name", STORES)
@settings(deadline=None)  # another test's load is no fault of a store
@given(pieces=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=4), taken=st.integers(0, 99))
def test_a_store_views_what_was_appended_but_for_what_was_truncated(
    name: str, pieces: list[tuple[int, bool]], taken: int
) -> None:
    store, given_, length = STORES[name](), [], 0
    for seed, (count, in_place) in enumerate(pieces):
        given_.append(new_tokens(count, seed))
        if in_place:
            room = store.room(count, Layout.of(given_[-1][0]))
            for there, new in zip(room, given_[-1], strict=True):
                there.copy_(new)
            store.commit(*room)
        else:
            store.append(*given_[-1])
        length += count
        assert store.lengths == store.cached == (length,)
    length = max(1, length - taken)
    store.truncate((length,))
    assert store.lengths == (length,)
    for found, parts in zip(store.view(length_of(store)).contiguous(length), zip(*given_, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts, 2)[:, :, :length])


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_store_stands_still_for_captured_steps_until_its_memory_is_another(name: str) -> None:
    store, (k, v) = WHOLE[name](), new_tokens(300)
    assert store.keys is None or name == "virtual"
    store.append(k, v)
    if isinstance(store, EvictingStore):
        store.evict(torch.arange(20)[None, None].expand(BATCH, 1, -1))
    store.prepare(302)
    rows = {"long in host memory": HotRows, "evicting": CachedRows}.get(name, type(None))
    assert isinstance(store.step_rows(302), rows)
    bound, memory = store.bind(Binding()), store.step_memory()
    assert bound is not None
    assert (memory.host_CBPGD is not None) == (name == "long in host memory")
    store.advance(2)
    assert store.lengths == (302,)
    assert store.bound is bound
    assert [x.data_ptr() for x in store.step_memory()[:2]] == [x.data_ptr() for x in memory[:2]]
    assert store.bytes.device > 0
    other = WHOLE[name]()
    other.append(k, v)
    other.prepare(301)
    assert other.bound is not bound
