"""The picture of `sparsekv compare`: divergence against the share or the time, a point for each method and setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt

from sparsekv.bench.compare_file import SPENT, CompareFile, Row, rows, shown
from sparsekv.bench.entrants import TIME
from sparsekv.bench.report.charts import write_svg
from sparsekv.plans.types import format_length

_LEAST_KL = 1e-6


def write_picture(file: CompareFile, path: Path) -> int:
    """Draws the methods of a file, as SVG; returns how many points they are."""
    own = [row for row in rows(file) if row.over_dense is not None]
    panels = {(row.length, row.at == TIME): None for row in own}
    if panels:
        same = ([row for row in own if (row.length, row.at == TIME) == one] for one in panels)
        charts = [_panel(some, length, is_time, file) for some, (length, is_time) in zip(same, panels, strict=True)]
        chart = alt.hconcat(*charts).resolve_scale(x="independent", color="shared")
        write_svg(chart, path)
    return len(own)


def _panel(some: list[Row], length: int, is_time: bool, file: CompareFile) -> alt.LayerChart:
    phase = file.settings.phase
    title = f"{'prompt' if phase == 'prefill' else 'step'}, ms" if is_time else f"share of the {SPENT[phase]}"
    base = alt.Chart(alt.InlineData(values=[_point(row, is_time, file) for row in some])).encode(
        x=alt.X("x:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=30)),
        color=alt.Color("method:N", legend=alt.Legend(title="method", orient="bottom", columns=3)),
    )
    y = alt.Y("kl:Q", title="divergence from dense (nats, log)", scale=alt.Scale(type="log", nice=False, padding=20))
    bars = base.mark_rule().encode(y=alt.Y("low:Q"), y2="high:Q")
    layers: list[Any] = [bars, base.mark_point(size=90, filled=True).encode(y=y)]
    words = f"{format_length(length)} tokens, {file.settings.suite}, {file.settings.device}"
    return alt.LayerChart(layer=layers, width=380, height=300, title=alt.TitleParams(words))


def _point(row: Row, is_time: bool, file: CompareFile) -> dict[str, Any]:
    seconds = row.prefill_seconds if file.settings.phase == "prefill" else row.step_seconds
    low, high = row.kl_interval or (row.kl, row.kl)
    bounds = {name: max(value, _LEAST_KL) for name, value in (("kl", row.kl), ("low", low), ("high", high))}
    return {"method": shown(file, row.method), "x": 1000.0 * (seconds or 0.0) if is_time else row.share, **bounds}
