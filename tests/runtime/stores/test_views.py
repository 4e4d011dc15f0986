"""KV stores hold every token once, where they say, and give back what was put in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import Budget, fraction, tokens
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore, grown

BATCH, GROUPS, SIZE = 2, 3, 4
HOT = [tokens(0), tokens(1), tokens(7), tokens(300), tokens(5000), fraction(0.1), fraction(1.0)]


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, BATCH, GROUPS, count, SIZE, generator=source)
    return k, v


def seen_in(store):
    """Keys and values of all tokens."""
    lengths_B = torch.full((BATCH,), store.length, dtype=torch.int32)
    return store.view(lengths_B).contiguous(store.length)


def gathered(store, chosen, sink, recent):
    """The keys of these tokens, and where in them each listed one lies."""
    lengths_B = torch.full((BATCH,), store.length, dtype=torch.int32)
    counts_B = torch.full((BATCH,), chosen.shape[2], dtype=torch.int32)
    return store.gather(Selection(chosen, counts_B, sink, recent), lengths_B)


def filled(store, chunks):
    pieces = [rows(count, seed) for seed, count in enumerate(chunks)]
    for k, v in pieces:
        store.append(k, v)
    return torch.cat([k for k, _ in pieces], 2), torch.cat([v for _, v in pieces], 2)


@pytest.mark.parametrize("hot", [None, *HOT], ids=str)
@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.sampled_from([1, 1, 2, 5, 64, 300, 700]), min_size=1, max_size=12))
def test_a_view_is_everything_appended_in_order(hot: Budget | None, chunks: list[int]):
    store = DeviceStore() if hot is None else HostStore(hot)
    k, v = filled(store, chunks)
    seen_k, seen_v = seen_in(store)
    assert store.length == sum(chunks)
    assert torch.equal(seen_k, k)
    assert torch.equal(seen_v, v)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [1, GROUPS])
@pytest.mark.parametrize("hot", [None, *HOT], ids=str)
def test_gather_gives_the_tokens_that_were_selected(hot: Budget | None, heads: int, window: int | None):
    store = DeviceStore() if hot is None else HostStore(hot)
    k, v = filled(store, [150, 1, 60, 1, 1])
    chosen = torch.stack([torch.randperm(140)[:20].sort().values + 3 for _ in range(BATCH * heads)])
    chosen = chosen.view(BATCH, heads, 20).int()
    chosen[:, :, -3:] = NO_TOKEN
    lengths_B = torch.full((BATCH,), 213, dtype=torch.int32)
    selection = Selection(chosen, torch.full((BATCH,), 20, dtype=torch.int32), 3, 4)
    keys, found, left = store.gather(selection, lengths_B, window)
    applied = None if left == window else window
    listed, wanted = found.listed(keys.lengths_B), selection.listed(lengths_B)
    for b in range(BATCH):
        for g in range(GROUPS):
            at, token = listed[b, min(g, heads - 1)], wanted[b, min(g, heads - 1)]
            token = token if applied is None else token.masked_fill(token < 213 - applied, -1)
            assert torch.equal(at < 0, token < 0)
            assert torch.equal(keys.k[b, g, at[at >= 0].long()], k[b, g, token[token >= 0].long()])
            assert torch.equal(keys.v[b, g, at[at >= 0].long()], v[b, g, token[token >= 0].long()])


def test_a_gather_reads_from_the_host_only_what_is_not_hot():
    store = HostStore(tokens(10))
    filled(store, [100])
    chosen = torch.tensor([[[3, 50, 89, 90, 99]]] * BATCH, dtype=torch.int32)
    gathered(store, chosen, 0, 5)
    assert store.fetched_tokens == 3 * BATCH


@pytest.mark.parametrize("hot", HOT, ids=str)
@pytest.mark.parametrize("chunks", [[40], [1000], [500, 500, 1], [300] + [1] * 300])
def test_what_leaves_the_device_is_what_lies_on_the_host(hot: Budget, chunks: list[int]):
    whole, moved = DeviceStore(), HostStore(hot)
    filled(whole, chunks)
    filled(moved, chunks)
    assert whole.bytes.host == 0
    assert whole.bytes.device - moved.bytes.device == moved.bytes.host
    if hot.tokens is not None and hot.tokens < sum(chunks):
        assert moved.bytes.device == 2 * BATCH * GROUPS * SIZE * 4 * hot.tokens


def test_bytes_are_those_of_the_storages():
    store = HostStore(tokens(8))
    filled(store, [100])
    held = [tensor for tensor in vars(store).values() if isinstance(tensor, torch.Tensor)]
    assert store.bytes.device + store.bytes.host == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_decoding_a_thousand_tokens_copies_the_cache_a_handful_of_times():
    copies, capacity = 0, 0
    for length in range(8192, 9192):
        larger = grown(capacity, length)
        copies, capacity = copies + (larger != capacity), larger
    assert copies <= 2
    assert grown(1_000_000, 1_000_001) - 1_000_001 <= 65_536


def test_a_store_keeps_no_graph():
    store = DeviceStore()
    k, v = rows(4, 0)
    store.append(k.requires_grad_(), v)
    assert not seen_in(store)[0].requires_grad


@pytest.mark.parametrize("store", [DeviceStore(), HostStore(tokens(4))], ids=["device", "host"])
def test_another_batch_in_a_filled_store_is_refused(store):
    filled(store, [10])
    k, v = rows(1, 0)
    with pytest.raises(ShapeError, match="start a new cache"):
        store.append(k[:1], v[:1])
    with pytest.raises(ShapeError, match="must both be"):
        store.append(k, v[:, :, :0])
