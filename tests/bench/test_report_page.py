"""`sparsekv report`: one page that holds what it shows, runs one script and nothing that a plan says."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse
from plans_samples import digest_of, full_plan, model_info, small_plan

from sparsekv.bench.compare_file import CompareRun, Held, Sampled
from sparsekv.bench.report.facts import (
    pattern_maps,
)
from sparsekv.planner.records import RunFile, write_measured
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan, Segment
from sparsekv.plans.schema import Cost, Plan, Provenance

HOSTILE = "</script><img src=x onerror='alert(1)'>\"&{{7*7}}"


class Page(HTMLParser):
    """The elements of a page with their attributes, the content of its scripts, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def hostile_plan() -> Plan:
    plan = full_plan()
    cell = plan.quality.cells[0].model_copy(update={"task": HOSTILE})
    return plan.model_copy(
        update={
            "model": model_info(9, id=HOSTILE, revision=HOSTILE, model_type=HOSTILE),
            "targets": (plan.targets[0].model_copy(update={"device": HOSTILE}),),
            "quality": plan.quality.model_copy(update={"cells": (cell,)}),
            "cost": Cost(device=HOSTILE, backend="cpu", lengths=plan.cost.lengths),
            "provenance": Provenance(versions={HOSTILE: HOSTILE}, source=HOSTILE),
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, its profile, and a comparison."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(0)
    reuse = made_up_reuse(np.full((3, 3), 0.5))
    entry = made_up_length(4096, rng).model_copy(update={"reuse": reuse})
    write_measured(made_up_profile(entry), folder / "profile.json")
    heads = (HeadGroup(layer=0, heads=(0,), pattern=entry.patterns[0]),)
    prefill = PrefillPlan(tile=TileShape(), lengths=(PrefillBucket(up_to=None, heads=heads),))
    segment = Segment(filter=1, layers=(2,), budget=DecodeBudget(tokens=512), recent=128)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    plan = Plan(status="unverified", model=made_up_model(), prefill=prefill, decode=decode, cost=two_lengths())
    write_plan(plan, folder / "plan.yaml")
    write_compared(folder / "compare.jsonl", ("sparsekv", 0.0), (HOSTILE, 0.1))
    write_plan(hostile_plan(), folder / "hostile.yaml")
    return folder


def write_compared(path: Path, *methods: tuple[str, float]) -> None:
    same = {"phase": "prefill", "suite": "ruler", "reference": "sparsekv", "device": "cpu", "backend": "auto"}
    run = CompareRun(model="m", architecture=digest_of("a"), dtype="float32", seed=0, samples=1, versions={}, **same)
    at = {"task": "fwe", "length": 4096, "number": 0, "score": 0.5, "share": 0.1}
    for name, kl in methods:
        RunFile.of(run, path).add(
            Held(method=name, at="0.1", length=4096, target=0.1), Sampled(method=name, at="0.1", kl=kl, **at)
        )
    RunFile.of(run, path).add(Sampled(method="dense", at="1", kl=0.0, **at))


def two_lengths() -> Cost:
    cost = full_plan().cost
    return cost.model_copy(update={"lengths": (cost.lengths[0].model_copy(update={"length": 4096}), *cost.lengths)})


def everything(files: Path) -> tuple[object, ...]:
    return "report", files / "plan.yaml", files / "profile.json", files / "compare.jsonl"


def test_the_page_runs_one_script_and_loads_nothing(sparsekv, files, tmp_path) -> None:
    found = sparsekv(*everything(files), "-o", tmp_path / "page.html")
    assert (found.code, found.err) == (0, "")
    assert "page.html" in found.out
    page = Page((tmp_path / "page.html").read_text())
    assert not {"link", "iframe", "img", "base"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    _, script = page.scripts
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"'sha256-{digest}'" in policy
    assert policy.count("unsafe-inline") == 1  # of styles


def test_every_chart_has_its_place_and_the_fields_that_it_draws(sparsekv, files, tmp_path) -> None:
    sparsekv(*everything(files), "-o", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    places = {value for name, value in page.attributes if name == "id"} - {"page-data"}
    charts, datasets = page.data["charts"], page.data["datasets"]
    assert places == set(charts) | set(page.data["sketches"])
    assert set(charts) == {
        *("patterns-0", "density-0", "damage-0", "reads-map", "similarity-matrix", "prefill-time", "decode-time"),
        "compared-kl",
    }
    assert len(charts["similarity-matrix"]["layer"]) == 2
    for chart in charts.values():
        for part in chart.get("layer", [chart]):
            name = part["data"]["name"]
            known = datasets[name]["fields"] if name in datasets else chart["datasets"][name][0].keys()
            assert set(fields_of(part["encoding"])) <= set(known)


def fields_of(encoding: Any) -> Iterator[str]:
    if isinstance(encoding, dict):
        if "field" in encoding:
            yield encoding["field"]
        encoding = list(encoding.values())
    if isinstance(encoding, list):
        for part in encoding:
            yield from fields_of(part)


def test_nothing_in_a_plan_or_a_comparison_becomes_markup(sparsekv, files, tmp_path) -> None:
    path = tmp_path / "page.html"
    assert sparsekv("report", files / "hostile.yaml", files / "compare.jsonl", "-o", path).code == 0
    page = Page(path.read_text())
    assert "img" not in page.tags
    assert len(page.scripts) == 2
    assert "onerror" not in {name for name, _ in page.attributes}
    assert page.text.count(HOSTILE) >= 8
    assert HOSTILE in {row[0] for row in page.data["datasets"]["compared"]["rows"]}


def test_a_page_is_replaced_and_no_other_file(sparsekv, files, tmp_path) -> None:
    other, page = tmp_path / "index.html", tmp_path / "page.html"
    other.write_text("<!DOCTYPE html><title>mine</title>")
    found = sparsekv("report", files / "plan.yaml", "-o", other)
    assert (found.code, other.read_text()) == (2, "<!DOCTYPE html><title>mine</title>")
    assert "found another file" in found.err
    assert sparsekv("report", files / "plan.yaml", "-o", files / "plan.yaml").code == 2
    for plan in ("plan.yaml", "hostile.yaml"):
        assert sparsekv("report", files / plan, "-o", page).code == 0


def test_a_profile_of_another_model_is_refused(sparsekv, files, tmp_path) -> None:
    write_plan(small_plan(), tmp_path / "other.yaml")
    page = tmp_path / "page.html"
    found = sparsekv("report", tmp_path / "other.yaml", "-o", page, files / "profile.json")
    assert (found.code, page.exists()) == (3, False)


# --- facts of heads ---------------------------------------------------------------------------------------------------


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
