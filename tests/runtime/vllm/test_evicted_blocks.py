"""Which blocks evicting layers hold and read: from lengths alone, and the same for scheduler and kernels."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from tiny_plans import drops

from sparsekv.plans.patterns import fraction
from sparsekv.runtime.vllm.evicted_blocks import (
    EvictedBlocks,
    EvictedTable,
    Requests,
    Scheduled,
    StepTables,
    moves,
)


def random_kept(draw: Random) -> EvictedBlocks:
    keep = draw.choice([0, draw.randint(1, 200), fraction(round(draw.uniform(0.01, 0.99), 2))])
    rule = drops((0,), keep, sink=draw.choice([0, 4]), recent=draw.choice([1, 40]), generated=draw.randint(1, 100))
    return EvictedBlocks.of(rule, draw.choice([16, 32]))


@pytest.mark.parametrize("seed", range(200))
def test_blocks_that_are_read_are_those_that_are_held_and_no_more(seed: int) -> None:
    draw = Random(seed)
    kept, prompt = random_kept(draw), draw.randint(1, 400)
    computed = prompt + draw.randint(0, 300)
    freed = {block for part in kept.freed(prompt, computed) for block in part}
    held = [block for block in range(-(-(computed + 1) // kept.block)) if block not in freed]
    front, middle, dropped, skipped = moves(kept, [prompt], np.array([computed]))[:, 0]
    length = computed + 1 - skipped * kept.block
    read = [
        block + (0 if block < front else dropped if block < middle else skipped)
        for block in range(-(-length // kept.block))
    ]
    assert read == held
    assert kept.cached(prompt) <= prompt
    assert kept.cached(prompt) % kept.block == prompt % kept.block
    window = range(max(prompt, computed + 1 - kept.generated), computed + 1)
    assert freed.isdisjoint(token // kept.block for token in window)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_kept_is_less_than_a_block_more_than_the_rule_says(seed: int) -> None:
    draw = Random(seed)
    rule = drops((0,), draw.randint(0, 200), sink=4, recent=20)
    kept, prompt = EvictedBlocks.of(rule, 16), draw.randint(1, 500)
    assert 0 <= kept.cached(prompt) - rule.kept_tokens(prompt) < 16
    if kept.evicted(prompt):
        assert kept.rule(rule, prompt).kept_tokens(prompt) == kept.cached(prompt)


def test_rules_that_keep_as_many_tokens_share_blocks() -> None:
    one, other = drops((0,), 50, sink=4, recent=20), drops((1,), 54, sink=0, recent=20, observe=9, heads="per_kv_head")
    assert EvictedBlocks.of(one, 16) == EvictedBlocks.of(other, 16)
    assert EvictedBlocks.of(one, 16) != EvictedBlocks.of(one, 32)


def test_the_published_layout_holds_as_many_blocks_as_its_arithmetic() -> None:
    """4,000 + 500 tokens, 1,024 + 132 kept by 29 of 32 layers, blocks of 16: 0.37 of dense, then 0.45."""
    kept = EvictedBlocks.of(drops((0,), 1024, sink=4, recent=128, generated=256), 16)

    def held(prompt: int, computed: int) -> int:
        return -(-computed // 16) - sum(map(len, kept.freed(prompt, computed)))

    for made, share in ((0, 0.37), (500, 0.45)):
        whole = -(-(4000 + made) // 16)
        assert (3 * whole + 30 * held(4000, 4000 + made)) / (32 * whole) <= share + 1e-3 * (made > 0)


def scheduled(rows: dict[str, int], **given: object) -> Scheduled:
    return Scheduled(**({"rows": rows, "prompts": {}, "computed": {}, "resumed": (), "finished": ()} | given))  # type: ignore[arg-type]


def test_a_step_of_single_rows_of_which_one_is_a_prompt_is_told() -> None:
    requests = Requests()
    with requests.step(scheduled({"a": 3, "b": 5}, prompts={"a": 4, "b": 5}, computed={"a": 0, "b": 0})) as launch:
        assert not launch
    with requests.step(scheduled({"a": 1, "b": 1})) as launch:
        assert launch
    with requests.step(scheduled({"a": 1, "b": 1})) as launch:
        assert not launch
    with requests.step(scheduled({"b": 4}, resumed=["b"], finished=["a"])) as launch:
        assert not launch
    with requests.step(scheduled({"b": 1})) as launch:
        assert launch
    assert requests.knows("b")
    assert not requests.knows("a")


def test_rows_are_known_while_a_step_runs_alone() -> None:
    requests = Requests()
    with requests.step(scheduled({"a": 3}, prompts={"a": 4}, computed={"a": 0})):
        assert requests.rows == []
        requests.order(["a"])
        assert requests.rows == [("a", 4)]
    assert requests.rows == []


def test_tables_of_a_step_stay_where_they_are_and_groups_share_lengths() -> None:
    kept, requests = EvictedBlocks.of(drops((0,), 10, sink=4, recent=20, generated=40), 16), Requests()
    shared = StepTables(requests, 4)
    tables = [EvictedTable(kept, shared, 16) for _ in range(2)]
    table_BP = torch.arange(20, dtype=torch.int32).expand(3, -1) + torch.tensor(
        [[100], [200], [300]], dtype=torch.int32
    )
    rows, lengths_B = ([0, 1, 2, 6], [141, 33, 70], []), torch.tensor([141, 33, 70], dtype=torch.int32)
    given = scheduled({}, prompts={"a": 100, "b": 200, "c": 80}, computed={})
    places = set()
    for _ in range(2):
        with requests.step(given):
            requests.order(["a", "b", "c"])
            found = [table.step(lambda: rows, lengths_B, table_BP) for table in tables]
        assert found[0][0] is found[1][0]
        assert found[0][0].cpu_lengths_B.tolist() == found[0][0].lengths_B.tolist() == [77, 33, 70]
        assert found[0][1][0, :5].tolist() == [100, 101, 106, 107, 108]
        assert found[0][1][2, :5].tolist() == [300, 301, 302, 303, 304]
        assert [(one.name, one.past, one.end, one.prompt) for one in found[0][0].prompts] == [
            ("b", 32, 33, 200),
            ("c", 66, 70, 80),
        ]
        places.add(tuple(x.data_ptr() for x in (found[0][0].lengths_B, found[0][1], found[1][1])))
    assert len(places) == 1
