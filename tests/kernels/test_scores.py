"""Token scores and the choice of a filter layer, against plain loops."""

import math

import pytest
import torch
from torch_state import small_blocks

from sparsekv.kernels.scores import token_scores

WEIGHTS = torch.tensor([0.2, 0.5, 1.0])


def brute_weights(q, k, positions, scale):
    """Softmax of every window query over the keys up to its own position: [B][H][W][S], float64."""
    batch, heads, window, _ = q.shape
    groups, keys = k.shape[1:3]
    found = torch.zeros(batch, heads, window, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for w, position in enumerate(positions):
                e = [
                    math.exp(scale * float(q[b, h, w].double() @ k[b, h * groups // heads, j].double()))
                    for j in range(position + 1)
                ]
                found[b, h, w, : position + 1] = torch.tensor(e, dtype=torch.float64) / sum(e)
    return found


def sample(dtype=torch.float32, batch=2, heads=4, groups=2, keys=30):
    g = torch.Generator().manual_seed(7)
    q = torch.randn(batch, 3, heads, 8, generator=g).to(dtype).transpose(1, 2)
    k = torch.randn(batch, keys + 9, groups, 8, generator=g).to(dtype).transpose(1, 2)
    return q, k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [(27, 28, 29), (3, 17, 29)])
def test_maximum_over_heads_comes_before_the_sum_over_the_window(dtype, positions) -> None:
    q, k = sample(dtype)
    k[:, :, 30:] = torch.nan  # nothing beyond the window's last position is looked at
    weights_BHWS = brute_weights(q, k[:, :, :30], positions, 0.4)
    weighted = WEIGHTS.double()[:, None]
    expected = {
        "max": (weights_BHWS.amax(1, keepdim=True) * weighted).sum(2),
        "per_kv_head": (weights_BHWS.unflatten(1, (2, 2)).amax(2) * weighted).sum(2),
    }
    for heads, scores in expected.items():
        found = token_scores(q, k, torch.tensor([positions]), WEIGHTS, scale=0.4, heads=heads)
        assert found.dtype == torch.float32
        assert not found[..., 30:].any()
        torch.testing.assert_close(found[..., :30].double(), scores, atol=1e-6, rtol=1e-5)


def test_blocks_of_heads_give_the_same_scores() -> None:
    q, k = sample()
    positions_1W = torch.tensor([[27, 28, 29]])
    for heads in ("max", "per_kv_head"):
        whole = token_scores(q, k, positions_1W, WEIGHTS, scale=0.4, heads=heads)
        with small_blocks():
            torch.testing.assert_close(token_scores(q, k, positions_1W, WEIGHTS, scale=0.4, heads=heads), whole)
