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


def found(new: Plan, old: Plan | None = None, full: bool = False) -> list[str]:
    """The paths of what changed."""
    return [change.path for change in diff_plans(old or small_plan(), new, full)]


def values(new: Plan, old: Plan | None = None) -> list[tuple[Any, Any]]:
    return [(change.old, change.new) for change in diff_plans(old or small_plan(), new)]


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
    assert found(small_plan(prefill=new)) == [
        "prefill.lengths[2049:].layers[3].heads[0-1]",
        "prefill.lengths[2049:].layers[5-6].heads[0]",
    ]


def test_only_the_lengths_that_changed_are_named() -> None:
    assert found(small_plan(prefill=prefill({}, up_to=8192))) == ["prefill.lengths[2049:8192].layers[0-11].heads[0-1]"]
    assert found(small_plan(prefill=prefill({}, extrapolated=True))) == ["prefill.lengths[2049:].extrapolated"]


def test_a_plan_written_otherwise_is_a_change() -> None:
    assert found(small_plan(prefill=prefill({3: ((2,), Dense())}))) == ["prefill"]


def test_many_patterns_are_condensed_by_kind_unless_all_are_asked_for() -> None:
    old = large_plan(4, 16, 1)
    assert old.prefill is not None
    (bucket,) = old.prefill.lengths
    groups = tuple(
        changed(g, pattern=changed(g.pattern, slash=tokens(g.pattern.slash.tokens * 2))) for g in bucket.heads
    )
    new = changed(old, prefill=changed(old.prefill, lengths=(changed(bucket, heads=groups),)))
    (line,) = diff_plans(old, new)
    assert line.path == "prefill.lengths[1:].layers[0-3]"
    assert "2048 to 2063 -> 4096 to 4126" in line.text
    assert found(new, old, full=True) == [f"prefill.lengths[1:].layers[0-3].heads[{head}]" for head in range(16)]


def test_budgets_filters_and_offload_of_decode() -> None:
    sparse = "decode.lengths[4097:].layers"
    old = small_plan(decode=decode(DecodeBudget(tokens=2048)))
    new = small_plan(decode=decode(DecodeBudget(tokens=4096), Offload(layers=(4, 5), hot=fraction(0.25))))
    assert found(new, old) == [f"{sparse}[4-7]", "decode.offload"]
    wider = small_plan(decode=decode(DecodeBudget(tokens=2048), layers=(4, 5, 6, 7, 8), filter=3))
    assert found(wider, old) == [f"{sparse}[4-7]", f"{sparse}[8]"]
    assert found(small_plan(decode=None)) == [f"{sparse}[4-7]"]


def test_many_decode_segments_are_condensed_to_layers_not_heads() -> None:
    def plan(scale: int) -> Plan:
        segments = tuple(
            Segment(filter=layer - 1, layers=(layer,), budget=DecodeBudget(tokens=layer * scale), recent=64)
            for layer in range(1, 30, 2)
        )
        lengths = (DecodeBucket(up_to=None, segments=segments),)
        return small_plan(model=model_info(layers=30), decode=DecodePlan(lengths=lengths))

    odd = ",".join(map(str, range(1, 30, 2)))
    (line,) = diff_plans(plan(1), plan(2))
    assert line.path == f"decode.lengths[1:].layers[{odd}]"
    assert "1 to 29 -> 2 to 58" in line.text
    assert len(found(plan(2), plan(1), full=True)) == 15


def test_values_that_look_alike_are_told_apart_and_lines_cannot_be_forged() -> None:
    old = small_plan(extensions={"x": 0.12345678, "y": "a"})
    new = small_plan(extensions={"x": 0.12345679, "y": "b\nStatus"})
    assert [change.text for change in diff_plans(old, new)] == [
        "x: 0.12345678 -> 0.12345679",
        'y: a -> "b\\nStatus"',
    ]


def test_a_number_that_is_only_written_otherwise_is_told_as_such() -> None:
    old, new = (small_plan(model=model_info(rope={"rope_theta": theta})) for theta in (1000000, 1000000.0))
    (change,) = diff_plans(old, new)
    assert change.path == "model.rope.rope_theta"
    assert "1000000.0" in change.text


def test_model_and_fingerprint() -> None:
    other = Fingerprint(architecture=digest_of("a"), weights=digest_of("c"))
    new = small_plan(model=model_info(id="example/tuned", rope={"rope_type": "yarn"}, fingerprint=other))
    assert found(new) == ["model.id", "model.rope.rope_theta", "model.rope.rope_type", "model.fingerprint.weights"]
    assert values(new)[:3] == [("example/model", "example/tuned"), (1000000.0, None), ("default", "yarn")]
    assert found(small_plan(model=model_info(kv_heads=4))) == ["model.attention.layers[0-11]"]
    assert "model.attention.layers[12-13]" in found(small_plan(model=model_info(layers=14)))


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
    cost = "cost.lengths[32768].prefill"
    assert found(new, old) == ["status", "targets", "quality.decode", "quality.both", "quality.both.tasks", cost]
    task = "tasks.niah_single"
    decode = ("quality.decode", f"quality.decode.{task}")
    assert found(new, old, full=True) == ["status", "targets", *decode, "quality.both", f"quality.both.{task}", cost]


def test_quality_or_cost_that_one_plan_alone_has_is_one_line() -> None:
    old = full_plan()
    new = changed(old, quality=None, cost=None)
    assert found(new, old) == found(old, new) == ["quality", "cost"]
    assert values(new, old)[0] == (to_data(old.quality), None)


def test_agreement_is_summed_up_by_length_without_its_intervals() -> None:
    def plan(kl: float, bound: float) -> Plan:
        known = Agreement(samples=50, kl=kl, kl_interval=(0.0, bound), top1=0.99, exact=0.9)
        by_length = tuple(LengthMeasurement(length=at, density=0.25, agreement=known) for at in (4096, 8192))
        measured = Measurement(lengths=(4096, 8192), density=0.25, agreement=known, by_length=by_length)
        return changed(full_plan(), quality=Quality(prefill=measured))

    for new, figure in ((plan(0.002, 0.004), "0.001 -> 0.002"), (plan(0.001, 0.003), "--full")):
        changes = diff_plans(plan(0.001, 0.004), new)
        assert [change.path.removeprefix("quality.prefill") for change in changes] == [
            "",
            ".by_length[4096]",
            ".by_length[8192]",
        ]
        assert all(figure in change.text for change in changes)


def test_provenance_and_extensions_of_any_shape() -> None:
    old = full_plan()
    settings = dict(old.provenance.settings) | {"target_density": 0.2}
    versions = dict(old.provenance.versions) | {"torch": "2.14.0"}
    odd = {"interval": "x", "fraction": {"fraction": "x"}, "lengths": 1, "flag": 1}
    new = changed(old, provenance=changed(old.provenance, settings=settings, versions=versions, seed=1), extensions=odd)
    old = changed(old, extensions={"flag": True})
    changes = diff_plans(old, new)
    assert [(change.path.rpartition(".")[2], change.old, change.new) for change in changes] == [
        ("seed", 1234, 1),
        ("torch", "2.13.0", "2.14.0"),
        ("target_density", 0.3, 0.2),
        ("flag", True, 1),
        ("interval", None, "x"),
        ("fraction", None, {"fraction": "x"}),
        ("lengths", None, 1),
    ]


def test_a_change_names_its_field_and_both_values() -> None:
    changes = diff_plans(
        small_plan(), small_plan(prefill=prefill({3: ((0,), AShape(sink=tokens(64), window=tokens(2048)))}))
    )
    assert [(c.path, c.old, c.new) for c in changes] == [
        ("prefill.lengths[2049:].layers[3].heads[0]", {"window": {"tokens": 1024}}, {"window": {"tokens": 2048}})
    ]
