"""Under torch.autocast a plan computes in the dtype of autocast, as torch's own attention does."""

import copy

import pytest
import torch
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment

from sparsekv.plans.patterns import AShape, BlockSparse, VerticalSlash, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.long_inputs import Chunking

ALL = tokens(4096)
EVERY_KEY = (
    VerticalSlash(vertical=ALL, slash=ALL, last_q=64, max_tiles=ALL),
    BlockSparse(keep=ALL),
    AShape(sink=tokens(64), window=ALL),
)
PROMPT, NEW = random_tokens(2, 200), random_tokens(2, 5, 1)


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=4)


def planned(model, offload=()):
    """Indices are built and tokens chosen; they are all there are, so that dense is what is computed."""
    return plan_for(model, every_head(model, *EVERY_KEY), decode_plan(segment(1, (2, 3), EVERYTHING), offload=offload))


def close(found: torch.Tensor, expected: torch.Tensor, epsilons: int = 8) -> bool:
    """Within so many roundings to bfloat16 of the largest logit."""
    worst = (found.float() - expected.float()).abs().max()
    return bool(worst <= epsilons * torch.finfo(torch.bfloat16).eps * expected.float().abs().max())


@pytest.mark.parametrize("offload", [(), (2, 3)], ids=["device", "host memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_those_of_dense_under_the_same_autocast(model, dtype, offload):
    with torch.autocast("cpu", dtype):
        expected, _ = steps(model, PROMPT, NEW)
        with apply(model, planned(model, offload), backend="cpu"):
            found, cache = steps(model, PROMPT, NEW)
    assert {layer.store.keys.dtype for layer in cache.layers} == {dtype}
    assert found.dtype == expected.dtype
    assert close(found, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_index_builders_run_with_budgets_that_leave_keys_out(model, backend):
    sparse = (
        VerticalSlash(vertical=tokens(32), slash=tokens(32), last_q=64, max_tiles=tokens(128)),
        BlockSparse(keep=tokens(128)),
    )
    plan = plan_for(model, every_head(model, *sparse), decode_plan(segment(1, (2, 3), 32)))
    with torch.autocast("cpu", torch.bfloat16), apply(model, plan, backend=backend) as handle:
        found, _ = steps(model, random_tokens(1, 600), NEW[:1])
        assert handle.stats().prefill_density < 0.8
    assert found.isfinite().all()


@pytest.mark.parametrize("offload", [(), (2, 3)], ids=["device", "host memory"])
@pytest.mark.parametrize("first", [True, False], ids=["on, off, on", "off, on, off"])
def test_a_cache_keeps_its_dtype_when_autocast_goes_on_and_off(model, first, offload):
    expected, _ = steps(model, PROMPT, NEW)
    with apply(model, planned(model, offload), backend="cpu"):
        cache, seen = None, []
        for piece, on in ((PROMPT, first), (NEW[:, :2], not first), (NEW[:, 2:], first)):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                found, cache = steps(
                    model, piece[:, :1] if cache else piece, piece[:, 1:] if cache else piece[:, :0], cache
                )
            seen.append(found.float())
            cache = copy.deepcopy(cache)
    kept = torch.bfloat16 if first else torch.float32
    assert {layer.store.keys.dtype for layer in cache.layers} == {kept}
    assert close(torch.cat(seen, 1), expected)


def test_a_long_input_goes_on_from_a_cache_of_autocast(model):
    expected, _ = steps(model, torch.cat((PROMPT, PROMPT), 1), NEW[:, :0])
    with apply(model, planned(model, (2, 3)), backend="cpu", chunking=Chunking(above=64, rows=64)):
        with torch.autocast("cpu", torch.bfloat16):
            _, cache = steps(model, PROMPT, NEW[:, :0])
        found, cache = steps(model, PROMPT, NEW[:, :0], cache)
    assert {layer.store.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert close(found, expected)
