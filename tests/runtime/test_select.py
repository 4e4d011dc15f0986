"""The choice of a filter layer, against a selector written out here by brute force."""

import pytest
import torch

from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import Segment
from sparsekv.runtime.core.select import (
    choose_tokens,
    selector_weights,
    tokens_for_layer,
    window_queries,
    within_window,
)

HEADS, GROUPS, SIZE = 4, 2, 16


def brute_force(q, k, weights, scale, per_kv_head):
    """Softmax for each query and head over the keys it may see, maximum over heads, weighted sum over queries."""
    batch, window, keys = q.shape[0], q.shape[2], k.shape[2]
    result = torch.zeros(batch, GROUPS if per_kv_head else 1, keys)
    for b in range(batch):
        for w in range(window):
            last = keys - window + w
            rows = []
            for h in range(HEADS):
                scores = k[b, h * GROUPS // HEADS, : last + 1] @ q[b, h, w] * scale
                rows.append(torch.cat((scores.softmax(0), torch.zeros(keys - last - 1))))
            groups = torch.stack(rows).view(GROUPS, HEADS // GROUPS, keys).amax(1)
            result[b] += weights[w] * (groups if per_kv_head else groups.amax(0, keepdim=True))
    return result


@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
@pytest.mark.parametrize(
    ("selector", "window", "weights"),
    [("last", 4, [1.0]), ("uniform", 4, [1, 1, 1, 1]), ("exponential", 4, [1 / 8, 1 / 4, 1 / 2, 1])],
)
def test_the_choice_is_the_brute_force_one(selector: str, window: int, weights: list[float], heads: str):
    source = torch.Generator().manual_seed(1)
    q = torch.randn(2, HEADS, len(weights), SIZE, generator=source)
    k = torch.randn(2, GROUPS, 60, SIZE, generator=source)
    segment = Segment(filter=0, layers=(1,), budget=tokens(9), selector=selector, window=window, heads=heads)
    assert window_queries(segment) == len(weights)
    expected = brute_force(q, k, weights, 0.25, heads == "per_kv_head")[..., :50].topk(9).indices.sort().values
    assert torch.equal(choose_tokens(segment, q, k, 50, scale=0.25).long(), expected)


def test_a_budget_is_of_all_cached_tokens_and_covering_the_prompt_means_all():
    q, k = torch.randn(1, HEADS, 1, SIZE), torch.randn(1, GROUPS, 100, SIZE)

    def chosen(budget, tail_start):
        return choose_tokens(Segment(filter=0, layers=(1,), budget=budget), q, k, tail_start, scale=1.0)

    assert chosen(fraction(0.2), 90).shape == (1, 1, 20)
    assert chosen(tokens(89), 90).shape == (1, 1, 89)
    assert chosen(tokens(90), 90) is None
    assert chosen(fraction(1.0), 90) is None


def test_only_tokens_before_the_tail_are_chosen():
    q = torch.ones(1, HEADS, 1, SIZE)
    k = torch.zeros(1, GROUPS, 100, SIZE)
    k[:, :, 95:] = 1.0
    found = choose_tokens(Segment(filter=0, layers=(1,), budget=tokens(5)), q, k, 95, scale=1.0)
    assert found.max() < 95


def test_weights_run_from_the_oldest_query_to_the_newest():
    assert selector_weights("last", 3) == (0.0, 0.0, 1.0)
    assert selector_weights("uniform", 4) == (0.25,) * 4
    assert selector_weights("exponential", 3) == (0.25, 0.5, 1.0)


def test_a_head_map_says_whose_choice_each_kv_head_takes():
    segment = Segment(filter=0, layers=(1, 2), budget=tokens(2), heads={1: (0, 0), 2: (1, 0)})
    choice = torch.tensor([[[1, 2], [3, 4]]])
    assert tokens_for_layer(segment, 1, choice).tolist() == [[[1, 2], [1, 2]]]
    assert tokens_for_layer(segment, 2, choice).tolist() == [[[3, 4], [1, 2]]]


def test_tokens_outside_a_sliding_window_are_dropped():
    assert within_window(torch.tensor([[[NO_TOKEN, 3, 5, 9]]]), 5).tolist() == [[[NO_TOKEN, NO_TOKEN, 5, 9]]]
