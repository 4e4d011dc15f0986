"""Whether a plan meets its gates, measured on held-out prompts: prefill alone, decode alone, and both.

Divergence, top-1 and exact agreement with dense say how much a plan changes whether or not dense solves a task;
accuracy is held against a plan where it does. A plan whose means miss a gate misses it. One whose means meet all of
them is verified if their 95% bounds do so as well at every length, on at least `FEWEST_SAMPLES` samples a length over
all tasks; else it stays unverified, with what was measured. Accuracy has no bound of its own: fifty answers prove no
point of a hundred, but an answer that agrees exactly with dense's is as right as that one, so accuracy loses at most
what exact agreement does.

`tightened` gives the options of the next attempt when a gate is missed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from sparsekv.planner.eval_results import EvalResult, TaskResult, accuracy_interval, measurement_of, merged
from sparsekv.planner.evaluation import EvalSamples, Mode, PhaseName, PlanMode, evaluate
from sparsekv.planner.filter_layers import takes_trials
from sparsekv.planner.options import Gate
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.progress import Progress
from sparsekv.planner.settled import FEWEST_SAMPLES, Settled
from sparsekv.planner.tasks import Kit
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.patterns import Budget
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.schema import Agreement, LengthMeasurement, Measurement, Plan, Quality
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel

# Verification must not tighten a plan on the very samples that `eval` shows by default.
_SEED_APART = 1_000_003
_TOO_FEW = (
    "too few samples at {length} to call a plan verified, {found} of at least {least}: verify on {more} or more of "
    "each task"
)
_UNPROVEN = "{phase}: met on average, not proven at 95%: {bounds}"
_PROVE = "verify on more samples to prove more, or loosen the gate"
_UNTOUCHED = "{phase} {at} is sparse and was not run sparse at any verified length"
_DENSER = 1.3  # at each attempt
_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured, and whether the gate was met.

    Attributes:
        conclusive: whether the 95% bound of every gate was met at every length, on enough samples, and every sparse
            bucket of the plan was run.
        reasons: what was missed, a line each; where all was met, what to know about the measurement.
        missed: for each phase that missed the gate, the lengths that did worst.
    """

    quality: Quality
    passed: bool
    conclusive: bool
    reasons: tuple[str, ...]
    missed: Mapping[PhaseName, tuple[int, ...]]

    def recorded(self, plan: Plan) -> Plan:
        """The plan with its quality; verified where that was conclusive."""
        status = "verified" if self.conclusive else "unverified"
        return plan.model_copy(update={"status": status, "quality": self.quality})


def verify(
    loaded: LoadedModel,
    plan: Plan,
    options: Settled,
    progress: Progress | None = None,
    kit: Kit | None = None,
    *,
    allow_mismatch: bool = False,
) -> Verification:
    """Runs a plan on held-out prompts and compares it with dense.

    A phase misses its gate by what `misses_of` names.

    Args:
        loaded: the model, with nothing applied to it.
        plan: the plan; phases it does not have are not measured.
        options: settled: gate, tasks, verify_samples, verify_lengths, batch, seed.
        allow_mismatch: take a plan of another architecture, see `apply`; what comes out is not a property of the
            plan's own model.

    Raises:
        GateError: the plan gives numbers that are not finite.
        UsageError: the plan has no phase to verify.
        PromptError: a task does not fit a length.
        PlanMismatchError, UnsupportedError, BackendError: the plan cannot be applied.
    """
    phases = planned_phases(plan)
    if not phases:
        raise UsageError("expected a plan with a prefill or a decode phase, found neither: there is nothing to verify")
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, options.backend, allow_mismatch) for phase in phases}
    parts = evaluate(loaded, modes, held_out_samples(options), kit, progress)
    pooled = {phase: merged(parts[phase]) for phase in phases}
    for phase, result in pooled.items():
        _check_finite(result, phase)
    misses = {phase: misses_of(parts[phase], options.gate, phase) for phase in pooled}
    missed = {phase: _worst(parts[phase], options.gate, phase) for phase, lines in misses.items() if lines}
    reasons = tuple(f"{phase}: {line}" for phase, lines in misses.items() for line in lines)
    chunk = options.prefill_chunk
    quality = Quality(**{phase: measurement_of(parts[phase], phase, chunk) for phase in phases})
    few = tuple(_too_few(parts[phases[0]]))
    unproven = tuple(
        _UNPROVEN.format(phase=phase, bounds=found)
        for phase in phases
        if (found := _unproven(quality, phase, options.gate))
    )
    advice = (_PROVE,) if unproven and not few else ()
    remarks = (*few, *unproven, *advice, *_untouched(plan, options.verify_lengths))
    return Verification(quality, not missed, not remarks, reasons or remarks, missed)


def held_out_samples(options: Settled) -> EvalSamples:
    """What a plan is verified on; `options` are settled."""
    return EvalSamples(
        options.tasks,
        options.verify_lengths,
        options.verify_samples or 0,
        options.batch,
        options.seed + _SEED_APART,
        options.prefill_chunk,
    )


def planned_phases(plan: Plan) -> tuple[PhaseName, ...]:
    """What of a plan there is to measure."""
    if plan.prefill and plan.decode:
        return ("prefill", "decode", "both")
    return ("prefill",) if plan.prefill else ("decode",) if plan.decode else ()


def misses_of(results: Sequence[EvalResult], gate: Gate, phase: PhaseName = "both") -> list[str]:
    """What of the gates the results of one phase, one a length, miss: a line each.

    Divergence and agreement are missed by their means over all lengths, or at one length beyond doubt (by the 95%
    interval). Accuracy counts at the lengths at which dense solves a task: it is missed by the answers to all tasks
    together, or by one task at all or one of its lengths beyond doubt.
    """
    lines = _agreement_misses(merged(results).agreement, gate, phase)
    if not lines and len(results) > 1:
        for result in results:
            found = _agreement_misses(_surely(result.agreement), gate, phase)
            lines += [f"{line}, at {_names(result.lengths)}" for line in found]
    return lines + _accuracy_misses(results, gate)


def _agreement_misses(found: Agreement, gate: Gate, phase: PhaseName) -> list[str]:
    lines = []
    if found.kl > (bound := gate.kl_bound(phase)):
        lines.append(f"next-token distributions moved by {found.kl:.4g} nats, more than {bound:g}")
    if found.top1 is not None and found.top1 < gate.min_agreement:
        lines.append(
            f"the likeliest token was dense's at {found.top1:.1%} of positions, fewer than {gate.min_agreement:.1%}"
        )
    if found.exact is not None and found.exact < gate.min_exact:
        lines.append(f"{found.exact:.1%} of dense's own greedy texts were kept, fewer than {gate.min_exact:.1%}")
    return lines


def _surely(found: Agreement) -> Agreement:
    """The most favourable values that the intervals leave."""
    best = {
        "kl": found.kl_interval[0] if found.kl_interval else 0.0,
        "top1": found.top1_interval[1] if found.top1_interval else None,
        "exact": found.exact_interval[1] if found.exact_interval else None,
    }
    return found.model_copy(update=best)


def _accuracy_misses(results: Sequence[EvalResult], gate: Gate) -> list[str]:
    solved = [
        (result, name, task) for result in results for name, task in result.tasks.items() if _is_solved(task, gate)
    ]
    if not solved:
        return []
    together = _pooled(task for _, _, task in solved)
    if _drop_points(together) > gate.max_accuracy_drop:
        names = ", ".join(dict.fromkeys(name for _, name, _ in solved))
        return [_fell(f"accuracy over {names}", together, gate)]
    lines = []
    for name in dict.fromkeys(name for _, name, _ in solved):
        own = [(task, result.lengths) for result, other, task in solved if other == name]
        if _surely_fell(whole := _pooled(task for task, _ in own), gate):
            lines.append(_fell(name, whole, gate))
            continue
        lines += [f"{_fell(name, task, gate)} at {_names(at)}" for task, at in own if _surely_fell(task, gate)]
    return lines


def _pooled(tasks: Iterable[TaskResult]) -> TaskResult:
    found = list(tasks)
    return TaskResult(
        tuple(outcome for task in found for outcome in task.dense),
        tuple(outcome for task in found for outcome in task.sparse),
    )


def _surely_fell(task: TaskResult, gate: Gate) -> bool:
    return _drop_points(task) > gate.max_accuracy_drop and accuracy_interval(*task.answers)[1] < 0.0


def _fell(name: str, task: TaskResult, gate: Gate) -> str:
    dense, sparse = (sum(side) / len(side) for side in task.answers)
    return (
        f"{name} fell from {dense:.1%} to {sparse:.1%} on {len(task.dense)} samples, "
        f"more than {gate.max_accuracy_drop:g} points"
    )


def _is_solved(task: TaskResult, gate: Gate) -> bool:
    return task.is_accuracy and sum(task.answers[0]) >= gate.solved * len(task.dense)


def _drop_points(task: TaskResult) -> float:
    dense, sparse = task.answers
    return 100.0 * (sum(dense) - sum(sparse)) / len(dense)


def _worst(results: Sequence[EvalResult], gate: Gate, phase: PhaseName) -> tuple[int, ...]:
    """The lengths that miss the gate by themselves; all of them where only the sum does."""
    alone = [result for result in results if misses_of([result], gate, phase)]
    return tuple(length for result in alone or results for length in result.lengths)


def _names(lengths: Iterable[int]) -> str:
    return ", ".join(map(format_length, lengths))


def _too_few(results: Sequence[EvalResult]) -> Iterator[str]:
    """A remark for each length with too few samples."""
    for result in results:
        if (found := len(result.outcomes)) < FEWEST_SAMPLES:
            more, length = math.ceil(FEWEST_SAMPLES / len(result.tasks)), _names(result.lengths)
            yield _TOO_FEW.format(found=found, length=length, least=FEWEST_SAMPLES, more=more)


def _unproven(quality: Quality, phase: PhaseName, gate: Gate) -> str:
    """The 95% bounds of a phase that do not meet its gate at some length, the worst of each; empty if all do."""
    measured: Measurement | None = getattr(quality, phase)
    bounds = [_Bounds.of(part) for part in measured.by_length] if measured else []
    limit, told = gate.kl_bound(phase), []
    kl = max(bounds, key=lambda one: one.kl)
    if kl.kl > limit:
        told.append(f"divergence may be {kl.kl:.3g} nats at {kl.at} (gate {limit:g})")
    top1 = min(bounds, key=lambda one: one.top1)
    if top1.top1 < gate.min_agreement:
        told.append(f"top-1 agreement {top1.top1:.1%} at {top1.at} (gate {gate.min_agreement:.1%})")
    exact = min(bounds, key=lambda one: one.exact)
    if exact.exact < gate.min_exact:
        told.append(f"exact agreement {exact.exact:.1%} at {exact.at} (gate {gate.min_exact:.1%})")
    return ", ".join(told)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The unfavourable ends of the 95% intervals at one length; a single sample, which is too few, has not all."""

    at: str
    kl: float
    top1: float
    exact: float

    @classmethod
    def of(cls, part: LengthMeasurement) -> _Bounds:
        found = part.agreement
        return cls(
            format_length(part.length),
            found.kl if found.kl_interval is None else found.kl_interval[1],
            1.0 if found.top1_interval is None else found.top1_interval[0],
            1.0 if found.exact_interval is None else found.exact_interval[0],
        )


def _untouched(plan: Plan, lengths: Sequence[int]) -> tuple[str, ...]:
    """The sparse buckets of a plan that were not run sparse at any verified length, a remark each."""
    remarks = []
    for phase, part in (("prefill", plan.prefill), ("decode", plan.decode)):
        found = [(part.bucket(length), length) for length in lengths] if part else []
        run = [bucket for bucket, length in found if is_sparse_at(bucket, length)]
        after = 0
        for bucket in part.lengths if part else ():
            beyond = isinstance(bucket, PrefillBucket) and bucket.extrapolated  # as the last one that was run
            longest = plan.model.context_length if bucket.up_to is None else bucket.up_to
            if is_sparse_at(bucket, longest) and not (beyond or bucket in run):
                remarks.append(_UNTOUCHED.format(phase=phase, at=_range(after, bucket.up_to)))
            after = bucket.up_to or after
    return tuple(remarks)


def _range(after: int, up_to: int | None) -> str:
    """The lengths of a bucket behind one that ends at `after`, or behind none (0)."""
    beyond = f"of more than {format_length(after)}" if after else ""
    if up_to is None:
        return beyond or "at every length"
    return f"{beyond}, up to {format_length(up_to)}," if beyond else f"up to {format_length(up_to)}"


def is_sparse_at(bucket: PrefillBucket | DecodeBucket, length: int) -> bool:
    """Whether its decode segments choose tokens there: with a short context they attend to everything."""
    if isinstance(bucket, PrefillBucket):
        return not bucket.dense
    return any(segment.chosen_tokens(length) is not None for segment in bucket.segments)


def _check_finite(result: EvalResult, phase: str) -> None:
    outcomes = [outcome for task in result.tasks.values() for outcome in task.sparse]
    bad = sum(not (math.isfinite(outcome.nll) and math.isfinite(outcome.kl)) for outcome in outcomes)
    if bad:
        raise GateError(
            f"expected finite probabilities from the plan, found nan or infinity in {bad} of {len(outcomes)} samples "
            f"({phase}); check the model in this precision without a plan, or use another --backend"
        )


def after_a_missed_gate(options: Settled, missed: Set[PhaseName]) -> str:
    """A sentence that names options which can be used together with those that were.

    Args:
        options: of the last plan.
        missed: the phases that missed the gate; where only both together missed it, either may be given more.
    """
    wanted = {phase for phase in options.phases if phase in missed} or set(options.phases)
    looser = (
        "loosen the gate that was missed (--max-kl, --max-decode-kl, --min-agreement, --min-exact, --max-accuracy-drop)"
    )
    first, *rest = (*_more(options, wanted), looser)
    return f"{first[0].upper()}{first[1:]}, {', '.join(rest)}, or verify on more samples (--verify-samples)"


def _more(options: Settled, phases: Set[str]) -> Iterator[str]:
    if "prefill" in phases:
        if options.preset is not None:
            yield f"search without the {options.preset} preset, which has one density a length"
        elif options.target_speedup is not None:
            yield "ask for less than this --target-speedup"
        else:
            yield "raise --target-density"
    if "decode" in phases:
        yield "choose other --filter-layers" if options.filter_layers else "raise --decode-budget"


def tightened(options: Settled, profile: Profile, missed: Mapping[PhaseName, Collection[int]]) -> Settled | None:
    """Options of which a plan loses less in the phases that missed the gate; None when there are none.

    Args:
        options: settled, of the plan that missed.
        missed: the phases that missed, with the lengths that did worst. Where only both together missed, both are
            tightened.
    """
    alone = set(missed) - {"both"} or {"prefill", "decode"}
    lengths = {length for phase, some in missed.items() if phase != "decode" for length in some}
    stricter = options
    if "prefill" in alone:
        stricter = _denser(stricter, profile, lengths)
    if "decode" in alone:
        stricter = _more_careful(stricter, profile)
    return None if stricter == options else stricter


def _denser(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """A larger budget at the lengths that missed, which the allocation spends on the heads that it helps most."""
    if not options.target_density or options.target_speedup is not None:  # denser would miss the speedup
        return options
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = list(options.target_density)
    for number, entry in enumerate(entries):
        if entry.length in lengths:
            denser = round(targets[number] * _DENSER, 4)
            targets[number] = denser if denser < 1.0 else targets[number]  # dense everywhere is no plan
    return options.but(target_density=tuple(targets))


def _more_careful(options: Settled, profile: Profile) -> Settled:
    """What was tried and diverged at most half as much. Where nothing was: half the loss (fewer layers attend to chosen
    tokens); at the least loss, the next larger budget."""
    if takes_trials(profile, options):
        tried = [trial.kl_bound for entry in profile.lengths for trial in entry.trials]
        inside = [bound for bound in tried if bound <= options.decode_bound]
        return options.but(decode_kl=max(inside) / 2) if inside else options
    if not options.filter_layers and options.loss_bound > _LEAST_LOSS:
        return options.but(decode_loss=options.loss_bound * _LOSS_STEP)
    longest = profile.lengths[-1]
    budgets: tuple[Budget, ...] = longest.reuse.budgets if longest.reuse else ()
    spent = options.decode_budget.resolve(longest.length)
    larger = sorted((b.resolve(longest.length), position) for position, b in enumerate(budgets))
    return next(
        (options.but(decode_budget=budgets[position]) for size, position in larger if size > spent),
        options,
    )


def tightened_remarks(asked: Settled, used: Settled, profile: Profile) -> tuple[str, ...]:
    """What a plan that met its gate at a later attempt gave up of what was asked for.

    Args:
        asked: settled, before the first attempt.
        used: those of the plan.
        profile: what both were compiled from.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = zip(entries, asked.target_density, used.target_density, strict=False)
    lines = [
        f"prefill at {format_length(entry.length)} is planned for a density of {after:g}: with the {before:g} that was "
        "asked for, the plan missed its gate"
        for entry, before, after in targets
        if before != after
    ]
    if asked.decode_bound != used.decode_bound:
        lines.append(
            f"decode is planned for a divergence of {used.decode_bound:g} on calibration prompts: with "
            f"{asked.decode_bound:g}, the plan missed its gate"
        )
    if (asked.loss_bound, asked.decode_budget) != (used.loss_bound, used.decode_budget):
        lines.append(
            f"decode is planned for a loss of {used.loss_bound:g} and a budget of {used.decode_budget}: with "
            f"{asked.loss_bound:g} and {asked.decode_budget}, the plan missed its gate"
        )
    return tuple(lines)
