"""What the report says of heads, layers and measurements, against the plan, the profile and a counted mask."""

from __future__ import annotations

import numpy as np
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse

from sparsekv.bench.report.facts import (
    pattern_maps,
)
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan

LENGTH = 4096


def profile():
    kept = np.tril(np.arange(9).reshape(3, 3) / 10)
    entry = made_up_length(LENGTH, np.random.default_rng(0))
    return made_up_profile(entry.model_copy(update={"reuse": made_up_reuse(kept)}))


def plan_of(*groups: HeadGroup, **fields: object) -> Plan:
    prefill = PrefillPlan(tile=TileShape(), lengths=(PrefillBucket(up_to=None, heads=groups),))
    return Plan(status="unverified", model=made_up_model(), prefill=prefill, **fields)


def test_heads_have_the_density_and_the_damage_of_the_candidate_with_their_pattern() -> None:
    measured = profile()
    entry = measured.lengths[0]
    number, head = 4, 2
    pattern = entry.patterns[entry.layers[1].patterns[number][head]]
    ((shown,), _) = pattern_maps(plan_of(HeadGroup(layer=1, heads=(head,), pattern=pattern)), measured)
    assert (shown.measured, shown.length, len(shown.heads)) == (True, LENGTH, 12)
    fact = next(fact for fact in shown.heads if (fact.layer, fact.head) == (1, head))
    scores = entry.layers[1]
    assert fact.pattern == pattern.pattern
    assert fact.density == scores.tiles[number][head] + scores.columns[number][head]
    assert fact.damage == scores.damage[number][head]
    assert {(f.pattern, f.density, f.damage) for f in shown.heads if f is not fact} == {("dense", 1.0, 0.0)}
