"""Long inputs on a CUDA device: copies on a stream of their own, in locked memory, and the peak of a whole model."""

import copy
import gc

import pytest
import torch
from tiny_models import TYPICAL, random_tokens, steady_model, tiny_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment

from sparsekv.kernels.decode.selection import Selection
from sparsekv.plans.patterns import AShape, Dense, fraction, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import Layout
from sparsekv.runtime.stores.host import Reads
from sparsekv.runtime.stores.pinned import CudaStream, HostMemory

pytestmark = pytest.mark.gpu
BATCH, GROUPS, SIZE = 2, 2, 64
CUT = Chunking(above=64, rows=100, output_bytes=1)


class SlowStream(CudaStream):
    """Rests before each copy, so that whoever does not wait for it reads what was there before."""

    def run(self, work, reads):
        def late():
            torch.cuda._sleep(20_000_000)  # some 10 ms
            work()

        return super().run(late, reads)


class SlowMemory(HostMemory):
    def stream(self, device):
        return self._streams.setdefault(device, SlowStream(device))


def rows(count):
    return torch.randn(2, BATCH, GROUPS, count, SIZE, device="cuda", dtype=torch.bfloat16)


def seen_in(store):
    """Keys and values of all tokens."""
    lengths_B = torch.full((BATCH,), store.length, dtype=torch.int32, device="cuda")
    return store.view(lengths_B).contiguous(store.length)


def gathered(store, chosen, sink, recent):
    """The keys of these tokens, and where in them each listed one lies."""
    lengths_B = torch.full((BATCH,), store.length, dtype=torch.int32, device="cuda")
    counts_B = torch.full((BATCH,), chosen.shape[2], dtype=torch.int32, device="cuda")
    return store.gather(Selection(chosen, counts_B, sink, recent), lengths_B)


def written(store, k, v):
    k_room, v_room = store.room(k.shape[2], Layout.of(k))
    k_room.copy_(k)
    v_room.copy_(v)
    store.commit(k_room, v_room)


def holds(store, k, v):
    return all(torch.equal(seen, given) for seen, given in zip(seen_in(store), (k, v), strict=True))


def spoil():
    """Takes whatever memory was just let go of and fills it with something else."""
    for _ in range(4):
        torch.full((4, BATCH, GROUPS, 4096, SIZE), torch.nan, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("hot", [tokens(0), tokens(100), fraction(0.3)], ids=str)
@pytest.mark.parametrize(
    "append", [lambda store, k, v: store.append(k.clone(), v.clone()), written], ids=["append", "room"]
)
def test_late_copies_neither_miss_nor_mix_anything(hot, append):
    shared = SlowMemory()
    for turn in range(10):
        store, pairs = HostStore(hot, shared), []
        store.reserve(9000 if turn % 2 else 0, Layout(BATCH, GROUPS, SIZE, torch.bfloat16, torch.device("cuda", 0)))
        for count in (4096, 1, 1, 700, 2000):
            k, v = rows(count)
            pairs.append((k.clone(), v.clone()))
            append(store, k, v)
            del k, v
            spoil()
        twin = copy.deepcopy(store)
        k, v = (torch.cat(tensors, 2) for tensors in zip(*pairs, strict=True))
        assert holds(store, k, v), turn
        assert holds(twin, k, v), turn
        del store, twin
        gc.collect()


def test_a_gather_waits_for_late_copies():
    for turn in range(10):
        store = HostStore(tokens(50), SlowMemory(), Reads((tokens(64),), 0, 10))
        store.reserve(5000)
        k, v = rows(4000)
        written(store, k, v)
        chosen = torch.randperm(3900, device="cuda")[:64].sort().values.int().expand(BATCH, 1, -1).contiguous()
        keys, found, _ = gathered(store, chosen, 0, 10)
        at = found.chosen_BgN[0, 0, :64].long()
        assert torch.equal(keys.k[:, :, at], k[:, :, chosen[0, 0].long()]), turn
        assert torch.equal(keys.v[:, :, at], v[:, :, chosen[0, 0].long()]), turn


def test_nobody_waits_while_tokens_leave():
    store = HostStore(tokens(100), SlowMemory())
    store.reserve(50_000, Layout(BATCH, GROUPS, SIZE, torch.bfloat16, torch.device("cuda", 0)))
    pieces = [rows(count) for count in (20_000, 20_000)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.append(*pieces[0])
        written(store, *pieces[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert holds(store, *(torch.cat(tensors, 2) for tensors in zip(*pieces, strict=True)))


def test_blocks_are_locked_exact_and_unlocked_in_the_end():
    device, shared = torch.device("cuda", 0), HostMemory()
    size = (3 << 20) + 4096
    block = shared.take(size, device)
    assert block.data.is_pinned()
    assert block.data[4096:8192].is_pinned()
    if block.registered:  # else the system only locks what the driver allocates
        data = block.data
        assert data.untyped_storage().nbytes() == size
        shared.give(block, device)
        again = shared.take(size - 5, device)
        assert again is block
        del block, again
        gc.collect()
        assert not data.is_pinned()


@pytest.mark.parametrize("architecture", TYPICAL)
@pytest.mark.parametrize("hosts", [0, 3])
def test_pieces_give_the_unmodified_models_logits(architecture, hosts):
    model = steady_model(architecture).cuda()
    prompt, new = random_tokens(2, 1500).cuda(), random_tokens(2, 6, 1).cuda()

    def run():
        cache, seen = None, []
        with torch.no_grad():
            for piece in (prompt[:, :900], prompt[:, 900:], *new.split(1, 1)):
                out = model(piece, past_key_values=cache)
                cache = out.past_key_values
                seen.append(out.logits)
        return torch.cat(seen, 1).float()

    dense = run()
    full = AShape(sink=tokens(1), window=fraction(1.0))
    decode = decode_plan(segment(0, (1, 2), EVERYTHING), offload=(1, 2), hot=100)
    with apply(
        model, plan_for(model, every_head(model, full, Dense()), decode), chunking=CUT, kv_host_layers=hosts
    ) as on:
        found = run()
    assert (on.stats().kv_bytes_host > 0) == (hosts > 0)
    assert (found - dense).norm() / dense.norm() < 0.04


def test_offloaded_layers_give_the_same_bits_run_after_run():
    model = tiny_model(head_dim=64, layers=6, dtype=torch.bfloat16).cuda()
    prompt = random_tokens(1, 6000).cuda()
    with torch.no_grad(), apply(model, plan_for(model), chunking=CUT, kv_host_layers=6) as handle:
        first = model(prompt, past_key_values=handle.new_cache(6100)).logits
        for _ in range(20):
            cache = handle.new_cache(6100)
            assert torch.equal(model(prompt, past_key_values=cache).logits, first)
