"""What changed between two plans: everything that differs is told, grouped as a reviewer reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_samples import digest_of, full_plan, large_plan, model_info, small_plan
from plans_strategies import plans

from sparsekv.plans.changes import Change
from sparsekv.plans.diff import diff_plans
from sparsekv.plans.files import content_digest, dump_plan, parse_plan, sign
from sparsekv.plans.model import Fingerprint
from sparsekv.plans.patterns import AShape, Dense, Pattern, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.schema import Agreement, Estimate, LengthMeasurement, Measurement, Plan, Quality, Score, to_data
from sparsekv.plans.types import Part

STATIC = AShape(sink=tokens(64), window=tokens(1024))
LINES = VerticalSlash(vertical=fraction(0.02), slash=tokens(600), max_tiles=fraction(0.1))


def prefill(changed: dict[int, tuple[tuple[int, ...], Pattern]], up_to: int = 2048, **flags: bool) -> PrefillPlan:
    """The prefill of `small_plan`, with another pattern for some heads of some layers."""
    groups = []
    for layer in range(12):
        heads, pattern = changed.get(layer, ((), STATIC))
        groups += [HeadGroup(layer=layer, heads=(head,), pattern=STATIC) for head in (0, 1) if head not in heads]
        groups += [HeadGroup(layer=layer, heads=heads, pattern=pattern)] if heads else []
    last = PrefillBucket(up_to=None, heads=tuple(groups), **flags)
    small = small_plan().prefill
    assert small is not None
    return PrefillPlan(tile=small.tile, lengths=(PrefillBucket(up_to=up_to, dense=True), last))


def decode(budget: DecodeBudget, offload: Offload | None = None, **fields: Any) -> DecodePlan:
    segment = Segment(**({"filter": 2, "layers": (4, 5, 6, 7), "budget": budget, "recent": 128} | fields))
    lengths = (DecodeBucket(up_to=4096, dense=True), DecodeBucket(up_to=None, segments=(segment,)))
    return DecodePlan(lengths=lengths, offload=offload)


def told(new: Plan, old: Plan | None = None, full: bool = False) -> list[str]:
    return [f"{change.section}: {change.text}" for change in diff_plans(old or small_plan(), new, full)]


def changed(part: Part, **fields: Any) -> Any:
    return part.model_copy(update=fields)


COMPARED = [name for name in Plan.model_fields if name not in ("kind", "schema_version", "integrity")]


@settings(max_examples=40, deadline=None)
@given(plans, plans, st.sampled_from(COMPARED) | st.none(), st.booleans())
def test_there_are_changes_exactly_where_the_content_differs_and_they_reverse(
    one: Plan, two: Plan, only: str | None, full: bool
) -> None:
    other = two if only is None else one.model_copy(update={only: getattr(two, only)})
    forward, back = diff_plans(one, other, full), diff_plans(other, one, full)
    assert bool(forward) == (content_digest(to_data(one)) != content_digest(to_data(other)))

    def sides(changes: tuple[Change, ...], turned: bool = False) -> list[str]:
        pairs = ((c.new, c.old) if turned else (c.old, c.new) for c in changes)
        return sorted(
            json.dumps([c.path, *pair], allow_nan=False, sort_keys=True) for c, pair in zip(changes, pairs, strict=True)
        )

    assert sides(forward) == sides(back, turned=True)


@pytest.mark.parametrize("name", COMPARED)
def test_every_part_of_a_plan_is_compared(name: str) -> None:
    small = small_plan()
    assert diff_plans(small, small.model_copy(update={name: getattr(full_plan(), name)}))


def test_layout_order_and_integrity_are_no_change() -> None:
    plan = full_plan()
    again = parse_plan("# a comment\n" + json.dumps(to_data(plan), indent=3, sort_keys=True), signed=False)
    signed = parse_plan(dump_plan(plan))
    assert again.integrity != signed.integrity == sign(plan).integrity
    assert diff_plans(signed, again) == ()


def test_heads_that_change_alike_share_a_line() -> None:
    new = prefill(
        {3: ((0, 1), LINES)} | {layer: ((0,), AShape(sink=tokens(64), window=tokens(4096))) for layer in (5, 6)}
    )
    assert told(small_plan(prefill=new)) == [
        "Prefill, above 2,048: layer 3 heads 0-1: a_shape (sink 64 tokens, window 1024 tokens) -> "
        "vertical_slash (vertical 2%, slash 600 tokens, last q 64, max tiles 10%)",
        "Prefill, above 2,048: layers 5-6 head 0: a_shape window 1024 -> 4096 tokens",
    ]


def test_only_the_lengths_that_changed_are_named() -> None:
    assert told(small_plan(prefill=prefill({}, up_to=8192))) == [
        "Prefill, 2,049 to 8,192: layers 0-11 heads 0-1: a_shape (sink 64 tokens, window 1024 tokens) -> dense"
    ]
    assert told(small_plan(prefill=prefill({}, extrapolated=True))) == ["Prefill, above 2,048: extrapolated: no -> yes"]


def test_a_plan_written_otherwise_is_a_change_that_says_so() -> None:
    named = prefill({3: ((2,), Dense())})
    (line,) = told(small_plan(prefill=named))
    assert line == "Prefill: the same in effect, written in other groups or in another order"


def test_many_patterns_are_condensed_by_kind_unless_all_are_asked_for() -> None:
    old = large_plan(4, 16, 1)
    assert old.prefill is not None
    (bucket,) = old.prefill.lengths
    groups = tuple(
        changed(g, pattern=changed(g.pattern, slash=tokens(g.pattern.slash.tokens * 2))) for g in bucket.heads
    )
    new = changed(old, prefill=changed(old.prefill, lengths=(changed(bucket, heads=groups),)))
    assert told(new, old) == [
        "Prefill, every length: layers 0-3, 64 heads: vertical_slash slash 2048 to 2063 -> 4096 to 4126 tokens"
    ]
    assert told(new, old, full=True)[1] == (
        "Prefill, every length: layers 0-3 head 1: vertical_slash slash 2049 -> 4098 tokens"
    )


def test_budgets_filters_and_offload_of_decode() -> None:
    old = small_plan(decode=decode(DecodeBudget(tokens=2048)))
    new = small_plan(decode=decode(DecodeBudget(tokens=4096), Offload(layers=(4, 5), hot=fraction(0.25))))
    assert told(new, old) == [
        "Decode, above 4,096: layers 4-7: budget 2048 -> 4096 tokens",
        "Decode: offload to host memory: none -> layers 4-5, hot 25%",
    ]
    assert told(small_plan(decode=decode(DecodeBudget(tokens=2048), layers=(4, 5, 6, 7, 8), filter=3)), old) == [
        "Decode, above 4,096: layers 4-7: filter 2 -> 3",
        "Decode, above 4,096: layer 8: dense -> sparse (filter 3, budget 2048 tokens, sink 4, recent 128, "
        "selector last, window 1, scope global, heads max)",
    ]
    assert "Decode, above 4,096: layers 4-7: sparse (" in told(small_plan(decode=None))[0]


def test_many_decode_segments_are_condensed_to_layers_not_heads() -> None:
    def plan(scale: int) -> Plan:
        segments = tuple(
            Segment(filter=layer - 1, layers=(layer,), budget=DecodeBudget(tokens=layer * scale), recent=64)
            for layer in range(1, 30, 2)
        )
        lengths = (DecodeBucket(up_to=None, segments=segments),)
        return small_plan(model=model_info(layers=30), decode=DecodePlan(lengths=lengths))

    odd = ",".join(map(str, range(1, 30, 2)))
    assert told(plan(2), plan(1)) == [f"Decode, every length: layers {odd}: budget 1 to 29 -> 2 to 58 tokens"]
    assert len(told(plan(2), plan(1), full=True)) == 15


def test_values_that_look_alike_are_told_apart_and_lines_cannot_be_forged() -> None:
    old = small_plan(extensions={"x": 0.12345678, "y": "a"})
    new = small_plan(extensions={"x": 0.12345679, "y": "b\nStatus"})
    assert told(new, old) == ["Extensions: x: 0.12345678 -> 0.12345679", 'Extensions: y: a -> "b\\nStatus"']


def test_a_number_that_is_only_written_otherwise_is_told_as_such() -> None:
    old, new = (small_plan(model=model_info(rope={"rope_theta": theta})) for theta in (1000000, 1000000.0))
    assert told(new, old) == ["Model: rope theta: the same number, written as 1000000.0 instead of 1000000"]


def test_model_and_fingerprint() -> None:
    other = Fingerprint(architecture=digest_of("a"), weights=digest_of("c"))
    new = small_plan(model=model_info(id="example/tuned", rope={"rope_type": "yarn"}, fingerprint=other))
    assert told(new) == [
        "Model: id: example/model -> example/tuned",
        "Model: rope theta: 1e+06 -> none",
        "Model: rope type: default -> yarn",
        "Model: fingerprint of the weights: sha256:bbbbbbbbbbbb -> sha256:cccccccccccc",
    ]
    assert "Model: layers 0-11: kv heads 2 -> 4" in told(small_plan(model=model_info(kv_heads=4)))
    assert "Model: layers 12-13: none -> full (heads 4, kv heads 2, head dim 64)" in told(
        small_plan(model=model_info(layers=14))
    )


def test_status_targets_quality_and_cost() -> None:
    old = full_plan()
    assert old.quality
    assert old.quality.both
    assert old.cost
    assert old.cost.lengths[0].prefill
    score = Score(dense=0.99, sparse=0.95, samples=200, interval=(-0.07, -0.01))
    both = changed(old.quality.both, density=0.05, tasks={"niah_single": score})
    entry = changed(old.cost.lengths[0], prefill=changed(old.cost.lengths[0].prefill, sparse_us=15000.0, density=0.15))
    new = changed(
        old,
        status="unverified",
        targets=old.targets[1:],
        quality=changed(old.quality, both=both, decode=None),
        cost=changed(old.cost, lengths=(entry,)),
    )
    assert entry.prefill == Estimate(dense_us=81234.6, sparse_us=15000.0, density=0.15)
    assert told(new, old) == [
        "Status: status: verified -> unverified",
        "Targets: removed: device NVIDIA H200, count 2, tensor parallel 2, host transformers, backend flash, "
        "dtype bfloat16",
        "Quality: decode: dropped",
        "Quality: both: density 0.0625 -> 0.05",
        "Quality: both, tasks: niah_single 0.985 -> 0.95",
        "Predicted cost: prefill at 32k: sparse 20.3112 -> 15 ms, density 0.221 -> 0.15",
    ]
    assert [line for line in told(new, old, full=True) if line.startswith("Quality")] == [
        "Quality: decode: lengths 32k, density 0.0625 -> none",
        "Quality: decode, niah_single: dense 0.99, sparse 0.985, samples 200, interval -0.0123456 to +0.0025 -> none",
        "Quality: both: density 0.0625 -> 0.05",
        "Quality: both, niah_single: sparse 0.985 -> 0.95, interval -0.0123456 to +0.0025 -> -0.07 to -0.01",
    ]


def test_quality_or_cost_that_one_plan_alone_has_is_one_line() -> None:
    old = full_plan()
    new = changed(old, quality=None, cost=None)
    assert told(new, old) == ["Quality: quality: dropped", "Predicted cost: cost: dropped"]
    assert told(old, new) == ["Quality: quality: measured now", "Predicted cost: cost: predicted now"]
    (dropped, _) = diff_plans(old, new)
    assert (dropped.path, dropped.old, dropped.new) == ("quality", to_data(old.quality), None)


def test_agreement_is_summed_up_by_length_without_its_intervals() -> None:
    def plan(kl: float, bound: float) -> Plan:
        known = Agreement(samples=50, kl=kl, kl_interval=(0.0, bound), top1=0.99, exact=0.9)
        by_length = tuple(LengthMeasurement(length=at, density=0.25, agreement=known) for at in (4096, 8192))
        measured = Measurement(lengths=(4096, 8192), density=0.25, agreement=known, by_length=by_length)
        return changed(full_plan(), quality=Quality(prefill=measured))

    assert told(plan(0.002, 0.004), plan(0.001, 0.004)) == [
        "Quality: prefill: divergence 0.001 -> 0.002",
        "Quality: prefill at 4k: divergence 0.001 -> 0.002",
        "Quality: prefill at 8k: divergence 0.001 -> 0.002",
    ]
    alike = "the same figures, other intervals or samples (--full lists them)"
    assert told(plan(0.001, 0.003), plan(0.001, 0.004)) == [
        f"Quality: {where}: {alike}" for where in ("prefill", "prefill at 4k", "prefill at 8k")
    ]


def test_provenance_and_extensions_of_any_shape() -> None:
    old = full_plan()
    settings = dict(old.provenance.settings) | {"target_density": 0.2}
    versions = dict(old.provenance.versions) | {"torch": "2.14.0"}
    odd = {"interval": "x", "fraction": {"fraction": "x"}, "lengths": 1, "flag": 1}
    new = changed(old, provenance=changed(old.provenance, settings=settings, versions=versions, seed=1), extensions=odd)
    old = changed(old, extensions={"flag": True})
    assert told(new, old) == [
        "Provenance: seed: 1234 -> 1",
        "Provenance: version torch: 2.13.0 -> 2.14.0",
        "Provenance: setting target density: 0.3 -> 0.2",
        "Extensions: flag: yes -> 1",
        "Extensions: interval: none -> x",
        'Extensions: fraction: none -> {"fraction": "x"}',
        "Extensions: lengths: none -> 1",
    ]


def test_a_change_names_its_field_and_both_values() -> None:
    changes = diff_plans(
        small_plan(), small_plan(prefill=prefill({3: ((0,), AShape(sink=tokens(64), window=tokens(2048)))}))
    )
    assert [(c.path, c.old, c.new) for c in changes] == [
        ("prefill.lengths[2049:].layers[3].heads[0]", {"window": {"tokens": 1024}}, {"window": {"tokens": 2048}})
    ]
