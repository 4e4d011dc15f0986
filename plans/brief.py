"""A plan in a few lines: the share of attention that each length computes, its gain and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.plans.schema import HURT_BY_EVICTION, LengthMeasurement, Measurement, Plan
from sparsekv.plans.types import and_listed, format_length

LENGTH_HEADER = ("length", "prefill computes", "gains", "decode computes", "gains", "loses, nats")
_MOST = 5  # lengths of a table
_PERPLEXITY = "perplexity"  # a task without right answers


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """Attention of one phase at one length: computed share, and predicted speed-up; None where not known."""

    computed: float | None = 1.0
    gain: float | None = None

    @property
    def cells(self) -> tuple[str, str]:
        """The two as a table shows them."""
        return percent(self.computed), "" if self.gain is None else f"{self.gain:.2f}x"


def percent(share: float | None) -> str:
    """A share with two digits or more; empty for None."""
    return "sparse" if share is None else f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def prefill_share(plan: Plan, length: int) -> PhaseShare:
    """The share of the causal tiles that a prompt of a length computes, over all heads."""
    if plan.prefill is None or plan.prefill.bucket(length).dense:
        return PhaseShare()
    entry = next((one.prefill for one in plan.cost.lengths if one.length == length), None) if plan.cost else None
    measured = _at(plan.quality.prefill if plan.quality else None, length)
    if entry is None:
        return PhaseShare(measured.density if measured else None)
    return PhaseShare(entry.density, entry.dense_us / max(entry.sparse_us, 1e-9))


def decode_share(plan: Plan, length: int) -> PhaseShare:
    """The share of the cached tokens that a step reads, over layers of full attention."""
    rules, layers = plan.retained, plan.model.full_layers
    bucket = plan.decode.bucket(length) if plan.decode else None
    if not rules and (bucket is None or bucket.dense):
        return PhaseShare()
    segments = {layer: one for one in (bucket.segments if bucket else ()) for layer in one.layers}
    read = [rules[layer].kept_tokens(length) for layer in layers if layer in rules]
    read += [segments[layer].read_tokens(layer, length) for layer in layers if layer in segments]
    read += [length] * (len(layers) - len(read))
    entry = next((one.decode for one in plan.cost.lengths if one.length == length), None) if plan.cost else None
    gain = None if entry is None or rules else entry.dense_us / max(entry.sparse_us, 1e-9)
    return PhaseShare(sum(read) / (len(layers) * length), gain)


def length_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of LENGTH_HEADER, a row a length, ascending. Dense lengths below the first sparse one share a row."""
    lengths = _lengths(plan)
    shares = {length: (prefill_share(plan, length), decode_share(plan, length)) for length in lengths}
    sparse = [length for length in lengths if shares[length] != (PhaseShare(), PhaseShare())]
    dense = [length for length in lengths if not sparse or length < sparse[0]]
    rows = [(f"to {format_length(dense[-1])}", *_cells(shares[dense[-1]]), "")] if dense else []
    shown = [length for length in lengths if length not in dense][-_MOST + len(rows) :]
    return rows + [(format_length(length), *_cells(shares[length]), _loss(plan, length)) for length in shown]


def _lengths(plan: Plan) -> list[int]:
    """Lengths at which a bucket ends or whose cost is known; the model's context for a sparse bucket beyond all."""
    found = {bucket.up_to for bucket in plan.buckets if bucket.up_to is not None}
    found |= {entry.length for entry in plan.cost.lengths} if plan.cost else set()
    longest = max(found, default=0)
    phases: tuple[PrefillPlan | DecodePlan | None, ...] = (plan.prefill, plan.decode)
    for *before, last in (phase.lengths for phase in phases if phase):
        is_sparse = not last.dense and getattr(last, "same_as", None) is None
        if last.up_to is None and is_sparse and ((before[-1].up_to or 0) if before else 0) >= longest:
            found.add(plan.model.context_length)
    return sorted(found or {plan.model.context_length})


def _cells(shares: Sequence[PhaseShare]) -> tuple[str, ...]:
    return tuple(cell for share in shares for cell in share.cells)


def _at(measured: Measurement | None, length: int) -> LengthMeasurement | None:
    return next((one for one in measured.by_length if one.length == length), None) if measured else None


def _loss(plan: Plan, length: int) -> str:
    """Mean divergence beyond rounding of both phases together, or of the only one that was measured."""
    phases = plan.quality.phases if plan.quality else {}
    measured = phases.get("both") or next(iter(phases.values()), None)
    found = _at(measured, length)
    return "" if found is None else f"{max(0.0, found.agreement.kl - (found.floor or 0.0)):.4f}"


def brief(plan: Plan) -> Iterator[str]:
    """Sentences below the table of lengths: who chooses tokens, what is evicted, and right answers."""
    if plan.decode and (filters := sorted(plan.decode.filter_layers)):
        readers, noun = len(plan.decode.sparse_layers), "layer" if len(filters) == 1 else "layers"
        verb = "chooses" if len(filters) == 1 else "choose"
        yield f"{readers} layers read what filter {noun} {and_listed(filters)} {verb}"
    if plan.retained:
        yield f"KV cache eviction, lossy: {kept_share(plan)}"
        yield from eviction_losses(plan)
    elif answers := right_answers(plan):
        yield answers


def kept_share(plan: Plan) -> str:
    """The share of the KV cache that layers keep at the longest planned length, in words."""
    longest = max(plan.planned_lengths, default=plan.model.context_length)
    return f"{percent(decode_share(plan, longest).computed)} of the cache at {format_length(longest)}"


def right_answers(plan: Plan) -> str:
    """Right answers over all tasks and lengths, dense beside the plan; empty where none were measured."""
    phases = plan.quality.phases if plan.quality else {}
    measured = phases.get("both") or next(iter(phases.values()), None)
    scores = [score for task, score in measured.tasks.items() if task != _PERPLEXITY] if measured else []
    count = sum(score.samples for score in scores)
    if not count:
        return ""
    dense = sum(score.dense * score.samples for score in scores) / count
    sparse = sum(score.sparse * score.samples for score in scores) / count
    return f"right answers: dense {dense:.1%}, plan {sparse:.1%} of {count} prompts"


def eviction_losses(plan: Plan) -> tuple[str, ...]:
    """Right answers to the tasks that eviction hurts most, in a line; none where they were not measured."""
    measured = plan.quality and (plan.quality.both or plan.quality.decode)
    scores = [(task, measured.tasks.get(task)) for task in HURT_BY_EVICTION] if measured and plan.retained else []
    told = [f"{task} {score.dense:.0%} -> {score.sparse:.0%} (of {score.samples})" for task, score in scores if score]
    return (f"where eviction hurts: right answers, dense -> plan: {', '.join(told)}",) if told else ()
