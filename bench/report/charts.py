"""The charts of the page, as Vega-Lite specifications of named data.

Field names and filters are fixed here; what a plan or a file says enters as data alone, never as an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from sparsekv.bench.report.facts import Mark
from sparsekv.plans.files import write_bytes
from sparsekv.plans.patterns import PATTERNS

GREY = "#7f7f7f"  # of text and axes: readable on white and on black
ACCENT = "#e4572e"
_PALETTE = ("#7f7f7f", "#4c9be8", "#e8a33d", "#4db38a", "#b07cd8", "#d45087", "#2f9e9e", "#a0a03c")
FAMILIES = dict(zip(PATTERNS, cycle(_PALETTE), strict=False)) | {"sliding": "#8c6d5a", "linear": "#c9c9c9"}
_SIDE = 330  # pixels of a map, as long as its cells are no smaller than _CELL
_CELL = (5, 22)
_WIDEST_HEAD = 60  # pixels of a cell, so that the map of a model of few heads is as wide as its legend
_SCHEME: Literal["viridis"] = "viridis"


def pattern_map(data: str, layers: int, heads: int, families: Sequence[str]) -> dict[str, Any]:
    """Layers x heads, coloured by pattern family."""
    order = [name for name in FAMILIES if name in families]
    scale = alt.Scale(domain=order, range=[FAMILIES[name] for name in order])
    colour = _below("pattern:N", scale, title="pattern", columns=4)
    return _head_map(data, layers, heads, colour, "Pattern of each head")


def density_map(data: str, layers: int, heads: int, measured: bool) -> dict[str, Any]:
    """Layers x heads, coloured by density."""
    title = "density (share of causal tiles)" if measured else "density, at most (share of causal tiles)"
    scale = alt.Scale(scheme=_SCHEME, type="sqrt", domain=[0, 1])
    colour = _gradient("density:Q", title, scale, values=[0, 0.1, 0.3, 0.6, 1])
    return _head_map(data, layers, heads, colour, "Density of each head")


def damage_map(data: str, layers: int, heads: int) -> dict[str, Any]:
    """Layers x heads, coloured by the damage that the profile has of them."""
    scale = alt.Scale(scheme="magma", type="sqrt", domainMin=0)
    colour = _gradient("damage:Q", "damage (nats a token of the answer)", scale, tickCount=3, format=".1~e")
    return _head_map(data, layers, heads, colour, "Damage of each head, as profiled")


def _head_map(data: str, layers: int, heads: int, colour: alt.Color, title: str) -> dict[str, Any]:
    chart = (
        alt.Chart(alt.NamedData(name=data), title=title)
        .mark_rect()
        .encode(
            x=alt.X("head:O", title="head", axis=_axis(heads), scale=_all(heads)),
            y=alt.Y("layer:O", title="layer", axis=_axis(layers), scale=_all(layers)),
            color=colour,
            tooltip=[
                *_tooltips("layer:O", "head:O", "pattern:N", "parameters:N", ("density:Q", ".4")),
                alt.Tooltip("damage:Q", title="damage (nats)", format=".4"),
            ],
        )
    )
    return styled(chart.properties(width=_side(heads, _WIDEST_HEAD), height=_side(layers)))


def similarity_matrix(cells: str, marks: Sequence[Mark], layers: int) -> dict[str, Any]:
    """Layer j x filter i; cells that the plan uses are outlined."""
    axes: dict[str, Any] = {
        "x": alt.X("filter:O", title="layer i that chooses", axis=_axis(layers)),
        "y": alt.Y("layer:O", title="layer j that reads the choice", axis=_axis(layers)),
    }
    scale = alt.Scale(scheme=_SCHEME, domainMax=1)
    colour = _gradient("mass:Q", "share of layer j's attention mass that is kept", scale)
    tooltip = [*_tooltips("layer:O", "filter:O"), alt.Tooltip("mass:Q", title="mass kept", format=".4")]
    matrix = alt.Chart(alt.NamedData(name=cells)).mark_rect().encode(**axes, color=colour, tooltip=tooltip)
    roles = alt.Stroke(
        "role:N",
        scale=alt.Scale(domain=["filter layer", "its segment"], range=["#d61f9c", ACCENT]),
        legend=alt.Legend(title="in the plan", orient="bottom", symbolType="square", symbolFillColor="#555555"),
    )
    rows = alt.InlineData(values=[{"layer": mark.layer, "filter": mark.filter, "role": mark.role} for mark in marks])
    outline = alt.Chart(rows).mark_rect(filled=False, strokeWidth=2).encode(**axes, stroke=roles)
    side = _side(layers)
    sized: dict[str, Any] = {"width": side, "height": side, "title": "Whose choice serves whom"}
    return styled(alt.LayerChart(layer=[matrix, outline], **sized) if marks else matrix.properties(**sized))


def reads_map(data: str, layers: int, titles: Sequence[str]) -> dict[str, Any]:
    """Ranges of lengths x layers, coloured by the share of cached tokens that is read."""
    chart = (
        alt.Chart(alt.NamedData(name=data), title="What each layer reads in a step, by cached tokens")
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=_axis(layers)),
            y=alt.Y("lengths:O", title=None, sort=list(titles)),
            color=_gradient(
                "share:Q", "share of cached tokens, at the longest length", alt.Scale(scheme=_SCHEME, domain=[0, 1])
            ),
            tooltip=[
                alt.Tooltip("layer:O"),
                alt.Tooltip("lengths:N", title="cached"),
                alt.Tooltip("role:N"),
                alt.Tooltip("tokens:Q", title="tokens read", format=","),
                alt.Tooltip("share:Q", format=".3"),
            ],
        )
    )
    return styled(chart.properties(width=_side(layers, _WIDEST_HEAD), height=24 * len(titles)))


def time_chart(data: str, title: str, lengths: Sequence[int], range_ms: tuple[float, float]) -> dict[str, Any]:
    """Predicted milliseconds over length, dense and sparse; dense is the wider line and shows where both are one."""
    modes = ["dense", "sparse"]
    chart = (
        alt.Chart(alt.NamedData(name=data), title=title)
        .mark_line(point=alt.OverlayMarkDef(size=40))
        .encode(
            x=_lengths(lengths, "context (tokens, log)"),
            y=alt.Y(
                "ms:Q",
                title="attention of all layers (ms, log)",
                scale=alt.Scale(type="log", nice=False, domain=[range_ms[0] / 1.5, range_ms[1] * 1.5]),
                axis=alt.Axis(tickCount=4),
            ),
            color=_below("mode:N", alt.Scale(domain=modes, range=[GREY, ACCENT]), title=None),
            strokeWidth=alt.when("datum.mode == 'dense'").then(alt.value(6)).otherwise(alt.value(2)),
            tooltip=[
                *_tooltips(("length:Q", ","), "mode:N", ("ms:Q", ",.4")),
                alt.Tooltip("density:Q", title="computed", format=".3"),
                *_tooltips(("speedup:Q", ".3")),
            ],
        )
    )
    return styled(chart.properties(width=300, height=220))


def quality_chart(data: str, lengths: Sequence[int], phases: Sequence[str]) -> dict[str, Any]:
    """Divergence from dense over length, a line a phase, with 95% intervals."""
    y = alt.Y(
        "kl:Q", title="divergence from dense (nats, log)", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=4)
    )
    base = alt.Chart(alt.NamedData(name=data)).encode(
        x=_lengths(lengths, "context (tokens, log)"),
        color=_below("phase:N", alt.Scale(domain=list(phases)), title=None),
        tooltip=_tooltips("phase:N", ("length:Q", ","), ("kl:Q", ".3"), ("low:Q", ".3"), ("high:Q", ".3")),
    )
    bounds = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q"), y2="high:Q")
    layers: list[Any] = [base.mark_line(point=True).encode(y=y), bounds]
    return styled(alt.LayerChart(layer=layers, width=300, height=220, title="Divergence, with 95% intervals"))


def curve_chart(data: str, spent: str) -> dict[str, Any]:
    """Divergence of every method over the share that it spends, a line each."""
    few, log = alt.Axis(tickCount=5), alt.Scale(type="log", nice=False)
    chart = (
        alt.Chart(alt.NamedData(name=data))
        .mark_line(point=True)
        .encode(
            x=alt.X("share:Q", title=f"share of the {spent} (log)", scale=log, axis=few),
            y=alt.Y("kl:Q", title="divergence from dense (nats, log)", scale=alt.Scale(type="log"), axis=few),
            order="share:Q",
            color=_below("method:N", alt.Undefined, columns=2),
            strokeDash=alt.StrokeDash("length:O", legend=alt.Legend(title="tokens", orient="bottom")),
            tooltip=_tooltips("method:N", ("share:Q", ".4"), ("kl:Q", ".4")),
        )
    )
    return styled(chart.properties(width=300, height=220))


def suite_chart(data: str, methods: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """The mean score of dense and of every plan over length."""
    chart = (
        alt.Chart(alt.NamedData(name=data), title="Mean over all tasks")
        .mark_line(point=True)
        .encode(
            x=_lengths(lengths, "tokens (log)"),
            y=alt.Y("recall:Q", title="recall (percent)", scale=alt.Scale(domain=[0, 100])),
            color=_below("method:N", alt.Scale(domain=list(methods)), columns=2),
            tooltip=_tooltips("method:N", ("length:Q", ","), ("recall:Q", ".1f"), ("exact:Q", ".1f")),
        )
    )
    return styled(chart.properties(width=300, height=220))


def _gradient(field: str, title: str, scale: alt.Scale, **ticks: Any) -> alt.Color:
    return _below(field, scale, title=title, gradientLength=200, titleLimit=_SIDE, **ticks)


def _below(field: str, scale: alt.Scale | alt.UndefinedType, **legend: Any) -> alt.Color:
    return alt.Color(field, scale=scale, legend=alt.Legend(orient="bottom", **legend))


def _tooltips(*fields: str | tuple[str, str]) -> list[alt.Tooltip]:
    """Tooltips of fields, or of fields with their formats."""
    return [alt.Tooltip(one) if isinstance(one, str) else alt.Tooltip(one[0], format=one[1]) for one in fields]


def _all(count: int) -> alt.Scale:
    """A row of cells in which the cells without a value have their place."""
    return alt.Scale(domain=list(range(count)))


def _axis(count: int) -> alt.Axis:
    """Labels of a row of cells, as many as there is room for."""
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64) if count <= 24 * step)
    return alt.Axis(values=list(range(0, count, every)), labelAngle=0, grid=False, ticks=False)


def _lengths(lengths: Sequence[int], title: str) -> alt.X:
    text = "datum.value % 1024 ? datum.value : datum.value / 1024 + 'k'"
    axis = alt.Axis(values=list(lengths), labelExpr=text, labelOverlap=True)
    return alt.X("length:Q", title=title, scale=alt.Scale(type="log", base=2), axis=axis)


def _side(cells: int, widest: int = _CELL[1]) -> int:
    return cells * min(max(_SIDE // cells, _CELL[0]), widest)


def styled(chart: alt.TopLevelMixin, background: str = "transparent") -> dict[str, Any]:
    """The specification of a chart in the colours of all."""
    text: dict[str, Any] = {"labelColor": GREY, "titleColor": GREY}
    coloured: Any = chart.configure(
        background=background,
        axis=alt.AxisConfig(domainColor=GREY, tickColor=GREY, gridColor=GREY, gridOpacity=0.25, **text),
        legend=alt.LegendConfig(**text),
        title=alt.TitleConfig(color=GREY, anchor="start"),
        view=alt.ViewConfig(stroke=None),
    )
    data: dict[str, Any] = coloured.to_dict()
    return data


def write_svg(chart: alt.TopLevelMixin, path: Path) -> None:
    """On white, which pages of any colour show."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    write_bytes(path, vl_convert.vegalite_to_svg(styled(chart, background="white"), vl_version=version).encode())
