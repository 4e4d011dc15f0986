"""A plan for a reader: tables of at most 100 columns, and its verdict as Markdown. Within plans/ only this module loads
rich."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sparsekv.plans.brief import length_header, length_rows, percent
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.patterns import Budget, Pattern
from sparsekv.plans.phases import (
    AnyBucket,
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    Eviction,
    PrefillBucket,
    PrefillPlan,
    reach,
)
from sparsekv.plans.quality import LENGTH_ROWS, Quality, cell_rows, length_score_rows, quality_sentence
from sparsekv.plans.schema import Cost, Plan, Target, unsupported
from sparsekv.plans.types import Part, format_ids, format_length

_PICTURE = """\
oldest  SSSS..C....CC........C...C.....C..RRRRRRRR  newest     what the layers of a segment attend to:
        S sinks   C chosen by their filter layer among all between   R recent   . skipped in this step"""


@dataclass(frozen=True, slots=True)
class HeadRow:
    """Heads that share a pattern."""

    heads: tuple[int, ...]
    kind: str
    parameters: str


def layer_rows(bucket: PrefillBucket, model: ModelInfo) -> Iterator[tuple[tuple[int, ...], tuple[HeadRow, ...]]]:
    """Neighbouring layers whose heads compute the same, and the rows of these."""
    rows = [(layer, _head_rows(bucket, layer, model)) for layer in range(model.layers)]
    for same, members in groupby(rows, key=lambda row: row[1]):
        yield tuple(layer for layer, _ in members), same


def _head_rows(bucket: PrefillBucket, layer: int, model: ModelInfo) -> tuple[HeadRow, ...]:
    alike: dict[Pattern, list[int]] = {}
    for head, pattern in enumerate(bucket.patterns(layer, model.group_of(layer).heads)):
        alike.setdefault(pattern, []).append(head)
    return tuple(HeadRow(tuple(heads), one.pattern, parameters([one])) for one, heads in alike.items())


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
    if low == high:
        return low
    return f"{low.removesuffix(' tokens') if high.endswith(' tokens') or low == '0 tokens' else low} to {high}"


def _size(value: Any) -> tuple[int, Any]:
    if isinstance(value, Budget):
        return (1, value.tokens) if value.tokens else (0, value.fraction or 0.0)  # no tokens are no share either
    return (2, value)


def text_of(value: Any) -> str:
    """A parameter as people read it: fractions in percent."""
    if isinstance(value, Budget):
        most = f", at most {value.at_most}" if isinstance(value, DecodeBudget) and value.at_most is not None else ""
        return f"{value.tokens} tokens" if value.tokens is not None else f"{100 * (value.fraction or 0):.4g}%{most}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def titled(lengths: Sequence[AnyBucket]) -> Iterator[tuple[str, AnyBucket]]:
    for before, bucket in zip((None, *lengths), lengths, strict=False):
        yield reach((before and before.up_to) or 0, bucket.up_to), bucket


def describe(plan: Plan, full: bool = False) -> list[RenderableType]:
    """The model and what its layers compute, one thing after the other: at the longest planned lengths in a few lines,
    or with `full` every head at every length, the measured quality and the predicted cost."""
    parts: list[RenderableType] = [_facts(plan, full)]
    parts += [Text(f"\nindexers, F chooses and S reuses: {plan.index_sharing.pattern}")] if plan.index_sharing else []
    if full:
        parts += () if plan.index_sharing else _phases(plan)
        parts += [_cache(plan.kv_cache)] if plan.kv_cache else []
        told = quality_sentence(plan.quality, plan.status) if plan.quality else "Quality: not measured"
        parts += [Text(f"\n{told}"), *(quality_tables(plan.quality) if plan.quality else ())]
        parts += [_cost(plan.cost)] if plan.cost else []
    else:
        lines = (*_longest_prefill(plan), *_longest_decode(plan), *_rules(plan))
        parts += [Text("\n".join(("", *lines)))] if lines else []
    if refused := unsupported(plan):
        parts.append(Text("\n  ".join(("\nThis version cannot run this plan:", *refused))))
    return parts


def _phases(plan: Plan) -> Iterator[RenderableType]:
    yield from _prefill(plan.prefill, plan.model) if plan.prefill else [Text("\nPrefill: dense at every length")]
    over = "over what layers keep" if plan.evicting else "at every length"
    yield from _decode(plan.decode, plan.model) if plan.decode else [Text(f"\nDecode: dense {over}")]


def _longest_prefill(plan: Plan) -> Iterator[str]:
    """The patterns of all heads at the longest planned length that is sparse, a line a family."""
    sparse = [row for row in titled(plan.prefill.lengths) if row[1].heads] if plan.prefill else []
    if not sparse:
        return
    reached, bucket = next((row for row in reversed(sparse) if not row[1].extrapolated), sparse[-1])
    families: dict[str, list[Pattern]] = {}
    for layer in plan.model.full_layers:
        for pattern in bucket.patterns(layer, plan.model.group_of(layer).heads):
            families.setdefault(pattern.pattern, []).append(pattern)
    yield f"prefill at {_in_tokens(reached)}:"
    for name, patterns in families.items():
        yield f"  {len(patterns)} x {name} {parameters(patterns)}".rstrip()


def _longest_decode(plan: Plan) -> Iterator[str]:
    """The segments at the longest sparse length: layers and tokens by filter layer."""
    sparse = [one for one in titled(plan.decode.lengths) if one[1].segments] if plan.decode else []
    if not sparse or plan.decode is None:
        return
    reached, bucket = sparse[-1]
    segments = bucket.segments
    filters, layers = (format_ids(ids) for ids in (plan.decode.filter_layers, plan.decode.sparse_layers))
    budget = span([Budget(tokens=one.budget.tokens, fraction=one.budget.fraction) for one in segments])
    ends = f"the first {span([one.sink for one in segments])} and last {span([one.recent for one in segments])}"
    budget += " of the tokens" if budget.endswith("%") else ""
    yield f"decode at {_in_tokens(reached)}: layers {layers} read {budget}, chosen by {filters}, and {ends}"
    if plan.decode.offload:
        yield f"  layers {format_ids(plan.decode.offload.layers)} may have their keys and values in host memory"


def _in_tokens(reached: str) -> str:
    return f"{reached} tokens" if reached[-1].isdigit() else reached


def _rules(plan: Plan) -> Iterator[str]:
    """The layers that evict tokens, and how many tokens of a prompt they keep."""
    rules = [rule for rule in plan.kv_cache or () if rule.is_lossy]
    if rules:
        layers = format_ids(layer for rule in rules for layer in rule.layers)
        ends = span([(rule.sink or 0) + (rule.recent or 0) for rule in rules])
        yield f"KV cache eviction: layers {layers} keep {span([rule.keep for rule in rules])} and {ends} at the ends"


def _table(title: str, names: str, rows: Iterable[Sequence[str]], numbers: str = "") -> Table:
    """Names are separated by two blanks; columns in `numbers` are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names.split("  "):
        table.add_column(name, justify="right" if name in numbers.split("  ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: a task or device may be called anything
    return table


def _named(part: Part, *names: str) -> list[str]:
    values = [(name.replace("_", " "), getattr(part, name)) for name in names]
    return [f"{name} {text_of(value)}" for name, value in values if value is not None]


def _facts(plan: Plan, full: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in header(plan, full):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def header(plan: Plan, full: bool = True) -> list[tuple[str, str]]:
    """Names and values that identify a plan; a value without a name goes on from the one before it. Without `full` two
    kinds of layers and one target at most, and not the versions that made it."""
    model = plan.model
    kinds, targets = (model.attention, plan.targets) if full else (model.attention[:2], plan.targets[:1])
    rows = [
        ("Model", model.id + (f" @ {model.revision}" if model.revision else "")),
        ("Architecture", f"{model.model_type}, {model.layers} layers, context {format_length(model.context_length)}"),
        *(("", _shape(group)) for group in kinds),
        *(("Target", target_text(target)) for target in targets),
    ]
    if not full:
        return rows
    made = [f"{name} {version}" for name, version in plan.provenance.versions.items()]
    made += _named(plan.provenance, "preset", "seed", "source")
    mix = ", ".join(f"{count} x {task}" for task, count in plan.provenance.mix.items())
    rows += [("Made with", ", ".join(made))] if made else []
    return rows + ([("Calibration", f"at each length at most {mix}")] if mix else [])


def target_text(target: Target) -> str:
    """A device, and the program that ran the model there, in a line."""
    chunks = "" if target.chunk is None else f", chunks of {format_length(target.chunk)}"
    stored = "" if target.kv_dtype is None else f", keys and values in {target.kv_dtype}"
    return f"{target.count} x {target.device}, {target.host}, {target.backend}, {target.dtype}{stored}{chunks}"


def _shape(group: AttentionGroup) -> str:
    window = f", window {group.window}" if group.window else ""
    shape = f"{group.heads} heads, {group.kv_heads} key-value heads of {group.head_dim}"
    return f"layers {format_ids(group.layers)}: {group.kind}{window}, {shape}"


def _prefill(prefill: PrefillPlan, model: ModelInfo) -> Iterator[RenderableType]:
    yield Text(f"\nPrefill, tiles of {prefill.tile.query} x {prefill.tile.key}; lengths are past + chunk", style="bold")
    for reached, bucket in titled(prefill.lengths):
        title = reached + (", extrapolated" if bucket.extrapolated else "")
        if bucket.heads:
            rows = (
                (format_ids(layers) if row is group[0] else "", format_ids(row.heads), row.kind, row.parameters)
                for layers, group in layer_rows(bucket, model)
                for row in group
            )
            yield _table(title, "Layers  Heads  Pattern  Parameters", rows)
        else:
            yield Text(f"{title}: dense" if bucket.dense else f"{title}: as up to {bucket.same_as:,}")


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
        yield Text(f"offloaded to host memory: layers {layers}, hot set of {hot} on the device")


def _segments(title: str, bucket: DecodeBucket, model: ModelInfo) -> Table:
    rows: list[Sequence[str]] = []
    for part in bucket.segments:
        always = (str(part.sink), str(part.recent))
        heads = part.heads if isinstance(part.heads, str) else "mapped"
        scored = (part.selector, str(part.window), heads, part.scope)
        rows.append((str(part.filter), format_ids(part.layers), text_of(part.budget), *always, *scored))
    rows.append(("", format_ids(set(range(model.layers)) - bucket.sparse_layers), "everything"))
    names = "Filter  Layers  Budget  Sink  Recent  Selector  Window  Heads  Scope"
    return _table(title, names, rows, "Filter  Sink  Recent")


def _cache(rules: Sequence[Eviction]) -> Table:
    lossy = ("sink", "recent", "generated", "score", "observe", "heads")
    told = [tuple("" if (own := getattr(one, name)) is None else str(own) for name in lossy) for one in rules]
    rows = [(format_ids(one.layers), text_of(one.keep), *own) for one, own in zip(rules, told, strict=True)]
    return _table("\nKV cache eviction", "Layers  Keep  Sink  Recent  Generated  Score  Observe  Heads", rows)


def quality_tables(quality: Quality) -> Iterator[RenderableType]:
    if quality.cells:
        (_, *lengths), *rows = cell_rows(quality)
        names = "  ".join(("Task", *lengths))
        yield _table("\nRight answers, dense -> plan", names, rows)
    if quality.lengths:
        names = "  ".join(name.capitalize() for name in LENGTH_ROWS)
        rows = list(length_score_rows(quality))
        yield _table("\nDivergence from dense, nats, and agreement over 64 tokens", names, rows, names)


def _milliseconds(microseconds: float) -> str:
    """Returns a predicted time to about three digits."""
    milliseconds = microseconds / 1000
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _cost(cost: Cost) -> Table:
    rows = [
        (
            format_length(entry.length),
            "decode step" if phase == "decode" else phase,
            _milliseconds(estimate.dense_us),
            _milliseconds(estimate.sparse_us),
            f"{estimate.gain:.2f}x" if estimate.sparse_us else "",
            percent(estimate.density),
        )
        for entry in cost.lengths
        for phase, estimate in (("prefill", entry.prefill), ("decode", entry.decode))
        if estimate is not None
    ]
    title = f"\nPredicted time of attention alone on {cost.device}, {cost.backend}"
    names = "Length  Phase  Dense  Sparse  Speedup  Computed"
    return _table(title, names, rows, names.replace("  Phase", ""))


# Markup, HTML, formulas, mentions and addresses anywhere; lists, headings and rules at the start of a line.
_MARKUP = re.compile(r"[&<>`*_~$|\\[\]]|[#@](?=\w)|:(?=//)|(?<=www)\.|^[-+=#]|^\d(?=\d*[.)](?:\s|$))", re.IGNORECASE)
_LINKED = "#@"  # issues and people, by GitHub also where they are entities: what follows is kept apart
# Turns text around, or does not show.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def cell(text: str) -> str:
    """A text in one line of Markdown that shows as it is, wherever it stands."""
    seen = _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], " ".join(text.split()))
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};{'&#8203;' * (found[0] in _LINKED)}", seen)


def table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[bool] = ()) -> str:
    """A table of texts, whose rows may end early; `numbers` says which columns are aligned to the right."""
    sides = numbers or [False] * len(names)
    head = (list(map(cell, names)), ["--:" if right else "---" for right in sides])
    body = ([*map(cell, row), *[""] * (len(names) - len(row))] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *body))


def verdict_markdown(plan: Plan, lines: Iterable[str]) -> str:
    """The table of lengths, and lines below it, as Markdown."""
    listed = "\n".join(f"- {cell(line)}" for line in lines)
    header = length_header(plan)
    return f"{table(header, length_rows(plan), [True] * len(header))}\n\n{listed}"
