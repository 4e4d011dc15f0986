"""A plan as tables for people, readable at 100 columns. The only module here that loads rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sparsekv.plans.capability import unsupported
from sparsekv.plans.decode import DecodeBucket, DecodePlan
from sparsekv.plans.layers import format_ids
from sparsekv.plans.lengths import format_length
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.overview import layer_rows, reach, summary, text_of
from sparsekv.plans.parts import Part
from sparsekv.plans.prefill import PrefillBucket, PrefillPlan
from sparsekv.plans.records import Cost, Quality, Retention
from sparsekv.plans.schema import Plan

__all__ = ["describe", "summary"]


def describe(plan: Plan, full: bool = False) -> list[RenderableType]:
    """What `sparsekv show` prints, one thing after the other; `full` lists every head pattern of large layers."""
    parts: list[RenderableType] = [_facts(plan)]
    parts += _prefill(plan.prefill, plan.model, full) if plan.prefill else [Text("\nPrefill: dense at every length")]
    parts += _decode(plan.decode, plan.model) if plan.decode else [Text("\nDecode: dense at every length")]
    if plan.kv_cache:
        parts.append(_cache(plan.kv_cache))
    parts.append(_quality(plan.quality) if plan.quality else Text("\nQuality: not measured"))
    if plan.cost:
        parts.append(_cost(plan.cost))
    refused = unsupported(plan)
    if refused:
        parts.append(Text("\nThis version cannot run this plan:\n" + "\n".join(f"  {line}" for line in refused)))
    return parts


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # not as markup: a task or device may be called anything


def _named(part: Part, *names: str) -> list[str]:
    values = [(name.replace("_", " "), getattr(part, name)) for name in names]
    return [f"{name} {text_of(value)}" for name, value in values if value is not None]


def _facts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    model = plan.model
    rows = [
        ("Model", model.id + (f" @ {model.revision}" if model.revision else "")),
        ("Status", plan.status),
        ("Architecture", f"{model.model_type}, {model.layers} layers, context {format_length(model.context_length)}"),
        *(("", line) for line in _shapes(model)),
        *(("Target", f"{t.count} x {t.device}, {t.backend}, {t.dtype}") for t in plan.targets),
    ]
    made = [f"{name} {version}" for name, version in plan.provenance.versions.items()]
    made += _named(plan.provenance, "preset", "seed", "source")
    if made:
        rows.append(("Made with", ", ".join(made)))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _shapes(model: ModelInfo) -> Iterator[str]:
    for group in model.attention:
        window = f", window {group.window}" if group.window else ""
        shape = f"{group.heads} heads, {group.kv_heads} key-value heads of {group.head_dim}"
        yield f"layers {format_ids(group.layers)}: {group.kind}{window}, {shape}"


def _prefill(prefill: PrefillPlan, model: ModelInfo, full: bool) -> Iterator[RenderableType]:
    yield Text(f"\nPrefill, tiles of {prefill.tile.query} x {prefill.tile.key}; lengths are past + chunk", style="bold")
    for position, bucket in enumerate(prefill.lengths):
        place = reach(prefill.lengths, position) + (", extrapolated" if bucket.extrapolated else "")
        if bucket.dense:
            yield Text(f"{place}: dense")
        elif bucket.same_as is not None:
            yield Text(f"{place}: as up to {bucket.same_as:,}")
        else:
            yield _patterns(place, bucket, model, full)


def _patterns(place: str, bucket: PrefillBucket, model: ModelInfo, full: bool) -> Table:
    table = _table(place, "Layers", "Heads", "Pattern", "Parameters")
    for layers in layer_rows(bucket, model, full):
        for number, row in enumerate(layers.rows):
            name = "" if number else format_ids(layers.layers)
            _row(table, name, format_ids(row.heads), row.kind, row.parameters)
    return table


def _decode(decode: DecodePlan, model: ModelInfo) -> Iterator[RenderableType]:
    yield Text("\nDecode; lengths are cached tokens", style="bold")
    for position, bucket in enumerate(decode.lengths):
        place = reach(decode.lengths, position)
        yield Text(f"{place}: dense") if bucket.dense else _segments(place, bucket, model)
    if decode.offload:
        layers, hot = format_ids(decode.offload.layers), text_of(decode.offload.hot)
        yield Text(f"offloaded to host memory: layers {layers}, {hot} rows hot on the device")


def _segments(place: str, bucket: DecodeBucket, model: ModelInfo) -> Table:
    table = _table(place, "Filter", "Layers", "Budget", "Selector", "Window", "Heads", "Scope", numbers=("Filter",))
    for segment in bucket.segments:
        heads = segment.heads if isinstance(segment.heads, str) else "mapped"
        chosen = (segment.selector, str(segment.window), heads, segment.scope)
        _row(table, str(segment.filter), format_ids(segment.layers), text_of(segment.budget), *chosen)
    dense = format_ids(set(range(model.layers)) - bucket.sparse_layers)
    _row(table, "", dense, "everything")
    return table


def _cache(rules: tuple[Retention, ...]) -> Table:
    table = _table("\nCache retention", "Layers", "Keep", "Sink", "Recent", "Score", "Observe")
    for rule in rules:
        details = (rule.sink, rule.recent, rule.score, rule.observe)
        _row(table, format_ids(rule.layers), text_of(rule.keep), *("" if v is None else str(v) for v in details))
    return table


def _quality(quality: Quality) -> Table:
    numbers = ("Dense", "Sparse", "Samples")
    columns = ("Phase", "Task", *numbers, "Sparse - dense, 95%", "Measured at")
    table = _table("\nMeasured quality", *columns, numbers=numbers)
    for phase in ("prefill", "decode", "both"):
        measured = getattr(quality, phase)
        if measured is None:
            continue
        facts = ", ".join(_named(measured, "density", "output_error", "kl"))
        _row(table, phase, facts, "", "", "", "", ", ".join(map(format_length, measured.lengths)))
        for task, score in measured.tasks.items():
            low, high = score.interval
            scores = (f"{score.dense:.4g}", f"{score.sparse:.4g}", str(score.samples))
            _row(table, "", task, *scores, f"{low:+.3g} to {high:+.3g}")
    return table


def _cost(cost: Cost) -> Table:
    numbers = ("Length", "Dense", "Sparse", "Speedup", "Density")
    title = f"\nPredicted attention time on {cost.device}, {cost.backend}"
    table = _table(title, "Length", "Phase", *numbers[1:], numbers=numbers)
    for entry in cost.lengths:
        for phase, estimate in (("prefill", entry.prefill), ("decode step", entry.decode)):
            if estimate is not None:
                faster = f"{estimate.dense_us / estimate.sparse_us:.2f}x" if estimate.sparse_us else ""
                times = (f"{estimate.dense_us / 1000:,.3f} ms", f"{estimate.sparse_us / 1000:,.3f} ms")
                _row(table, format_length(entry.length), phase, *times, faster, f"{estimate.density:.3g}")
    return table
