"""A plan in a few lines: the share of attention that each length computes, its gain and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.plans.quality import HURT_BY_EVICTION, quality_sentence, right_share
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import and_listed, format_length

LENGTH_HEADER = ("length", "prefill computes", "gains", "decode computes", "gains", "loses, nats")
_MOST = 5  # lengths of a table


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """Attention of one phase at one length: computed share, and predicted speed-up; None where not known. Where that is
    below one, hosts run dense: no gain."""

    computed: float | None = 1.0
    gain: float | None = None

    @property
    def cells(self) -> tuple[str, str]:
        gain = "" if self.gain is None else f"{self.gain:.2f}x" if self.gain >= 1.0 else "none"
        return percent(self.computed), gain


def percent(share: float | None) -> str:
    """A share with two digits or more; empty for None."""
    return "sparse" if share is None else f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def prefill_share(plan: Plan, length: int) -> PhaseShare:
    """The share of the causal tiles that a prompt of a length computes, over all heads."""
    if plan.prefill is None or plan.prefill.bucket(length).dense:
        return PhaseShare()
    entry = next((one.prefill for one in plan.cost.lengths if one.length == length), None) if plan.cost else None
    measured = plan.quality.at(length) if plan.quality else None
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
        is_sparse = not (last.dense or getattr(last, "extrapolated", False) or getattr(last, "same_as", None))
        if last.up_to is None and is_sparse and ((before[-1].up_to or 0) if before else 0) >= longest:
            found.add(plan.model.context_length)
    return sorted(found or {plan.model.context_length})


def _cells(shares: Sequence[PhaseShare]) -> tuple[str, ...]:
    return tuple(cell for share in shares for cell in share.cells)


def _loss(plan: Plan, length: int) -> str:
    """Mean divergence beyond rounding."""
    measured = plan.quality.at(length) if plan.quality else None
    return "" if measured is None else f"{max(0.0, measured.kl - measured.floor):.4f}"


def brief(plan: Plan) -> Iterator[str]:
    """Sentences below the table of lengths: the filter layers, the tokens that are evicted, the device of the gains."""
    if plan.decode and (filters := sorted(plan.decode.filter_layers)):
        readers, noun = len(plan.decode.sparse_layers), "layer" if len(filters) == 1 else "layers"
        verb = "chooses" if len(filters) == 1 else "choose"
        yield f"{readers} layers read what filter {noun} {and_listed(filters)} {verb}"
    if plan.retained:
        yield f"KV cache eviction, lossy: {kept_share(plan)}"
        yield from eviction_losses(plan)
    if plan.cost and any(share.gain is not None for length in plan.planned_lengths for share in _shares(plan, length)):
        yield f"gains are predicted, of attention alone on {plan.cost.device}"


def _shares(plan: Plan, length: int) -> tuple[PhaseShare, PhaseShare]:
    return prefill_share(plan, length), decode_share(plan, length)


def sentence(plan: Plan) -> str:
    """The result of a plan's test: its status, prompts, answers beside dense, and the losses that are excluded."""
    if plan.is_dense:
        return "dense: nothing gained"
    if plan.quality is None:
        return f"{plan.status}: its quality was not measured"
    return quality_sentence(plan.quality, plan.status)


def kept_share(plan: Plan) -> str:
    """The share of the KV cache that layers keep at the longest planned length, in words."""
    longest = max(plan.planned_lengths, default=plan.model.context_length)
    return f"{percent(decode_share(plan, longest).computed)} of the cache at {format_length(longest)}"


def eviction_losses(plan: Plan) -> tuple[str, ...]:
    """Right answers to the tasks that eviction hurts most, in a line; none where they were not measured."""
    judged = plan.quality.judged if plan.quality and plan.retained else ()
    cells = {task: [cell for cell in judged if cell.task == task] for task in HURT_BY_EVICTION}
    told = [
        "{} {:.0%} -> {:.0%} (of {})".format(task, *right_share(some), sum(cell.prompts for cell in some))
        for task, some in cells.items()
        if some
    ]
    return (f"where eviction hurts: right answers, dense -> plan: {', '.join(told)}",) if told else ()
