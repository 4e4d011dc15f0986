"""Says what the page shows, as rows: from a plan, and from the profile where it is at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sparsekv.bench.report.sketch import Sketch, sketch_of
from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import Dense, Pattern, TileShape
from sparsekv.plans.phases import DecodeBucket, DecodePlan, PrefillBucket
from sparsekv.plans.quality import LENGTH_ROWS, Quality, cell_rows, length_score_rows
from sparsekv.plans.schema import Plan
from sparsekv.plans.show import layer_rows, text_of, titled
from sparsekv.plans.types import format_ids, format_length

if TYPE_CHECKING:
    from sparsekv.bench.suite import SuiteTable
    from sparsekv.planner.profile.profile_data import LengthProfile, Profile, Reuse


@dataclass(frozen=True, slots=True)
class HeadFact:
    """One head in one range of lengths.

    `density` and `damage` (nats a token of the answer) as in the profile, or None where it does not tell; `sketch` is
    the number of its drawing in `PatternMap.sketches`.
    """

    layer: int
    head: int
    pattern: str
    parameters: str
    density: float | None
    damage: float | None
    sketch: int


@dataclass(frozen=True, slots=True)
class PatternMap:
    """All heads in one range of lengths, looked at for a prompt of `length` tokens.

    Attributes:
        measured: densities and damages are of the profile; else densities are the most that the budgets allow.
    """

    title: str
    length: int
    measured: bool
    heads: tuple[HeadFact, ...]
    sketches: tuple[Sketch, ...]

    @property
    def summary(self) -> str:
        """Returns how many heads have each pattern, and the mean density."""
        counts = Counter(head.pattern for head in self.heads)
        kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        densities = [head.density for head in self.heads if head.density is not None]
        return f"{len(self.heads):,} heads: {kinds}" + (f"; {self._density(fmean(densities))}" if densities else "")

    def _density(self, mean: float) -> str:
        if self.measured:
            return f"predicted density {mean:.3g} at {self.length:,} tokens"
        return f"density at most {mean:.3g} at {self.length:,} tokens, as far as the budgets allow"


def pattern_maps(plan: Plan, profile: Profile | None) -> tuple[tuple[PatternMap, ...], tuple[str, ...]]:
    """A map for each range of lengths with patterns of its own, and a line for each other one."""
    maps, lines, after = [], [], 0
    for title, bucket in titled(plan.prefill.lengths) if plan.prefill else ():
        assert isinstance(bucket, PrefillBucket)
        if bucket.dense:
            lines.append(f"{title}: dense")
        elif bucket.same_as is not None:
            lines.append(f"{title}: as up to {bucket.same_as:,}")
        else:
            name = title + (", extrapolated" if bucket.extrapolated else "")
            maps.append(_map_of(plan, bucket, name, after, profile))
        after = bucket.up_to or after
    return tuple(maps), tuple(lines) or (() if maps else ("every length: dense",))


def _map_of(plan: Plan, bucket: PrefillBucket, title: str, after: int, profile: Profile | None) -> PatternMap:
    entry = _profiled(profile, after, bucket.up_to)
    length = entry.length if entry else _example(plan, after, bucket.up_to)
    scores = _Scores(entry, length)
    tile = plan.prefill.tile if plan.prefill else TileShape()
    sketches: dict[Sketch, int] = {}
    heads = []
    for layers, rows in layer_rows(bucket, plan.model):
        for layer in layers:
            shape = plan.model.group_of(layer)
            patterns = bucket.patterns(layer, shape.heads)
            for row in rows:
                kind = shape.kind if row.kind == "dense" and shape.kind != "full" else row.kind
                for head in row.heads:
                    of_head = scores.of(layer, head, patterns[head], shape)
                    drawn = sketch_of(patterns[head], shape, length, tile)
                    number = sketches.setdefault(drawn, len(sketches))
                    heads.append(HeadFact(layer, head, kind, row.parameters, *of_head, number))
    heads.sort(key=lambda fact: (fact.layer, fact.head))
    return PatternMap(title, length, entry is not None, tuple(heads), tuple(sketches))


def _profiled(profile: Profile | None, after: int, up_to: int | None) -> LengthProfile | None:
    """The longest profiled length of a range that has scores."""
    entries = [entry for entry in profile.lengths if entry.layers] if profile else []
    inside = [entry for entry in entries if after < entry.length and (up_to is None or entry.length <= up_to)]
    return inside[-1] if inside else None


def _example(plan: Plan, after: int, up_to: int | None) -> int:
    """A length of the range above `after`: its longest, as far as the model reaches."""
    most = max(plan.model.context_length, after + 1)
    return most if up_to is None else min(up_to, most)


class _Scores:
    """Density and damage of heads: the one reader of a profiled length's tables; without one, the budgets' bound."""

    def __init__(self, entry: LengthProfile | None, length: int) -> None:
        self._length = length
        self._measured = entry.length if entry else None  # the length, if any
        self._number = {pattern: number for number, pattern in enumerate(entry.patterns)} if entry else {}
        self._layers = {scores.layer: scores for scores in entry.layers} if entry else {}

    def of(self, layer: int, head: int, pattern: Pattern, shape: AttentionGroup) -> tuple[float | None, float | None]:
        """Density and damage; None where they are not known."""
        if isinstance(pattern, Dense) or self._measured is None:
            return _density(pattern, shape, self._length), None if self._measured is None else 0.0
        scores, number = self._layers.get(layer), self._number.get(pattern.in_tokens(self._measured))
        if scores is None or number is None:
            return None, None
        rows = (row for row, patterns in enumerate(scores.patterns) if patterns[head] == number)
        row = next(rows, None)
        if row is None:
            return None, None
        return scores.tiles[row][head] + scores.columns[row][head], scores.damage[row][head]


def _density(pattern: Pattern, shape: AttentionGroup, length: int) -> float | None:
    """The most of a causal triangle of `length` tokens a side that a head may compute; None for linear attention."""
    if shape.kind == "linear":
        return None
    row_tokens = pattern.tile_tokens(length) + pattern.most_columns(length)
    share = min(row_tokens, shape.window or length, length) / length
    return share * (2 - share)


@dataclass(frozen=True, slots=True)
class Similarity:
    """One cell: the share of layer `layer`'s attention mass on what layer `filter` chooses."""

    layer: int
    filter: int
    mass: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A cell of the similarity matrix that the plan uses: a layer and the filter layer that chooses for it."""

    layer: int
    filter: int
    role: str


@dataclass(frozen=True, slots=True)
class SimilarityMatrix:
    """Says how well each layer's choice of tokens serves each later layer, at the longest profiled length."""

    title: str
    cells: tuple[Similarity, ...]
    marks: tuple[Mark, ...]


def similarity(plan: Plan, profile: Profile | None) -> SimilarityMatrix | None:
    """The matrix of the budget nearest to that of the plan; None without decode statistics."""
    entry = profile.lengths[-1] if profile else None
    if entry is None or entry.reuse is None:
        return None
    bucket = next((b for b in reversed(plan.decode.lengths) if b.segments), None) if plan.decode else None
    budget = _nearest(entry.reuse, bucket, entry.length)
    title = f"{entry.length:,} tokens, {text_of(entry.reuse.budgets[budget])} chosen"
    table = entry.reuse.kept[budget]
    cells = tuple(Similarity(layer, at, mass) for layer, row in enumerate(table) for at, mass in enumerate(row))
    return SimilarityMatrix(title, cells, tuple(_marks(bucket)) if bucket else ())


def _nearest(reuse: Reuse, bucket: DecodeBucket | None, length: int) -> int:
    if bucket is None:
        return len(reuse.budgets) - 1
    wanted = bucket.segments[0].budget.resolve(length)
    return min(range(len(reuse.budgets)), key=lambda at: abs(reuse.budgets[at].resolve(length) - wanted))


def _marks(bucket: DecodeBucket) -> Iterator[Mark]:
    for segment in bucket.segments:
        yield Mark(segment.filter, segment.filter, "filter layer")
        yield from (Mark(layer, segment.filter, "its segment") for layer in segment.layers)


@dataclass(frozen=True, slots=True)
class LayerReads:
    """Holds what a layer reads in a decode step, at the longest length of a range."""

    layer: int
    lengths: str
    role: str
    tokens: int
    share: float


def layer_reads(plan: Plan) -> tuple[LayerReads, ...]:
    """Every layer in every range of decode lengths; none without a sparse one."""
    if plan.decode is None or not plan.decode.sparse_layers:
        return ()
    return tuple(fact for title, length, bucket in _decode_ranges(plan) for fact in _reads(plan, title, length, bucket))


def _decode_ranges(plan: Plan) -> Iterator[tuple[str, int, DecodeBucket]]:
    assert isinstance(plan.decode, DecodePlan)
    after = 0
    for title, bucket in titled(plan.decode.lengths):
        assert isinstance(bucket, DecodeBucket)
        yield title, _example(plan, after, bucket.up_to), bucket
        after = bucket.up_to or after


def _reads(plan: Plan, title: str, length: int, bucket: DecodeBucket) -> Iterator[LayerReads]:
    segments = {layer: segment for segment in bucket.segments for layer in segment.layers}
    filters = {segment.filter: segment for segment in bucket.segments}
    for layer in range(plan.model.layers):
        shape, segment = plan.model.group_of(layer), segments.get(layer)
        role: str = "dense" if shape.kind == "full" else shape.kind
        tokens = 0 if shape.kind == "linear" else min(shape.window or length, length)
        if segment is not None:
            role = f"reads the choice of layer {segment.filter}"
            tokens = segment.read_tokens(layer, length)
            if layer == segment.filter:
                role = f"chooses for {format_ids(segment.layers)}, itself included; all keys count half"
        elif layer in filters:
            role = f"filter layer of {format_ids(filters[layer].layers)}"
        yield LayerReads(layer, title, role, tokens, tokens / length)


def budget_table(plan: Plan) -> list[list[str]]:
    """A header and a row a segment: its filter, its layers, and its budget in each range of decode lengths."""
    ranges = [(title, bucket) for title, _, bucket in _decode_ranges(plan) if bucket.segments] if plan.decode else []
    if not ranges:
        return []
    rows = [["Filter layer", "Layers", "Selector", "Heads", "Sink", "Recent", *(f"Budget, {t}" for t, _ in ranges)]]
    for number, segment in enumerate(ranges[0][1].segments):
        heads = segment.heads if isinstance(segment.heads, str) else "mapped"
        selector = segment.selector + (f" {segment.window}" if segment.window > 1 else "")
        budgets = [text_of(bucket.segments[number].budget) for _, bucket in ranges]
        ids = (str(segment.filter), format_ids(segment.layers))
        rows.append([*ids, selector, heads, str(segment.sink), str(segment.recent), *budgets])
    return rows


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Predicted attention time of the whole model at one length."""

    length: int
    mode: str
    ms: float
    density: float
    speedup: float | None


def phase_times(plan: Plan, phase: str) -> tuple[PhaseTime, ...]:
    """Dense and sparse time of a whole prefill, or of one decode step, at every predicted length."""
    rows = []
    for entry in plan.cost.lengths if plan.cost else ():
        estimate = getattr(entry, phase)
        if estimate is None:
            continue
        faster = estimate.gain if estimate.sparse_us else None
        rows.append(PhaseTime(entry.length, "dense", estimate.dense_us / 1000, 1.0, None))
        rows.append(PhaseTime(entry.length, "sparse", estimate.sparse_us / 1000, estimate.density, faster))
    return tuple(rows)


def density_table(plan: Plan) -> list[list[str]]:
    """A header and a row for each phase and length: the density that was asked for, predicted, measured."""
    rows = [row for phase in ("prefill", "decode") for row in _density_rows(plan, phase)]
    return [["Phase", "Tokens", "Asked", "Predicted", "Measured"], *rows] if rows else []


def _density_rows(plan: Plan, phase: str) -> Iterator[list[str]]:
    estimates = {entry.length: getattr(entry, phase) for entry in plan.cost.lengths} if plan.cost else {}
    predicted = {length: estimate.density for length, estimate in estimates.items() if estimate}
    measured = _measured_densities(plan, phase)
    asked = _asked(plan) if phase == "prefill" else {}
    for length in sorted({*predicted, *measured}):
        found = (f"{of[length]:.3g}" if length in of else "-" for of in (predicted, measured))
        yield [phase, format_length(length), asked.get(length, "-"), *found]


def _measured_densities(plan: Plan, phase: str) -> dict[int, float]:
    """By length, of both phases together."""
    scores = plan.quality.lengths if plan.quality else ()
    return {one.length: one.density if phase == "prefill" else one.read for one in scores}


def _asked(plan: Plan) -> dict[int, str]:
    """The target density at each profiled length."""
    lengths = [entry.length for entry in plan.cost.lengths] if plan.cost else []
    settings = plan.provenance.settings
    targets = settings.get("target_density")
    if not isinstance(targets, list) or len(targets) != len(lengths):
        return {}
    return {length: f"{target:.3g}" for length, target in zip(lengths, targets, strict=True)}


def time_table(rows: Sequence[PhaseTime]) -> list[list[str]]:
    """A header and a row a length, of what `phase_times` says."""
    cells = [
        [format_length(dense.length), f"{dense.ms:,.4g} ms", f"{sparse.ms:,.4g} ms", _gain(sparse)]
        for dense, sparse in zip(rows[::2], rows[1::2], strict=True)
    ]
    return [["Tokens", "Dense", "Sparse", "Speedup"], *cells]


def _gain(sparse: PhaseTime) -> str:
    return "" if sparse.speedup is None else f"{sparse.speedup:.2f}x"


@dataclass(frozen=True, slots=True)
class CurveRow:
    """A method at one share."""

    method: str
    length: int
    share: float
    kl: float


@dataclass(frozen=True, slots=True)
class SuiteScore:
    """A method's mean score over all tasks at one length, in percent."""

    method: str
    length: int
    recall: float
    exact: float


def suite_scores(table: SuiteTable) -> list[SuiteScore]:
    """Dense and each method at each length."""
    return [
        SuiteScore(method, n, *(100.0 * table.paired(method, name, lengths=(n,)).own for name in ("recall", "exact")))
        for method in ("dense", *table.methods)
        for n in table.lengths
    ]


def suite_table(table: SuiteTable, method: str) -> list[list[str]]:
    """A header and a row for each task and length, the task that loses most first."""
    rows = [["Task", "Tokens", "Dense", method.capitalize(), "Difference, points", "95% interval"]]
    for task in table.worst_first(method):
        for length in table.lengths:
            pair = table.paired(method, "recall", (task,), (length,))
            scores = (f"{100.0 * score:.1f}" for score in (pair.dense, pair.own))
            interval = " to ".join(f"{100.0 * bound:+.1f}" for bound in pair.interval)
            rows.append([task, format_length(length), *scores, f"{100.0 * pair.difference:+.1f}", interval])
    return rows


@dataclass(frozen=True, slots=True)
class LengthQuality:
    """Divergence from dense at one length, in nats, with its 95% upper bound."""

    phase: str
    length: int
    kl: float
    low: float
    high: float


def quality_by_length(quality: Quality, least: float) -> tuple[LengthQuality, ...]:
    """Every length; nothing is below `least`, as on a logarithmic axis."""
    return tuple(
        LengthQuality("both", one.length, *(max(least, value) for value in (one.kl, one.kl, one.floor + one.upper)))
        for one in quality.lengths
    )


def quality_tables(quality: Quality) -> Iterator[tuple[str, list[list[str]]]]:
    """A title, and a header with its rows, of right answers and of divergence."""
    if quality.cells:
        yield "Right answers, dense -> plan", [list(row) for row in cell_rows(quality)]
    if quality.lengths:
        yield "Divergence from dense, nats", [list(LENGTH_ROWS), *map(list, length_score_rows(quality))]


def columnar(kind: type[Any], rows: Sequence[Any]) -> dict[str, Any]:
    """Rows of a dataclass as JSON data that names each field once: `{"fields": [...], "rows": [[...], ...]}`."""
    return {"fields": [field.name for field in fields(kind)], "rows": [_plain(astuple(row)) for row in rows]}


def _plain(values: Sequence[Any]) -> list[Any]:
    return [float(f"{value:.5g}") if isinstance(value, float) else value for value in values]
