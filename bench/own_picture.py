"""The picture of `bench own`: times by length and by turn, the verdict beside them; figures that failed in words."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

import altair as alt

from sparsekv.bench.own_file import TITLES, OwnFigure, OwnFile, figures, plan_of, result
from sparsekv.bench.own_page import ratio
from sparsekv.bench.report.charts import ACCENT, GREY, write_svg
from sparsekv.plans.types import format_length

_WAYS = ["dense", "plan"]
_SIZE = (300, 200)  # of a panel
_LINE = 95  # characters of the text


def write_picture(file: OwnFile, path: Path) -> None:
    """Draws it as SVG."""
    parts = [figure for figure in figures(file) if figure.medians]
    panels: list[Any] = [
        *(_lengths(own, title) for title, own in _by_length(parts).items()),
        *(_turns(own, agents) for agents, own in _by_agents(parts).items()),
    ]
    rows = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)] or [alt.hconcat()]
    title = alt.TitleParams(f"{file.settings.model}, by its own plan", subtitle=_text(file), anchor="start")
    chart = alt.vconcat(*rows, title=title).resolve_scale(x="independent", y="independent")
    write_svg(chart, path)


def _text(file: OwnFile) -> list[str]:
    failed = [f"failed: {figure.words}: {figure.failed}" for figure in figures(file) if figure.failed]
    return [line for text in (result(file), plan_of(file).verdict, *failed) for line in wrap(text, _LINE)]


def _by_length(parts: list[OwnFigure]) -> dict[str, list[OwnFigure]]:
    groups: dict[str, list[OwnFigure]] = {}
    for figure in parts:
        if figure.name in ("prompt", "first token", "token"):
            at_once = f", {figure.at_once} at once" if figure.half == "vllm" else ""
            groups.setdefault(f"{figure.name}, {TITLES[figure.half]}{at_once}", []).append(figure)
    return groups


def _by_agents(parts: list[OwnFigure]) -> dict[int, list[OwnFigure]]:
    groups: dict[int, list[OwnFigure]] = {}
    for figure in parts:
        if figure.name == "turn" and figure.turn > 1:
            groups.setdefault(figure.at_once, []).append(figure)
    return groups


def _lengths(parts: list[OwnFigure], title: str) -> alt.LayerChart:
    x = alt.X("at:N", title="tokens", sort=None, axis=alt.Axis(labelAngle=0))
    rows = [row | {"at": format_length(figure.length)} for figure in parts for row in _rows(figure)]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=_time(), xOffset=alt.XOffset("way:N", sort=_WAYS))
    bars = base.mark_bar().encode(color=_colour())
    gains = base.transform_filter("datum.way == 'plan'").mark_text(dy=-6, color=GREY).encode(text="gain:N")
    return alt.LayerChart(layer=[bars, gains], width=_SIZE[0], height=_SIZE[1], title=title)


def _turns(parts: list[OwnFigure], agents: int) -> Any:
    rows = [row | {"turn": figure.turn} for figure in parts for row in _rows(figure)]
    x = alt.X("turn:O", axis=alt.Axis(labelAngle=0))
    lines = alt.Chart(alt.InlineData(values=rows)).mark_line(point=True).encode(x=x, y=_time(), color=_colour())
    title = f"first token of a turn, vLLM, {agents} at once"
    return lines.properties(width=_SIZE[0], height=_SIZE[1], title=title)


def _rows(figure: OwnFigure) -> list[dict[str, Any]]:
    gain = ratio(figure).split(" ")[0]
    return [{"way": way, "ms": ms, "gain": gain} for way, ms in zip(_WAYS, figure.medians or (), strict=False)]


def _time() -> alt.Y:
    return alt.Y("ms:Q", title="ms")


def _colour() -> alt.Color:
    scale = alt.Scale(domain=_WAYS, range=[GREY, ACCENT])
    return alt.Color("way:N", scale=scale, legend=alt.Legend(title=None, orient="bottom"))
