"""A plan for a reader: tables readable at 100 columns, and the same condensed as JSON. Only this module loads rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern
from sparsekv.plans.phases import (
    AnyBucket,
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    PrefillBucket,
    PrefillPlan,
    Retention,
    reach,
)
from sparsekv.plans.schema import Agreement, Cost, Measurement, Plan, Quality, Target, to_data, unsupported
from sparsekv.plans.types import Part, format_ids, format_length

_LONG = 6
_PICTURE = """\
oldest  SSSS..C....CC........C...C.....C..RRRRRRRR  newest     what the layers of a segment attend to:
        S sinks   C chosen by their filter layer among all between   R recent   . skipped in this step"""


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Heads that share a pattern, or (where there are many) a kind of pattern with parameters in a range."""

    heads: tuple[int, ...]
    kind: str
    parameters: str


def layer_rows(
    bucket: PrefillBucket, model: ModelInfo, full: bool = False
) -> Iterator[tuple[tuple[int, ...], tuple[HeadRow, ...]]]:
    """Neighbouring layers that compute the same, and what; many patterns are condensed by kind unless `full`."""
    rows = [(layer, _head_rows(bucket, layer, model, full)) for layer in range(model.layers)]
    for same, members in groupby(rows, key=lambda row: row[1]):
        yield tuple(layer for layer, _ in members), same


def _head_rows(bucket: PrefillBucket, layer: int, model: ModelInfo, full: bool) -> tuple[HeadRow, ...]:
    by_pattern: dict[Pattern, list[int]] = {}
    for head, pattern in enumerate(bucket.patterns(layer, model.group_of(layer).heads)):
        by_pattern.setdefault(pattern, []).append(head)
    alike: dict[object, list[Pattern]] = {}
    for pattern in by_pattern:
        alike.setdefault(pattern if full or len(by_pattern) <= _LONG else pattern.pattern, []).append(pattern)
    return tuple(
        HeadRow(tuple(sorted(head for p in same for head in by_pattern[p])), same[0].pattern, parameters(same))
        for same in alike.values()
    )


def parameters(patterns: Sequence[Pattern]) -> str:
    """The parameters of patterns of one kind in a line; ranges where they differ."""
    names = [name for name in type(patterns[0]).model_fields if name != "pattern"]
    return ", ".join(f"{name} {span([getattr(p, name) for p in patterns])}" for name in names)


def span(values: Sequence[Any]) -> str:
    """One value, or the least and the largest of several; of values without an order, how many."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1 and not all(isinstance(value, Budget | int | float) for value in distinct):
        return f"{len(distinct)} different"
    ordered = sorted(distinct, key=_size)
    low, high = text_of(ordered[0]), text_of(ordered[-1])
    return low if low == high else f"{low} to {high}"


def _size(value: Any) -> tuple[int, Any]:
    if isinstance(value, Budget):
        return (0, value.fraction) if value.tokens is None else (1, value.tokens)
    return (2, value)


def text_of(value: Any) -> str:
    """A parameter as people read it: fractions in percent."""
    if isinstance(value, Budget):
        most = f", at most {value.at_most}" if isinstance(value, DecodeBudget) and value.at_most is not None else ""
        return str(value.tokens) if value.tokens is not None else f"{100 * (value.fraction or 0):.4g}%{most}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def titled(lengths: Sequence[AnyBucket]) -> Iterator[tuple[str, AnyBucket]]:
    """The buckets, each with the context lengths that it is for."""
    after = 0
    for bucket in lengths:
        yield reach(after, bucket.up_to), bucket
        after = bucket.up_to or after


def summary(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data, condensed: what `sparsekv show --json` prints."""
    data = to_data(plan)
    copied = ("decode", "kv_cache", "quality", "cost", "provenance", "extensions", "integrity")
    return {
        "model": {"id": plan.model.id, "revision": plan.model.revision, "layers": plan.model.layers},
        "schema_version": plan.schema_version,
        "status": plan.status,
        "targets": data.get("targets", []),
        "tile": to_data(plan.prefill.tile) if plan.prefill else None,
        "prefill": [_prefill_facts(bucket, plan.model) for bucket in plan.prefill.lengths] if plan.prefill else None,
        **{name: data.get(name) for name in copied},
        "unsupported": unsupported(plan),
    }


def _prefill_facts(bucket: PrefillBucket, model: ModelInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {"up_to": bucket.up_to, "dense": bucket.dense, "extrapolated": bucket.extrapolated}
    if bucket.same_as is not None:
        return facts | {"same_as": bucket.same_as}
    kinds: Counter[str] = Counter()
    layers = []
    for layer in range(model.layers):
        rows = _head_rows(bucket, layer, model, full=True)
        for row in rows:
            kinds[row.kind] += len(row.heads)
        heads = {format_ids(row.heads): f"{row.kind} {row.parameters}".strip() for row in rows}
        layers.append({"layer": layer, "heads": heads})
    return facts | {"heads": dict(sorted(kinds.items())), "layers": layers}


def describe(plan: Plan, full: bool = False) -> list[RenderableType]:
    """What `sparsekv show` prints, one thing after the other; `full` lists every head pattern of large layers."""
    parts: list[RenderableType] = [_facts(plan)]
    parts += _prefill(plan.prefill, plan.model, full) if plan.prefill else [Text("\nPrefill: dense at every length")]
    parts += _decode(plan.decode, plan.model) if plan.decode else [Text("\nDecode: dense at every length")]
    if plan.kv_cache:
        parts.append(_cache(plan.kv_cache))
    parts.append(_quality(plan.quality) if plan.quality else Text("\nQuality: not measured"))
    if plan.quality and any(agreement_rows(plan.quality)):
        parts.append(_agreement(plan.quality))
    if plan.cost:
        parts.append(_cost(plan.cost))
    refused = unsupported(plan)
    if refused:
        parts.append(Text("\nThis version cannot run this plan:\n" + "\n".join(f"  {line}" for line in refused)))
    return parts


def verdict(plan: Plan, file: str, reason: str = "") -> tuple[str, ...]:
    """Four lines: what is sparse and what it is predicted to gain, the status with its reason, the next command."""
    command = f"sparsekv run --plan {file}" if plan.status == "verified" else f"sparsekv verify --plan {file} --write"
    measured = (plan.quality.both, plan.quality.prefill, plan.quality.decode) if plan.quality else ()
    found = next((one.agreement for one in measured if one and one.agreement), None)
    if not reason and found:
        reason = f"{found.kl:.2g} nats from dense on {found.samples} held-out samples"
    status = f"status: {plan.status}" + (f", {reason}" if reason else "" if plan.quality else ", never measured")
    return _gains("prefill", plan), _gains("decode", plan), status, f"next: {command}"


def _gains(phase: Literal["prefill", "decode"], plan: Plan) -> str:
    part: PrefillPlan | DecodePlan | None = getattr(plan, phase)
    sparse = [bucket for bucket in part.lengths if not bucket.dense] if part else []
    if not sparse:
        return f"{phase}: dense at every length"
    line = f"{phase}: sparse"
    if isinstance(part, DecodePlan):
        chosen = f"{len(part.sparse_layers)} of {plan.model.layers} layers read what {len(part.filter_layers)} choose"
        line = f"{phase}: {chosen}"
    known = [(entry.length, getattr(entry, phase)) for entry in (plan.cost.lengths if plan.cost else ())]
    known = [(length, found) for length, found in known if found is not None]
    if not known:
        return line
    length, found = known[-1]
    gain = f"attention {found.dense_us / max(found.sparse_us, 1e-9):.2f}x as fast as dense, predicted"
    share = f", {found.density:.3f} of the tiles" if phase == "prefill" else ""
    return f"{line}{share}; {gain} at {format_length(length)}"


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
    for name, value in header(plan):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def header(plan: Plan) -> list[tuple[str, str]]:
    """Which plan it is: names and values; a value without a name goes on from the one before it."""
    model = plan.model
    rows = [
        ("Model", model.id + (f" @ {model.revision}" if model.revision else "")),
        ("Status", plan.status),
        ("Architecture", f"{model.model_type}, {model.layers} layers, context {format_length(model.context_length)}"),
        *(("", line) for line in _shapes(model)),
        *(("Target", _target(target)) for target in plan.targets),
    ]
    made = [f"{name} {version}" for name, version in plan.provenance.versions.items()]
    made += _named(plan.provenance, "preset", "seed", "source")
    if made:
        rows.append(("Made with", ", ".join(made)))
    if plan.provenance.mix:
        mix = ", ".join(f"{count} x {task}" for task, count in plan.provenance.mix.items())
        rows.append(("Calibration", f"at each length at most {mix}"))
    return rows


def _target(target: Target) -> str:
    chunks = "" if target.chunk is None else f", chunks of {format_length(target.chunk)}"
    return f"{target.count} x {target.device}, {target.host}, {target.backend}, {target.dtype}{chunks}"


def _shapes(model: ModelInfo) -> Iterator[str]:
    for group in model.attention:
        window = f", window {group.window}" if group.window else ""
        shape = f"{group.heads} heads, {group.kv_heads} key-value heads of {group.head_dim}"
        yield f"layers {format_ids(group.layers)}: {group.kind}{window}, {shape}"


def _prefill(prefill: PrefillPlan, model: ModelInfo, full: bool) -> Iterator[RenderableType]:
    yield Text(f"\nPrefill, tiles of {prefill.tile.query} x {prefill.tile.key}; lengths are past + chunk", style="bold")
    for reached, bucket in titled(prefill.lengths):
        title = reached + (", extrapolated" if bucket.extrapolated else "")
        if bucket.dense:
            yield Text(f"{title}: dense")
        elif bucket.same_as is not None:
            yield Text(f"{title}: as up to {bucket.same_as:,}")
        else:
            yield _patterns(title, bucket, model, full)


def _patterns(title: str, bucket: PrefillBucket, model: ModelInfo, full: bool) -> Table:
    table = _table(title, "Layers", "Heads", "Pattern", "Parameters")
    for layers, rows in layer_rows(bucket, model, full):
        for number, row in enumerate(rows):
            name = "" if number else format_ids(layers)
            _row(table, name, format_ids(row.heads), row.kind, row.parameters)
    return table


def _decode(decode: DecodePlan, model: ModelInfo) -> Iterator[RenderableType]:
    yield Text("\nDecode; lengths are cached tokens", style="bold")
    if decode.sparse_layers:
        yield Text(_PICTURE)
    if any(segment.filter_is_sparse for bucket in decode.lengths for segment in bucket.segments):
        yield Text("a filter layer among its own layers scores all keys, and attends to what it chose")
    for title, bucket in titled(decode.lengths):
        yield Text(f"{title}: dense") if bucket.dense else _segments(title, bucket, model)
    if decode.offload:
        layers, hot = format_ids(decode.offload.layers), text_of(decode.offload.hot)
        yield Text(f"offloaded to host memory: layers {layers}, {hot} rows hot on the device")


def _segments(title: str, bucket: DecodeBucket, model: ModelInfo) -> Table:
    numbers = ("Filter", "Sink", "Recent")
    columns = ("Filter", "Layers", "Budget", "Sink", "Recent", "Selector", "Window", "Heads", "Scope")
    table = _table(title, *columns, numbers=numbers)
    for segment in bucket.segments:
        heads = segment.heads if isinstance(segment.heads, str) else "mapped"
        always = (str(segment.sink), str(segment.recent))
        chosen = (*always, segment.selector, str(segment.window), heads, segment.scope)
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
        facts = ", ".join(_named(measured, "density", "output_error", "kl", "chunk"))
        _row(table, phase, facts, "", "", "", "", ", ".join(map(format_length, measured.lengths)))
        for task, score in measured.tasks.items():
            interval = "-" if score.interval is None else "{:+.3g} to {:+.3g}".format(*score.interval)
            scores = (f"{score.dense:.4g}", f"{score.sparse:.4g}", str(score.samples))
            _row(table, "", task, *scores, interval)
    return table


def _agreement(quality: Quality) -> Table:
    """Below the scores, where it was measured."""
    table = _table("\nAgreement with dense, with 95% intervals", *AGREEMENT_HEADER, numbers=("Samples",))
    for row in agreement_rows(quality):
        _row(table, *row)
    return table


AGREEMENT_HEADER = ("Phase", "Over", "Samples", "Divergence, nats", "Top-1 token", "Exact text")


def agreement_rows(quality: Quality) -> Iterator[tuple[str, ...]]:
    """For each phase: over everything, at each of several lengths, and of each task."""
    for phase in ("prefill", "decode", "both"):
        measured: Measurement | None = getattr(quality, phase)
        if measured is None or measured.agreement is None:
            continue
        yield phase, "all", *_agreed(measured.agreement)
        for part in measured.by_length if len(measured.by_length) > 1 else ():
            yield "", format_length(part.length), *_agreed(part.agreement)
        for task, score in measured.tasks.items():
            if score.agreement is not None:
                yield "", task, *_agreed(score.agreement)


def _agreed(found: Agreement) -> tuple[str, ...]:
    kl = f"{found.kl:.3g}" + (" [{:.3g}, {:.3g}]".format(*found.kl_interval) if found.kl_interval else "")
    shares = ((found.top1, found.top1_interval), (found.exact, found.exact_interval))
    return str(found.samples), kl, *(_share(share, interval) for share, interval in shares)


def _share(share: float | None, interval: tuple[float, float] | None) -> str:
    if share is None:
        return "-"
    bounds = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{share:.1%}{bounds}"


def _cost(cost: Cost) -> Table:
    numbers = ("Length", "Dense", "Sparse", "Speedup", "Density")
    title = f"\nPredicted time of attention alone on {cost.device}, {cost.backend}"
    table = _table(title, "Length", "Phase", *numbers[1:], numbers=numbers)
    for entry in cost.lengths:
        for phase, estimate in (("prefill", entry.prefill), ("decode step", entry.decode)):
            if estimate is not None:
                faster = f"{estimate.dense_us / estimate.sparse_us:.2f}x" if estimate.sparse_us else ""
                times = (f"{estimate.dense_us / 1000:,.3f} ms", f"{estimate.sparse_us / 1000:,.3f} ms")
                _row(table, format_length(entry.length), phase, *times, faster, f"{estimate.density:.3g}")
    return table
