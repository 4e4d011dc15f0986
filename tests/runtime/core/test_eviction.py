"""What a layer evicts by: the score of plans, and that of examples/my_method.py, registered from outside."""

from pathlib import Path

import pytest
import torch
from tiny_plans import drops

from sparsekv.kernels.keys import PLAIN
from sparsekv.kernels.methods import register_file
from sparsekv.kernels.scores import NEIGHBOURS
from sparsekv.runtime.core.select import rows_to_cache
from sparsekv.runtime.core.state import Observed

HEADS, GROUPS, TOKENS, SIZE = 4, 2, 60, 8


def attention_by_hand(observed: Observed, k_GSD: torch.Tensor) -> torch.Tensor:
    """[G, S]"""
    window, found = observed.q_BHWD.shape[2], torch.zeros(GROUPS, TOKENS)
    for head in range(HEADS):
        for w in range(window):
            seen = TOKENS - window + w + 1
            group = head * GROUPS // HEADS
            weights = (k_GSD[group, :seen] @ observed.q_BHWD[0, head, w] * observed.scale).softmax(0)
            found[group, :seen] += weights
    return torch.stack([found[:, max(0, s - NEIGHBOURS) : s + NEIGHBOURS + 1].sum(1) for s in range(TOKENS)], 1)


BY_HAND = {"attention_sum": attention_by_hand, "key_norm": lambda observed, k_GSD: -k_GSD.norm(dim=-1)}


@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
@pytest.mark.parametrize("name", BY_HAND)
def test_the_tokens_with_the_highest_scores_stay(name: str, heads: str) -> None:
    register_file(Path(__file__).parents[3] / "examples" / "my_method.py")
    source = torch.Generator().manual_seed(3)
    k_BGSD = torch.randn(1, GROUPS, TOKENS, SIZE, generator=source)
    observed = Observed(torch.randn(1, HEADS, 5, SIZE, generator=source), 0.3, PLAIN)
    rule = drops((0,), 12, heads=heads).model_copy(update={"score": name})
    rows_BgK = rows_to_cache(rule, TOKENS, observed, k_BGSD, torch.zeros_like(k_BGSD), layer=0, backend="reference")
    scores_GS = BY_HAND[name](observed, k_BGSD[0])
    for own_K, scores_S in zip(rows_BgK[0], scores_GS.amax(0, True) if heads == "max" else scores_GS, strict=True):
        chosen = scores_S[2:-3].topk(12).indices.sort().values + 2
        assert own_K.tolist() == [0, 1, *chosen.tolist(), *range(TOKENS - 3, TOKENS)]
