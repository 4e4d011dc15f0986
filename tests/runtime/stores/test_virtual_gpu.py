"""Virtual memory of a GPU, by its driver."""

import gc
import os
from dataclasses import replace

import pytest
import torch
from host_pages import watched_pool
from store_operations import run_operations
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import first_of
from sparsekv.runtime.stores.page_pool import CudaPages, pool_of, why_not
from sparsekv.runtime.stores.store import Layout
from sparsekv.runtime.stores.virtual import VirtualStore

pytestmark = pytest.mark.gpu
PATTERNS = (
    AShape(sink=tokens(64), window=tokens(256)),
    BlockSparse(keep=fraction(0.3)),
    VerticalSlash(vertical=tokens(64), slash=tokens(256), max_tiles=fraction(0.5)),
    Dense(),
)


@pytest.fixture
def cuda() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    assert why_not(device) == ""
    return device


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (3, 64)])
def test_random_operations_agree_with_lists_and_leak_nothing(cuda, heads, size):
    count = int(os.environ.get("FUZZ_COUNT", "1000"))
    layout = Layout(1, heads, size, torch.bfloat16, cuda)
    pool = watched_pool(CudaPages(cuda))
    run_operations(pool, 0, 50, layout, 20)  # what torch keeps for itself is there
    free = _free()
    for seed in range(max(1, count // 2000)):
        run_operations(pool, seed + 1, min(count, 2000), layout, 20)
    assert free - _free() <= 64 << 20  # pages are counted one by one


def _free() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_thread_maps_pages_meanwhile(cuda):
    pool = watched_pool(CudaPages(cuda), at_once=False)
    store, layout = VirtualStore(pool, 65_536), Layout(1, 8, 128, torch.bfloat16, cuda)
    store.append(*torch.randn(2, 1, 8, 1000, 128, dtype=torch.bfloat16, device=cuda))
    address, (k_BGSD, _) = store.keys.data_ptr(), store.tensors
    before = k_BGSD[:, :, :1000].clone()
    store.expect([40_000], layout)
    while store.capacity < 40_000:
        torch.cuda.synchronize()
    assert store.keys.data_ptr() == address
    assert torch.equal(store.tensors[0][:, :, :1000], before)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (6, 3, 64), (16, 8, 96)])
def test_kernels_read_nothing_beyond_the_pages_of_a_row(cuda, heads, kv_heads, head_dim):
    """What lies behind is not mapped: reading it would be an illegal access."""
    model = tiny_model(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=96, context=131_072, dtype=torch.bfloat16
    ).to(cuda)
    plans = {
        "sparse": plan_for(model, every_head(model, *PATTERNS, tile=128), decode_plan(segment(0, (1, 2), 64))),
        "dense": plan_for(model, None, decode_plan(segment(0, (1, 2), 64))),
    }
    page = (2 << 20) // (kv_heads * head_dim * 2)
    for length in (page - 1, page, 2 * page - 5, 2 * page):
        for name, plan in plans.items():
            ids = random_tokens(2, length + 8, length).to(cuda)
            with torch.no_grad(), apply(model, plan) as handle:
                _poison(model)
                virtual = _logits(model, ids, length)
                handle._engine.paging = replace(handle._engine.paging, pools={})
                expected = _logits(model, ids, length)
            assert (virtual - expected).norm() / expected.norm() < 0.03, (name, length)


def _poison(model):
    """Pages that the pool gives next hold NaN."""
    for layer in model(random_tokens(2, 5000).to(model.device)).past_key_values.layers:
        assert isinstance(layer.store, VirtualStore)
        for x_BGSD in layer.store.tensors:
            x_BGSD.fill_(float("nan"))


def _logits(model, ids, length):
    """Of a prompt in two pieces, and of tokens one by one."""
    cache, seen = None, []
    for piece in (ids[:, : length // 2], ids[:, length // 2 : length], *ids[:, length:].split(1, 1)):
        out = model(piece, past_key_values=cache, logits_to_keep=1)
        cache = out.past_key_values
        seen.append(out.logits.float())
    return torch.cat(seen, 1)


def test_a_captured_step_serves_a_cache_that_grows_across_pages(cuda):
    model = tiny_model(heads=16, kv_heads=8, head_dim=128, context=65_536, dtype=torch.bfloat16, layers=3).to(cuda)
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 64)))
    ids = random_tokens(1, 5000).to(cuda)
    with torch.no_grad(), apply(model, plan) as handle:
        cache = model(ids[:, :1000]).past_key_values
        address = [layer.store.keys.data_ptr() for layer in cache.layers]
        for at in range(1000, 3200):
            found = model(ids[:, at : at + 1], past_key_values=cache).logits
        assert (handle.steps.replayed, handle.steps.captures, handle.steps.why_not) == (2200, 1, "")
        assert [layer.store.keys.data_ptr() for layer in cache.layers] == address
        used = pool_of(cuda).used
        assert used == sum(layer.store.bytes.device for layer in cache.layers) == 3 * 2 * 4 * (2 << 20)
        handle._engine.paging = replace(handle._engine.paging, pools={})
        other = model(ids[:, :1000]).past_key_values
        for at in range(1000, 3200):
            expected = model(ids[:, at : at + 1], past_key_values=other).logits
    assert (found - expected).norm() / expected.norm() < 0.03


def test_beams_share_the_pages_of_their_prompt(cuda):
    model = tiny_model(heads=16, kv_heads=8, head_dim=128, context=65_536, dtype=torch.bfloat16, layers=3).to(cuda)
    plan = plan_for(model, None, decode_plan(segment(0, (1, 2), 64)))
    prompt = random_tokens(1, 6000).to(cuda)
    with torch.no_grad(), apply(model, plan):
        cache = model(prompt).past_key_values
        alone = first_of(cache).store.bytes.device
        cache.batch_repeat_interleave(4)
        assert first_of(cache).store.bytes.device == alone + 3 * 2 * (2 << 20)
        found = model(random_tokens(1, 1, 9).to(cuda).expand(4, 1), past_key_values=cache).logits
        torch.testing.assert_close(found[0], found[3], rtol=1e-2, atol=1e-2)
