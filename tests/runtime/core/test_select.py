"""The choice of a filter layer, against a selector written out here by brute force."""

import pytest
import torch
from plans_samples import model_info
from tiny_plans import decode_plan, segment

from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.keys import KeyView
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan
from sparsekv.runtime.core.program import Program, decode
from sparsekv.runtime.core.segments import Budgets, scored_tokens
from sparsekv.runtime.core.select import selected_for, selector_weights
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.stores.store import Resident

HEADS, GROUPS, SIZE = 4, 2, 16
MODEL = model_info(layers=3, heads=HEADS, kv_heads=GROUPS)


def brute_force(q_HWD, k_GSD, weights, scale, per_kv_head):
    """Softmax for each query and head over the keys it may see, maximum over heads, weighted sum over queries."""
    window, keys = q_HWD.shape[1], k_GSD.shape[1]
    result = torch.zeros(GROUPS if per_kv_head else 1, keys)
    for w in range(window):
        last = keys - window + w
        if last < 0:
            continue
        rows = []
        for h in range(HEADS):
            scores = k_GSD[h * GROUPS // HEADS, : last + 1] @ q_HWD[h, w] * scale
            rows.append(torch.cat((scores.softmax(0), torch.zeros(keys - last - 1))))
        groups = torch.stack(rows).view(GROUPS, HEADS // GROUPS, keys).amax(1)
        result += weights[w] * (groups if per_kv_head else groups.amax(0, keepdim=True))
    return result


def choose(part, q_BHSD, keys: KeyView, lengths, program=None):
    """What the filter layer 0 chooses when it has seen all these queries, the last one in this step."""
    program = program or Program.of(None, decode_plan(part), MODEL)
    state, layer = DecodeState(program.segments), program.layers[0]
    if q_BHSD.shape[2] > 1:
        state.remember(layer.role.segment, q_BHSD[:, :, :-1])
    state.begin(lengths, q_BHSD.device)
    decode(layer, q_BHSD[:, :, -1:], Resident(keys), state, scale=0.25, backend="cpu")
    return state.chosen(layer.role.segment), program, state


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on the device"])
@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
@pytest.mark.parametrize(
    ("selector", "window", "weights"),
    [("last", 4, [1.0]), ("uniform", 4, [1, 1, 1, 1]), ("exponential", 4, [1 / 8, 1 / 4, 1 / 2, 1])],
)
def test_the_choice_is_the_brute_force_one(selector: str, window: int, weights: list[float], heads: str, known: bool):
    source = torch.Generator().manual_seed(1)
    q = torch.randn(3, HEADS, 4, SIZE, generator=source)
    k = torch.randn(3, GROUPS, 64, SIZE, generator=source)
    lengths = (60, 18, 9)  # the last is covered by 2 + 9 + 3
    part = segment(0, (1,), 9, selector=selector, window=window, heads=heads)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    selection, *_ = choose(part, q, KeyView(k, k, lengths_B), lengths if known else lengths_B)
    assert selection.counts_B.tolist() == [9, 9, ALL]
    for b in (0, 1):
        seen = q[b, :, -len(weights) :]
        scores = brute_force(seen, k[b, :, : lengths[b]], weights, 0.25, heads == "per_kv_head")
        expected = scores[:, 2 : lengths[b] - 3].topk(9).indices.sort().values + 2
        assert torch.equal(selection.chosen_BgN[b].long(), expected), b


def test_queries_before_the_first_token_do_not_count():
    source = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, HEADS, 8, SIZE, generator=source), torch.randn(1, GROUPS, 8, SIZE, generator=source)
    part = segment(0, (1,), 2, selector="uniform", window=20)
    selection, *_ = choose(part, q, KeyView(k, k, torch.tensor([8], dtype=torch.int32)), (8,))
    expected = brute_force(q[0], k[0], [1.0] * 8, 0.25, False)[:, 2:5].topk(2).indices.sort().values + 2
    assert torch.equal(selection.chosen_BgN[0].long(), expected)


@pytest.mark.parametrize("heads", ["max", "per_kv_head"])
def test_memory_beyond_a_row_that_is_shorter_than_the_window_is_not_looked_at(heads: str):
    source = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, HEADS, 20, SIZE, generator=source), torch.randn(2, GROUPS, 64, SIZE, generator=source)
    lengths_B = torch.tensor([60, 20], dtype=torch.int32)
    part = segment(0, (1,), 4, selector="uniform", window=30, heads=heads)
    clean, *_ = choose(part, q, KeyView(k, k, lengths_B), lengths_B)
    k[0, :, 60:], k[1, :, 20:] = float("nan"), float("nan")
    found, *_ = choose(part, q, KeyView(k, k, lengths_B), lengths_B)
    assert torch.equal(found.chosen_BgN, clean.chosen_BgN)


def test_pages_give_the_choice_of_contiguous_keys():
    source = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, HEADS, 1, SIZE, generator=source), torch.randn(2, GROUPS, 64, SIZE, generator=source)
    table_BP = torch.randperm(8, generator=source).int().view(2, 4)
    pages = torch.empty(8, GROUPS, 16, SIZE)
    pages[table_BP.flatten().long()] = k.unflatten(2, (4, 16)).transpose(1, 2).flatten(0, 1)
    lengths_B = torch.tensor([60, 33], dtype=torch.int32)
    whole, *_ = choose(segment(0, (1,), 5), q, KeyView(k, k, lengths_B), lengths_B)
    paged, *_ = choose(segment(0, (1,), 5), q, KeyView(pages, pages, lengths_B, table_BP), lengths_B)
    assert torch.equal(whole.chosen_BgN, paged.chosen_BgN)


@pytest.mark.parametrize("length", [1, 10, 100, 101, 999, 1000, 1001, 12345])
def test_counts_on_the_device_are_those_on_the_host(length: int):
    tenth, all_of_it = DecodeBudget(fraction=0.1, at_most=64), DecodeBudget(tokens=50)
    buckets = (
        DecodeBucket(up_to=100, dense=True),
        DecodeBucket(up_to=1000, segments=(segment(0, (1,), tenth),)),
        DecodeBucket(up_to=None, segments=(segment(0, (1,), all_of_it),)),
    )
    lowered = Program.of(None, DecodePlan(lengths=buckets), MODEL).segments[0]
    tables = Budgets([lowered], [scored_tokens(4)], torch.device("cpu"))
    found, _ = tables.of(torch.tensor([length], dtype=torch.int32), "cpu")
    bucket = next(b for b in buckets if b.up_to is None or length <= b.up_to)
    expected = None if bucket.dense else bucket.segments[0].chosen_tokens(length)
    assert found[0].tolist() == [lowered.count(length)] == [ALL if expected is None else expected]
    assert lowered.most == 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel runs there")
@pytest.mark.parametrize("fractions", [True, False])
def test_budgets_of_one_launch_are_those_of_torch(fractions: bool) -> None:
    check_budgets(fractions, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fractions", [True, False])
def test_budgets_of_one_launch_are_those_of_torch_on_a_gpu(fractions: bool) -> None:
    check_budgets(fractions, "cuda")


def check_budgets(fractions: bool, device: str) -> None:
    tenth = DecodeBudget(fraction=0.1, at_most=900) if fractions else DecodeBudget(tokens=60)
    buckets = (
        DecodeBucket(up_to=100, dense=True),
        DecodeBucket(up_to=5000, segments=(segment(0, (1,), tenth),)),
        DecodeBucket(up_to=None, segments=(segment(0, (1,), DecodeBudget(tokens=50)),)),
    )
    lowered = Program.of(None, DecodePlan(lengths=buckets), MODEL).segments[0]
    # the second filter layer has scratch for 134,217 tokens
    tables = Budgets([lowered, lowered], [scored_tokens(4), scored_tokens(1000)], torch.device(device))
    source = torch.Generator().manual_seed(int(fractions))
    edges = (1, 99, 100, 101, 4999, 5000, 5001, 100_000)
    draws = [torch.randint(1, 9000, (rows,), generator=source).tolist() for rows in (1, 2, 7, 64)]
    for lengths in (edges, *((length,) for length in edges), *draws):
        lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
        found, expected = tables.by_kernel(lengths_B), tables.by_torch(lengths_B)
        assert [x.dtype for x in found] == [torch.int32] * 2
        assert all(map(torch.equal, found, expected)), lengths


def test_weights_run_from_the_oldest_query_to_the_newest():
    assert selector_weights("last", 3) == (0.0, 0.0, 1.0)
    assert selector_weights("uniform", 4) == (0.25,) * 4
    assert selector_weights("exponential", 3) == (0.25, 0.5, 1.0)


def selected_by(layer, state):
    return selected_for(layer.role.segment, layer.role.kv_map, state, torch.device("cpu"))


def test_a_head_map_says_whose_choice_each_kv_head_takes():
    part = segment(0, (1, 2), 2, heads={1: (0, 0), 2: (1, 0)})
    q, k = torch.randn(1, HEADS, 1, SIZE), torch.randn(1, GROUPS, 50, SIZE)
    chosen, program, state = choose(part, q, KeyView(k, k, torch.tensor([50], dtype=torch.int32)), (50,))
    first, second = chosen.chosen_BgN[0].tolist()
    assert selected_by(program.layers[1], state).chosen_BgN.tolist() == [[first, first]]
    assert selected_by(program.layers[2], state).chosen_BgN.tolist() == [[second, first]]
