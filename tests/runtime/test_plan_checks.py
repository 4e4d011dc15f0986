"""What a host cannot run of a plan is refused in one sentence that says what to do, and by no other host."""

from dataclasses import fields
from typing import Any

import pytest
from plans_samples import full_plan, model_info, small_plan
from tiny_plans import decode_plan, segment

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import Eviction, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.plan_checks import Host, refuse, segments_of

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64}
FULL = AttentionGroup(layers=(1,), kind="full", **SHAPE)
SLIDING = AttentionGroup(layers=(0,), kind="sliding", window=512, **SHAPE)
LINEAR = AttentionGroup(layers=(0,), kind="linear", **SHAPE)
BEHIND = AttentionGroup(layers=(1, 2), kind="full", **SHAPE)
WIDE = AttentionGroup(layers=(0,), kind="full", heads=4, kv_heads=1, head_dim=64)
RULE = Eviction(
    layers=(1,), keep=tokens(64), sink=4, recent=128, generated=8, score="attention_sum", observe=64, heads="max"
)


def plan_of(*groups: AttentionGroup, **phases: Any) -> Plan:
    return Plan(status="unverified", model=model_info(attention=groups), **phases)


def patterns(layer: int) -> PrefillPlan:
    group = HeadGroup(layer=layer, heads=(0,), pattern=AShape(sink=tokens(128), window=tokens(128)))
    return PrefillPlan(tile=TileShape(), lengths=(PrefillBucket(up_to=None, heads=(group,)),))


def looking_back() -> Plan:
    plan = small_plan()
    (segment,) = segments_of(plan)
    bucket = plan.decode.lengths[-1].model_copy(
        update={"segments": (segment.model_copy(update={"selector": "uniform", "window": 4}),)}
    )
    lengths = (*plan.decode.lengths[:-1], bucket)
    return plan.model_copy(update={"decode": plan.decode.model_copy(update={"lengths": lengths})})


def choosing(heads: Any, kv_heads: int = 2) -> Plan:
    """Filter layer 0, of so many KV heads, chooses for layers of two."""
    groups = (AttentionGroup(layers=(0,), kind="full", heads=4, kv_heads=kv_heads, head_dim=64), BEHIND)
    followers = tuple(heads) if isinstance(heads, dict) else (1, 2)
    return plan_of(*groups, decode=decode_plan(segment(0, followers, 16, heads=heads)))


REFUSED = {
    "choices by older queries": (looking_back(), {"older_queries": False}, "filter layers 2 that choose by more"),
    "sparse prefill in a sliding layer": (
        plan_of(SLIDING, FULL, prefill=patterns(0)), {"windows": False}, "sliding window (0)",
    ),
    "eviction": (plan_of(WIDE, FULL, kv_cache=(RULE,)), {"evicts": False}, "layers 1 that evict tokens, which"),
    "eviction beside other shapes": (
        plan_of(WIDE, FULL, kv_cache=(RULE,)), {"mixed_caches": False}, "beside caches of another shape",
    ),
    "eviction beside recurrent layers": (
        plan_of(LINEAR, FULL, kv_cache=(RULE,)), {"mixed_caches": False}, "beside caches of another shape",
    ),
    "drafts by dense decode": (small_plan(decode=None), {"drafts": True}, "drafts nothing"),
    "drafts where tokens are evicted": (
        small_plan(kv_cache=(RULE,)), {"drafts": True}, "exact output where layers 1 evict",
    ),
    "drafts by recurrent layers": (plan_of(LINEAR, FULL), {"drafts": True}, "a recurrent state (0)"),
    "heads that ranks cannot share": (small_plan(), {"ranks": 3}, "3 ranks for 4 query and 2 KV heads"),
    "eviction by fewer KV heads than ranks": (
        small_plan(decode=None, kv_cache=(RULE,)), {"ranks": 4}, "4 ranks that share 2 KV heads",
    ),
    "choices by fewer KV heads than ranks": (choosing("per_kv_head"), {"ranks": 4}, "choose by themselves"),
    "a head map from rank to rank": (
        choosing({1: (0, 1), 2: (0, 0)}), {"ranks": 2}, "2 ranks for segment 0 -> 1-2, in whose head maps",
    ),
    "a head map to wide layers": (choosing({1: (0, 1)}, kv_heads=4), {"ranks": 2}, "in whose head maps"),
    "its own settings": (small_plan(), {"obstacles": ("a setting: change it",)}, "a setting: change it"),
}  # fmt: skip


def test_ranks_that_share_no_choice_run_head_maps() -> None:
    for plan in (choosing({1: (0, 1), 2: (0, 1)}), choosing({1: (1, 3)}, kv_heads=4), small_plan()):
        refuse(plan, plan.model, Host(ranks=2))


@pytest.mark.parametrize("case", REFUSED)
def test_only_hosts_that_cannot_refuse(case: str) -> None:
    plan, host, word = REFUSED[case]
    refuse(plan, plan.model, Host())
    with pytest.raises(UnsupportedError) as caught:
        refuse(plan, plan.model, Host("this host", **host, way_out="Take another."))
    first, *sentences, last = str(caught.value).splitlines()
    assert (first, last) == ("expected a plan that this host executes in full, found:", "Take another.")
    assert [word in line for line in sentences].count(True) == 1


def test_a_host_that_can_do_nothing_runs_a_plain_plan_and_names_every_obstacle_at_once() -> None:
    nothing = {one.name: False for one in fields(Host) if one.type == "bool" and one.name != "drafts"}
    refuse(plan_of(SLIDING, FULL, prefill=patterns(1)), model_info(attention=(SLIDING, FULL)), Host(**nothing))
    with pytest.raises(UnsupportedError) as caught:
        refuse(full_plan(), full_plan().model, Host(**nothing))
    assert len(str(caught.value).splitlines()) > 4
