"""A plan in a few lines: what each length computes, gains and loses; the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.plans.quality import HURT_BY_EVICTION, quality_sentence, right_share
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import and_listed, columns, format_length

WIDTH = 100  # columns of text for people


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
    entry = plan.cost.at(length) if plan.cost else None
    measured = plan.quality.at(length) if plan.quality else None
    if entry is None or entry.prefill is None:
        return PhaseShare(measured.density if measured else None)
    return PhaseShare(entry.prefill.density, entry.prefill.gain)


def decode_share(plan: Plan, length: int) -> PhaseShare:
    """The share of the cached tokens that a step reads, over layers of full attention."""
    rules, layers = plan.evicting, plan.model.full_layers
    bucket = plan.decode.bucket(length) if plan.decode else None
    if not rules and (bucket is None or bucket.dense):
        return PhaseShare()
    segments = {layer: one for one in (bucket.segments if bucket else ()) for layer in one.layers}
    read = [rules[layer].kept_tokens(length) for layer in layers if layer in rules]
    read += [segments[layer].read_tokens(layer, length) for layer in layers if layer in segments]
    read += [length] * (len(layers) - len(read))
    entry = plan.cost.at(length) if plan.cost and not rules else None
    gain = entry.decode.gain if entry and entry.decode else None
    return PhaseShare(sum(read) / (len(layers) * length), gain)


def length_header(plan: Plan) -> tuple[str, ...]:
    """The columns of `length_rows`. Gains that were priced on another device than the plan's name that one."""
    here = {target.device for target in plan.targets}
    gains = f"gains on {plan.cost.device}" if plan.cost and here and plan.cost.device not in here else "gains"
    return "length", "prefill computes", gains, "decode computes", gains, "loses, nats"


def length_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells below `length_header`, a row a length. Dense lengths below the first sparse one share a row."""
    lengths = _lengths(plan)
    shares = {length: (prefill_share(plan, length), decode_share(plan, length)) for length in lengths}
    sparse = [length for length in lengths if plan.reuses or shares[length] != (PhaseShare(), PhaseShare())]
    dense = [length for length in lengths if not sparse or length < sparse[0]]
    rows = [(f"to {format_length(dense[-1])}", *_cells(shares[dense[-1]]), "")] if dense else []
    others = [length for length in lengths if length not in dense]
    return rows + [(format_length(length), *_cells(shares[length]), _loss(plan, length)) for length in others]


def _lengths(plan: Plan) -> list[int]:
    """Lengths at which a bucket ends or whose cost is known; the model's context for a sparse bucket beyond all."""
    lengths = {bucket.up_to for bucket in plan.buckets if bucket.up_to is not None}
    lengths |= {*plan.index_sharing.lengths} if plan.index_sharing else set()
    lengths |= {entry.length for entry in plan.cost.lengths} if plan.cost else set()
    longest = max(lengths, default=0)
    phases: tuple[PrefillPlan | DecodePlan | None, ...] = (plan.prefill, plan.decode)
    for *before, last in (phase.lengths for phase in phases if phase):
        is_sparse = not (last.dense or getattr(last, "extrapolated", False) or getattr(last, "same_as", None))
        if last.up_to is None and is_sparse and ((before[-1].up_to or 0) if before else 0) >= longest:
            lengths.add(plan.model.context_length)
    return sorted(lengths or {plan.model.context_length})


def _cells(shares: Sequence[PhaseShare]) -> tuple[str, ...]:
    return tuple(cell for share in shares for cell in share.cells)


def _loss(plan: Plan, length: int) -> str:
    """Mean divergence beyond rounding."""
    measured = plan.quality.at(length) if plan.quality else None
    return "" if measured is None else f"{max(0.0, measured.kl - measured.floor):.4f}"


def brief(plan: Plan) -> Iterator[str]:
    """Sentences below the table of lengths: the layers that choose, the tokens that are evicted, the device of the
    gains."""
    if plan.index_sharing and plan.reuses:
        choosing, count = plan.index_sharing.choosing, len(plan.index_sharing.reused)
        noun = "indexer of layer" if len(choosing) == 1 else "indexers of layers"
        yield f"{count} of {plan.model.layers} layers attend to what the {noun} {and_listed(choosing)} chose last"
    if plan.decode and (filters := sorted(plan.decode.filter_layers)):
        readers, noun = len(plan.decode.sparse_layers), "layer" if len(filters) == 1 else "layers"
        verb = "chooses" if len(filters) == 1 else "choose"
        yield f"{readers} layers read what filter {noun} {and_listed(filters)} {verb}"
    if plan.evicting:
        longest = max(plan.planned_lengths, default=plan.model.context_length)
        kept = percent(decode_share(plan, longest).computed)
        yield f"KV cache eviction, lossy: {kept} of the cache at {format_length(longest)}"
        yield from eviction_losses(plan)
    shares = (share(plan, length) for length in plan.planned_lengths for share in (prefill_share, decode_share))
    if plan.cost and any(share.gain is not None for share in shares):
        yield f"gains are predicted, of attention alone on {plan.cost.device}"


def sentence(plan: Plan) -> str:
    """The result of a plan's test: its status, prompts, answers beside dense, and the losses that are excluded."""
    if plan.is_dense:
        return "dense: nothing gained"
    if plan.quality is None:
        return f"{plan.status}: its quality was not measured"
    return quality_sentence(plan.quality, plan.status)


def eviction_losses(plan: Plan) -> tuple[str, ...]:
    """Right answers to the tasks that eviction hurts most, in a line; none where they were not measured."""
    judged = plan.quality.judged if plan.quality and plan.evicting else ()
    cells = {task: [cell for cell in judged if cell.task == task] for task in HURT_BY_EVICTION}
    losses = [
        "{} {:.0%} -> {:.0%} (of {})".format(task, *right_share(scores), sum(cell.prompts for cell in scores))
        for task, scores in cells.items()
        if scores
    ]
    return (f"where eviction hurts: right answers, dense -> plan: {', '.join(losses)}",) if losses else ()


# --- verdict ----------------------------------------------------------------------------------------------------------


def verdict(plan: Plan, file: str, *, model: str = "") -> tuple[str, ...]:
    """Lines of text: the status, each length, who chooses or what is evicted, the test in a sentence, and the next
    command.
    """
    header = length_header(plan)
    table = columns([header, *length_rows(plan)], right=range(len(header))).splitlines()
    *lines, tested, following = sentences(plan, file, model)
    return (f"{file}: {plan.status_text}", *table, *lines, *wrap(tested, WIDTH), following)


def sentences(plan: Plan, file: str, model: str = "") -> tuple[str, ...]:
    """The text of `verdict` below its table."""
    return (*brief(plan), sentence(plan), f"next: {next_command(plan, file, model)}")


def next_command(plan: Plan, file: str, model: str = "") -> str:
    """The command to go on with: `run` where the plan is verified, or dense; `plan` where it missed its test, or the
    model answers too few of its tasks; else `verify`."""
    named = f"{shlex.quote(model)} " if model not in ("", plan.model.id) else ""
    place = f"{named}--plan {shlex.quote(file)}"
    if plan.status == "verified" or plan.is_dense:
        return f"sparsekv run {place}"
    if plan.quality and plan.quality.missed:
        return denser_command(plan, file, model)
    if plan.quality and not all(cell.judged for cell in plan.quality.cells):
        return f"{_plan_command(plan, file, model)} --prompts FILE --force"
    return f"sparsekv verify {place} --write"


def denser_command(plan: Plan, file: str, model: str = "") -> str:
    """The command that makes another plan; of one that evicts tokens, one that keeps more of them."""
    retain = plan.provenance.settings.get("retain")
    more = f" --retain {retain + 0.1:.2g}" if isinstance(retain, float) and retain < 0.9 else ""
    return f"{_plan_command(plan, file, model)}{more} --force"


def _plan_command(plan: Plan, file: str, model: str) -> str:
    out = file if file.endswith(".yaml") else PLAN_NAME
    return f"sparsekv plan {shlex.quote(model or plan.model.id)} -o {shlex.quote(out)}"


# --- exact output -----------------------------------------------------------------------------------------------------

DRAFTS = (0, 2, 4, 6, 10)  # tokens of a draft: each is a captured step of its own; 0 is a step of dense decoding


def tokens_a_cycle(agreement: float, drafted: int) -> float:
    """Mean tokens of a draft and its check, where each draft counts with this probability if all before it do
    (Leviathan et al., 2023, section 3.1)."""
    return drafted + 1 if agreement >= 1 else (1 - agreement ** (drafted + 1)) / (1 - agreement)
