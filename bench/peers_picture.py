"""The picture of `bench peers`: time against divergence, a point for each method, setting and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from sparsekv.bench.peers import Case, fastest_dense
from sparsekv.bench.peers_file import PeerRow, PeersFile
from sparsekv.bench.report.charts import GREY, styled
from sparsekv.plans.files import write_bytes
from sparsekv.plans.types import format_length

_LEAST_KL = 1e-6
_ALIKE = 0.05  # of a density: within it the label tells one
_SAME = 1.25  # a row timed at a density further from the model's than this is no point
_SETTINGS = {
    "plan": "the plan",
    "published": "as published",
    "equal": "at the plan's density",
    "original": "original code",
}


def write_picture(result: PeersFile, path: Path) -> int:
    """Draws the rows that have both numbers at one density, as SVG; returns how many they are."""
    points = [point for row in result.all(PeerRow).values() if (point := _point(row))]
    if points:
        lengths = sorted({point["length"] for point in points})
        panels = [_panel([one for one in points if one["length"] == length], result, length) for length in lengths]
        chart = alt.hconcat(*panels).resolve_scale(x="independent", color="shared", shape="shared")
        version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
        svg = vl_convert.vegalite_to_svg(styled(chart, background="white"), vl_version=version)
        write_bytes(path, svg.encode())
    return len(points)


def _point(row: Any) -> dict[str, Any] | None:
    if row.at == "dense" or None in (row.kl, row.whole_ms, row.density, row.timed_density):
        return None
    if not 1 / _SAME <= row.timed_density / row.density <= _SAME:
        return None
    name, label = Case(row.method, row.at, row.length).name, f"{row.density:.0%}"
    if abs(row.timed_density / row.density - 1.0) > _ALIKE:
        label += f", timed at {row.timed_density:.0%}"
    return {"method": row.method, "at": _SETTINGS[row.at], "name": name, "length": row.length,
            "ms": row.whole_ms, "kl": max(row.kl, _LEAST_KL), "label": label}  # fmt: skip


def _panel(points: list[dict[str, Any]], result: PeersFile, length: int) -> alt.LayerChart:
    x = alt.X(
        "ms:Q", title="one layer, index and attention (ms, log)", scale=alt.Scale(type="log", nice=False, padding=30)
    )
    y = alt.Y("kl:Q", title="divergence from dense (nats, log)", scale=alt.Scale(type="log", nice=False, padding=20))
    base = alt.Chart(alt.InlineData(values=points)).encode(x=x, y=y)
    marks = base.mark_point(size=90, filled=True, opacity=0.9).encode(
        color=alt.Color("method:N", legend=alt.Legend(title="method", orient="bottom", columns=3)),
        shape=alt.Shape("at:N", legend=alt.Legend(title="setting", orient="bottom", columns=2)),
    )
    labels = base.mark_text(dx=8, align="left", color=GREY).encode(text="label:N")
    layers: list[Any] = [marks, labels]
    shape = f"{result.settings.heads} heads of {result.settings.head_dim}, {result.settings.device}"
    title = [f"{format_length(length)} tokens; time of a planted layer: {shape}", "labels: density in the model"]
    if (dense := fastest_dense(result, length)) is not None:
        rule = alt.Chart(alt.InlineData(values=[{"ms": dense.whole_ms}]))
        layers.append(rule.mark_rule(strokeDash=[5, 4], color=GREY).encode(x="ms:Q"))
        title[-1] += f"; dashed: dense, {dense.method}"
    return alt.LayerChart(layer=layers, width=380, height=300, title=alt.TitleParams(title))
