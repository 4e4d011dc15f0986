"""`apply(kv_dtype="fp8")` on a GPU: captured steps, virtual memory and host memory, beside rounded keys and values."""

from typing import Any

import pytest
import torch
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, drops, plan_for, segment

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf import cache as caches
from sparsekv.runtime.hf import graphs
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.stores.store import Float8
from sparsekv.runtime.stores.virtual import VirtualStore

pytestmark = pytest.mark.gpu
SPARSE = segment(0, (1, 2), 64, sink=4, recent=10)


class Rounded(caches.SparseLayer):
    """Has what a cache in 8 bits stands for."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.rounding = getattr(self, "rounding", None) or Float8()
        both = self.rounding.rounded(key_states, value_states)
        return super().update(*self.rounding.read(*both))

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self.rounding = getattr(self, "rounding", None) or Float8()
        room = torch.empty((2, *k_BGSD.shape), dtype=torch.uint8, device=k_BGSD.device)
        self.rounding.fill(room, k_BGSD, v_BGSD)
        super().commit(k_BGSD, v_BGSD)


def expected(model: Any, plan: Plan, prompt: torch.Tensor, new: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of `steps`."""
    with pytest.MonkeyPatch.context() as patch, apply(model, plan, **options):
        patch.setattr(caches, "SparseLayer", Rounded)
        patch.setattr(graphs.StepGraphs, "takes", lambda *_: False)  # which would write past `update`
        return steps(model, prompt, new)[0]


@pytest.fixture(scope="module", params=[(4, 1, 64), (8, 2, 128), (16, 1, 128), (4, 4, 256)], ids=str)
def model(request):
    """In float32: random models turn the rounding of bfloat16 into another key of 8 bits here and there."""
    heads, kv_heads, size = request.param
    return tiny_model(heads=heads, kv_heads=kv_heads, head_dim=size, context=16384, dtype=torch.float32).to("cuda")


@pytest.mark.parametrize("length", [200, 5000])
@pytest.mark.parametrize(
    ("decode", "evicting"),
    [
        (None, ()),
        (decode_plan(SPARSE), ()),
        (decode_plan(SPARSE, offload=(1, 2)), ()),
        (None, (drops((0, 2), 100),)),
    ],
    ids=["dense", "sparse", "in host memory", "evicting"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_captured_steps_give_the_logits_of_rounded_keys_and_values(model, decode, evicting, length, batch):
    plan, new = plan_for(model, None, decode, *evicting), random_tokens(batch, 40, 1).cuda()
    prompt = random_tokens(batch, length).cuda()
    with apply(model, plan, kv_dtype="fp8") as handle:
        found, cache = steps(model, prompt, new)
        assert (handle.steps.replayed, handle.steps.why_not) == (40, "")
    wanted = expected(model, plan, prompt, new)
    assert (found.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
    assert {layer.store.keys.dtype for layer in cache.layers} == {torch.uint8}


def test_a_long_cache_lies_in_virtual_memory_and_takes_a_byte_for_each_number():
    sizes = {"heads": 4, "kv_heads": 4, "head_dim": 256, "context": 32768, "dtype": torch.bfloat16}
    model = tiny_model(**sizes).to("cuda")
    with apply(model, plan_for(model), kv_dtype="fp8") as handle:
        _, cache = steps(model, random_tokens(1, 12000).cuda(), random_tokens(1, 2, 1).cuda())
        used = handle.stats().kv_bytes_device
    assert {type(layer.store) for layer in cache.layers} == {VirtualStore}
    numbers = 3 * 2 * 4 * 256 * 12002  # layers, keys and values, heads, head size, tokens
    assert numbers <= used < numbers + 3 * 2 * (8 << 20)  # and pages ahead
