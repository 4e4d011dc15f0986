"""What changed between two plans: everything that differs is told, grouped as a reviewer reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_samples import digest_of, full_plan, large_plan, model_info, small_plan
from plans_strategies import plans

from sparsekv.plans.diff import Change, diff_plans
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
from sparsekv.plans.schema import Plan, Score, to_data
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


def found(new: Plan, old: Plan | None = None, full: bool = False) -> dict[str, tuple[Any, Any]]:
    """What changed, by path."""
    return {change.path: (change.old, change.new) for change in diff_plans(old or small_plan(), new, full)}


def changed(part: Part, **fields: Any) -> Any:
    return part.model_copy(update=fields)


COMPARED = [name for name in Plan.model_fields if name not in ("kind", "schema_version", "integrity")]


@settings(max_examples=25, deadline=None)
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
    wider = AShape(sink=tokens(64), window=tokens(4096))
    new = prefill({3: ((0, 1), LINES)} | {layer: ((0,), wider) for layer in (5, 6)})
    changes = found(small_plan(prefill=new))
    assert list(changes) == [f"prefill.lengths[2049:].layers[{at}]" for at in ("3].heads[0-1", "5-6].heads[0")]
    assert list(changes.values()) == [
        (
            {"kind": "a_shape", "sink": {"tokens": 64}, "window": {"tokens": 1024}},
            {"kind": "vertical_slash"} | {name: own for name, own in to_data(LINES).items() if name != "pattern"},
        ),
        ({"window": {"tokens": 1024}}, {"window": {"tokens": 4096}}),
    ]


def test_only_the_lengths_that_changed_are_named() -> None:
    assert list(found(small_plan(prefill=prefill({}, up_to=8192)))) == [
        "prefill.lengths[2049:8192].layers[0-11].heads[0-1]"
    ]
    assert found(small_plan(prefill=prefill({}, extrapolated=True))) == {
        "prefill.lengths[2049:].extrapolated": (False, True)
    }


def test_a_plan_written_otherwise_is_a_change() -> None:
    assert found(small_plan(prefill=prefill({3: ((2,), Dense())}))) == {"": (None, None)}


def test_many_patterns_are_condensed_by_kind_unless_all_are_asked_for() -> None:
    old = large_plan(4, 16, 1)
    assert old.prefill is not None
    (bucket,) = old.prefill.lengths
    groups = tuple(
        changed(g, pattern=changed(g.pattern, slash=tokens(g.pattern.slash.tokens * 2))) for g in bucket.heads
    )
    new = changed(old, prefill=changed(old.prefill, lengths=(changed(bucket, heads=groups),)))
    assert list(found(new, old).values()) == [({"slash": "2048 to 2063"}, {"slash": "4096 to 4126"})]
    assert len(found(new, old, full=True)) == 16


def test_budgets_filters_and_offload_of_decode() -> None:
    old = small_plan(decode=decode(DecodeBudget(tokens=2048)))
    new = small_plan(decode=decode(DecodeBudget(tokens=4096), Offload(layers=(4, 5), hot=fraction(0.25))))
    assert found(new, old) == {
        "decode.lengths[4097:].layers[4-7]": ({"budget": {"tokens": 2048}}, {"budget": {"tokens": 4096}}),
        "decode.offload.layers": (None, "4-5"),
        "decode.offload.hot.fraction": (None, 0.25),
    }
    changes = found(small_plan(decode=decode(DecodeBudget(tokens=2048), layers=(4, 5, 6, 7, 8), filter=3)), old)
    assert changes["decode.lengths[4097:].layers[4-7]"] == ({"filter": 2}, {"filter": 3})
    assert changes["decode.lengths[4097:].layers[8]"][0] == {"kind": "dense"}


def test_values_that_look_alike_are_told_apart_and_lines_cannot_be_forged() -> None:
    old = small_plan(extensions={"x": 0.12345678, "y": "a", "z": 1})
    new = small_plan(extensions={"x": 0.12345679, "y": "b\nStatus", "z": 1.0})
    texts = [change.text for change in diff_plans(old, new)]
    assert texts == [
        "extensions.x: 0.12345678 -> 0.12345679",
        'extensions.y: a -> "b\\nStatus"',
        "extensions.z: 1 -> 1.0",
    ]


def test_model_and_fingerprint() -> None:
    other = Fingerprint(architecture=digest_of("a"), weights=digest_of("c"))
    new = small_plan(model=model_info(id="example/tuned", rope={"rope_type": "yarn"}, fingerprint=other))
    assert set(found(new)) == {"model.id", "model.rope.rope_theta", "model.rope.rope_type", "model.fingerprint.weights"}
    assert found(small_plan(model=model_info(kv_heads=4)))["model.attention[0].kv_heads"] == (2, 4)


def test_of_quality_and_cost_the_main_figures_are_listed_and_all_with_full() -> None:
    old = full_plan()
    assert old.quality
    assert old.quality.both
    score = Score(dense=0.99, sparse=0.95, samples=200, interval=(-0.07, -0.01))
    both = changed(old.quality.both, density=0.05, tasks={"niah_single": score})
    new = changed(old, quality=changed(old.quality, both=both))
    figures = {"quality.both.density": (0.0625, 0.05), "quality.both.tasks.niah_single.sparse": (0.985, 0.95)}
    assert found(new, old) == figures
    interval = {"quality.both.tasks.niah_single.interval": ([-0.0123456, 0.0025], [-0.07, -0.01])}
    assert found(new, old, full=True) == figures | interval
    assert list(found(changed(old, quality=None, cost=None), old)) == ["quality", "cost"]


def test_decodes_density_is_called_a_share_and_its_field_as_in_the_file() -> None:
    old = full_plan()
    assert old.quality
    phases = {phase: changed(one, density=0.05) for phase, one in old.quality.phases.items()}
    assert old.cost
    lengths = tuple(
        changed(one, **{phase: changed(getattr(one, phase), density=0.05) for phase in ("prefill", "decode")})
        for one in old.cost.lengths
        if one.prefill and one.decode
    )
    changes = diff_plans(
        old, changed(old, quality=changed(old.quality, **phases), cost=changed(old.cost, lengths=lengths))
    )
    told = {one.path: one.text.partition(": ")[0] for one in changes if one.path.endswith(".density") and one.new}
    assert {"quality.prefill.density", "quality.decode.density"} <= told.keys()
    assert all(text == path + (" (share)" if ".decode." in path else "") for path, text in told.items())
    assert sum(path.startswith("cost.") for path in told) > 1


def test_provenance_and_extensions_of_any_shape() -> None:
    old = full_plan()
    provenance = changed(old.provenance, settings=dict(old.provenance.settings) | {"target_density": 0.2}, seed=1)
    odd = {"interval": "x", "fraction": {"fraction": "x"}, "lengths": 1, "flag": 1}
    assert found(changed(old, provenance=provenance, extensions=odd), changed(old, extensions={"flag": True})) == {
        "provenance.seed": (1234, 1),
        "provenance.settings.target_density": (0.3, 0.2),
        "extensions.flag": (True, 1),
        "extensions.interval": (None, "x"),
        "extensions.fraction.fraction": (None, "x"),
        "extensions.lengths": (None, 1),
    }
