"""The attention that keys get from observed queries: torch and Triton against softmax written out."""

from __future__ import annotations

import pytest
import torch

from sparsekv.kernels.keys import Softmax
from sparsekv.kernels.scores import NEIGHBOURS, near_by_torch, observed_attention, sums_by_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # batch, heads, kv heads, observed, keys, head size, dtype, soft cap, sinks
    "one query": (1, 2, 1, 1, 70, 16, torch.float32, 0.0, False),
    "as many queries as keys": (2, 4, 2, 40, 40, 32, torch.float32, 0.0, False),
    "several blocks and ranges": (1, 4, 2, 33, 4200, 16, torch.float32, 0.0, False),
    "head size 512": (1, 4, 2, 9, 70, 512, torch.float32, 0.0, False),
    "a head size that is no power of two": (1, 3, 1, 70, 130, 40, torch.float32, 0.0, False),
    "half precision": (2, 2, 2, 20, 90, 64, torch.bfloat16, 0.0, False),
    "a soft cap": (1, 4, 2, 20, 90, 32, torch.float32, 2.0, False),
    "learned sinks": (2, 4, 2, 20, 90, 32, torch.float32, 0.0, True),
}


def written_out(q, k, scale, softmax):
    """Sums over the queries of each KV head, float64, one query at a time."""
    (batch, heads, window, _), (groups, keys) = q.shape, k.shape[1:3]
    sums = torch.zeros(batch, groups, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            group = h * groups // heads
            for w in range(window):
                seen = keys - window + w + 1
                logits = k[b, group, :seen].double() @ q[b, h, w].double() * scale
                logits = softmax.cap * torch.tanh(logits / softmax.cap) if softmax.cap else logits
                sink = 0.0 if softmax.sinks_H is None else softmax.sinks_H[h].double().exp()
                sums[b, group, :seen] += logits.exp() / (logits.exp().sum() + sink)
    return sums.float()


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_softmax_of_each_query(case: str, by: str) -> None:
    batch, heads, groups, window, keys, size, dtype, cap, sinks = CASES[case]
    torch.manual_seed(0)
    q, k = torch.randn(batch, heads, window, size, dtype=dtype), torch.randn(batch, groups, keys, size, dtype=dtype)
    softmax = Softmax(cap, torch.randn(heads) if sinks else None)
    device = DEVICE if by == "triton" else "cpu"
    if by == "triton":
        from sparsekv.kernels.observed_triton import attention_sums as sums
    else:
        sums = sums_by_torch
    there = Softmax(cap, softmax.sinks_H.to(device)) if softmax.sinks_H is not None else softmax
    found = sums(q.to(device), k.to(device), size**-0.5, there).cpu()
    torch.testing.assert_close(found, written_out(q, k, size**-0.5, softmax), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_neighbours_and_heads_are_joined_as_by_torch(together: bool) -> None:
    from sparsekv.kernels.observed_triton import near_sums

    sums = torch.rand(2, 3, 300, device=DEVICE)
    sums[0, 1, 40] = torch.nan
    found = near_sums(sums, 0.25, NEIGHBOURS, together)
    torch.testing.assert_close(found, near_by_torch(sums, 0.25, together), equal_nan=True)


def test_a_key_also_scores_by_what_its_neighbours_get() -> None:
    q, k = torch.ones(1, 1, 4, 16), torch.zeros(1, 1, 60, 16)
    k[:, :, 30] = 4.0
    scores = observed_attention(q, k, scale=1.0, backend="reference")[0, 0]
    near = range(30 - NEIGHBOURS, 31 + NEIGHBOURS)
    assert set(scores.topk(2 * NEIGHBOURS + 1).indices.tolist()) == set(near)
    assert 0 <= scores.min() <= scores.max() <= 1 + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_sums_on_a_gpu_are_those_of_torch(size: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 8, 256, size, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(2, 2, 9000, size, dtype=torch.bfloat16, device="cuda")
    for together in (False, True):
        how = {"scale": size**-0.5, "together": together}
        found, expected = (observed_attention(q, k, backend=name, **how) for name in ("triton", "reference"))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-7)
