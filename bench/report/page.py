"""`report(plan)`: one HTML page that holds everything it needs, libraries included, and loads nothing.

The same inputs give the same bytes. What comes from a plan is escaped where it stands: by the template in text, as JSON
in the data block; the page's security policy runs the one script written here and no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

from sparsekv.bench.compare_file import SPENT, CompareFile, rows, sentences, shown, table_of
from sparsekv.bench.own_file import TITLES, OwnFile, figures, result
from sparsekv.bench.own_page import remarks, table
from sparsekv.bench.report import charts, facts
from sparsekv.bench.report.sketch import Sketch
from sparsekv.plans.brief import sentence
from sparsekv.plans.schema import Plan, unsupported
from sparsekv.plans.show import header

if TYPE_CHECKING:
    from sparsekv.bench.suite import SuiteTable
    from sparsekv.planner.profile.profile_data import Profile

LEAST_KL = 1e-6  # where the logarithmic axis of divergences ends


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a section: a title, lines of text, charts by their id, one head's drawing, a table with its header."""

    title: str = ""
    lines: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()
    table: list[list[str]] = field(default_factory=list)
    sketch: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of the page."""

    title: str
    blocks: tuple[Block, ...]


class _Drawings:
    """Charts and the data they name, as they are added."""

    def __init__(self) -> None:
        self.charts: dict[str, dict[str, Any]] = {}
        self.datasets: dict[str, dict[str, Any]] = {}
        self.sketches: dict[str, dict[str, Any]] = {}

    def data(self, name: str, kind: type[Any], rows: Sequence[Any]) -> str:
        self.datasets[name] = facts.columnar(kind, rows)
        return name

    def add(self, name: str, chart: dict[str, Any]) -> str:
        self.charts[name] = chart
        return name


def report(
    plan: Plan,
    verdict: Sequence[str],
    profile: Profile | None = None,
    compared: CompareFile | None = None,
    suite: SuiteTable | None = None,
    own: OwnFile | None = None,
) -> str:
    """The page of a plan with its verdict, a line each, and with the damages and the similarity of its
    profile, with a comparison, the results of a suite and the figures of `bench own` where given."""
    drawings = _Drawings()
    first = (
        _own(own) if own else None,
        _costs(plan, drawings),
        _quality(plan, drawings),
        _suite(suite, drawings) if suite else None,
    )
    last = _compared(compared, drawings) if compared else None
    patterns = (_prefill(plan, profile, drawings), _decode(plan, profile, drawings))
    sections = [section for section in (*first, *patterns, last) if section]
    drawn = {"charts": drawings.charts, "datasets": drawings.datasets, "sketches": drawings.sketches}
    data = drawn | {"colours": charts.FAMILIES}
    script = _script()
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("sparsekv.bench.report", ""), autoescape=True, undefined=jinja2.StrictUndefined
    ).get_template("page.html.jinja")
    return template.render(
        model=plan.model.id,
        status=plan.status,
        status_text=plan.status_text,
        verdict=[line.partition(": ")[::2] for line in verdict],
        header=header(plan),
        refused=unsupported(plan),
        sections=sections,
        data=_json(data),
        script=Markup(script),
        script_hash=Markup(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"),
    )


def _json(data: Any) -> Markup:
    """JSON in which nothing ends the element around it."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def _script() -> str:
    """The drawing with all of Vega-Embed, of the version that the charts are written for."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    drawing = resources.files("sparsekv.bench.report").joinpath("drawing.js").read_text()
    return vl_convert.javascript_bundle(drawing, vl_version=version).replace("</script", "<\\/script")


_MAPS = (
    "Lengths are past + chunk. Point at a cell for its parameters; a click on it draws the head on the matrix.",
    "There, sinks and the nearest keys have their place. Columns, diagonals and tiles are chosen in each prompt: drawn "
    "is how much of them is computed at most, not which.",
)


def _prefill(plan: Plan, profile: Profile | None, drawings: _Drawings) -> Section:
    maps, lines = facts.pattern_maps(plan, profile)
    layers = plan.model.layers
    heads = max(group.heads for group in plan.model.attention if group.kind != "linear")
    families = sorted({head.pattern for one in maps for head in one.heads})
    blocks = []
    for number, one in enumerate(maps):
        data = drawings.data(f"heads-{number}", facts.HeadFact, one.heads)
        shown = [
            drawings.add(f"patterns-{number}", charts.pattern_map(data, layers, heads, families)),
            drawings.add(f"density-{number}", charts.density_map(data, layers, heads, one.measured)),
        ]
        if one.measured:
            shown.append(drawings.add(f"damage-{number}", charts.damage_map(data, layers, heads)))
        sketch = f"sketch-{number}"
        shapes = drawings.data(f"shapes-{number}", Sketch, one.sketches)
        drawings.sketches[sketch] = {"heads": data, "shapes": shapes, "charts": shown}
        blocks.append(Block(f"{one.title} tokens", (one.summary,), tuple(shown), sketch=sketch))
    notes: tuple[str, ...] = _MAPS if maps else ()
    if maps and profile is None:
        notes += ("Damages and predicted densities of heads need the profile (--profile).",)
    elif any(head.damage is None for one in maps for head in one.heads):
        notes += ("A cell left out: the profile has no candidate of this pattern.",)
    return Section(
        "Prefill", tuple(block for block in (Block(lines=notes), *blocks, Block(lines=lines)) if block != Block())
    )


def _decode(plan: Plan, profile: Profile | None, drawings: _Drawings) -> Section:
    blocks = []
    reads = facts.layer_reads(plan)
    if reads:
        titles = list(dict.fromkeys(fact.lengths for fact in reads))
        data = drawings.data("reads", facts.LayerReads, reads)
        chart = drawings.add("reads-map", charts.reads_map(data, plan.model.layers, titles))
        blocks.append(Block("Budgets", (), (chart,), facts.budget_table(plan)))
    else:
        blocks.append(Block(lines=("Dense at every length.",)))
    matrix = facts.similarity(plan, profile)
    if matrix:
        cells = drawings.data("similarity", facts.Similarity, matrix.cells)
        chart = drawings.add("similarity-matrix", charts.similarity_matrix(cells, matrix.marks, plan.model.layers))
        blocks.append(Block("Similarity of layers", (f"As profiled: {matrix.title}.",), (chart,)))
    return Section("Decode", tuple(blocks))


_DENSITIES = (
    "Density: of causal tiles, those that prefill computes. Share: of cached tokens, those that decode reads.",
    "Asked: the target of the plan. Decode has a bound on its divergence in place of one.",
    "Predicted: what its patterns computed on the calibration prompts; more where heads are faster dense.",
    "Measured: what they computed on held-out prompts. Patterns choose their tiles in each prompt anew.",
)


def _costs(plan: Plan, drawings: _Drawings) -> Section | None:
    blocks = list(_times(plan, drawings))
    if plan.cost and blocks:
        made = (
            f"Times are predicted for {plan.cost.device}, {plan.cost.backend}: attention alone, not a run of the plan."
        )
        blocks.insert(0, Block(lines=(made,)))
    if densities := facts.density_table(plan):
        blocks.append(Block("Density and share: asked, predicted and measured", _DENSITIES, table=densities))
    return Section("Time and density", tuple(blocks)) if blocks else None


def _times(plan: Plan, drawings: _Drawings) -> Iterator[Block]:
    """A chart of each phase that is predicted at several lengths; of one length a table."""
    for phase, title in (("prefill", "A whole prefill"), ("decode", "One decode step")):
        rows = facts.phase_times(plan, phase)
        lengths = sorted({row.length for row in rows})
        if len(lengths) > 1:
            times = [row.ms for row in rows if row.ms > 0] or [1.0]
            data = drawings.data(f"{phase}-times", facts.PhaseTime, rows)
            chart = charts.time_chart(data, title, lengths, (min(times), max(times)))
            yield Block(charts=(drawings.add(f"{phase}-time", chart),))
        elif rows:
            yield Block(title, table=facts.time_table(rows))


def _quality(plan: Plan, drawings: _Drawings) -> Section:
    if plan.quality is None:
        return Section("Quality", (Block(lines=("Not measured.",)),))
    tables = tuple(Block(title, table=table) for title, table in facts.quality_tables(plan.quality))
    told = Block(lines=(sentence(plan),))
    points = facts.quality_by_length(plan.quality, LEAST_KL)
    lengths = [point.length for point in points]
    if len(lengths) < 2:
        return Section("Quality", (told, *tables))
    data = drawings.data("quality", facts.LengthQuality, points)
    chart = drawings.add("quality-by-length", charts.quality_chart(data, lengths, ["both"]))
    return Section("Quality", (Block(charts=(chart,)), told, *tables))


def _own(file: OwnFile) -> Section:
    """Times by this plan beside dense, by half."""
    halves = {half: [figure for figure in figures(file) if figure.half == half] for half in TITLES}
    blocks = (
        Block(f"In {TITLES[half]}", lines=tuple(remarks(own)), table=[[*row] for row in table(own)])
        for half, own in halves.items()
        if own
    )
    return Section("Measured by this plan", (Block(lines=(f"{result(file)}.",)), *blocks))


def _suite(scores: SuiteTable, drawings: _Drawings) -> Section:
    """Dense and plans on RULER's tasks."""
    run = scores.file.settings
    data = drawings.data("suite", facts.SuiteScore, facts.suite_scores(scores))
    chart = drawings.add("suite-mean", charts.suite_chart(data, ("dense", *scores.methods), scores.lengths))
    told = (
        f"{run.model}, {run.samples} samples of each of {len(scores.tasks)} tasks a length, phase {run.phase}. "
        f"Recall: RULER's string match in generated text.",
        *(f"Haystack of {', '.join(tasks)}: {what}." for what, tasks in scores.haystacks.items()),
    )
    tables = (Block(f"{method}, by task", table=facts.suite_table(scores, method)) for method in scores.methods)
    return Section("RULER", (Block(lines=told, charts=(chart,)), *tables))


def _compared(file: CompareFile, drawings: _Drawings) -> Section:
    """Methods held to one share or time."""
    every = list(rows(file))
    points = [
        facts.CurveRow(shown(file, row.method), row.length, row.share, max(row.kl, LEAST_KL))
        for row in every
        if row.over_dense
    ]
    data = drawings.data("compared", facts.CurveRow, points)
    chart = drawings.add("compared-kl", charts.curve_chart(data, SPENT[file.settings.phase]))
    lines = [[*row] for row in table_of(file, every)]
    return Section("Compared", (Block(lines=tuple(sentences(file, every)), charts=(chart,), table=lines),))
