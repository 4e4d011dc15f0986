"""Whether a plan meets its gate, measured on held-out prompts: prefill alone, decode alone, and both.

`tightened` gives the options of the next attempt when it does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from sparsekv.planner.eval_results import EvalResult, TaskResult, merged
from sparsekv.planner.evaluation import EvalSamples, Mode, PhaseName, PlanMode, evaluate
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.progress import Progress
from sparsekv.planner.tasks import Kit
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.patterns import Budget
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.schema import Measurement, Plan, Quality, Score
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel

# Verification must not tighten a plan on the very samples that `eval` shows by default.
_SEED_APART = 1_000_003
# Fewer answers than this, over all tasks that dense solves, say too little for a plan to be called verified.
FEWEST_ANSWERS = 10
_VACUOUS = "dense solves no task {share:.0%} of the time, so that accuracy says nothing about this plan"
_TOO_FEW = (
    "{found} answers to tasks that dense solves are too few to call a plan verified, at least {least} are needed: "
    "verify on more samples, or ask for a bound on divergence with --max-kl"
)
_UNTOUCHED = "{phase} up to {up_to} is sparse and was not run sparse at any verified length"
_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured, and whether the gate was met.

    Attributes:
        conclusive: whether the gate had something to hold against the plan (enough answers to tasks that dense
            solves, or `max_kl`), and every sparse bucket of the plan was run.
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
    options: PlanOptions,
    progress: Progress | None = None,
    kit: Kit | None = None,
    *,
    allow_mismatch: bool = False,
) -> Verification:
    """Runs a plan on held-out prompts and compares it with dense.

    A phase misses the gate when a task loses more than `gate.max_accuracy_drop` points over all the lengths at which
    dense solves it at least `gate.solved` of the time; when it loses more than that at one of these lengths beyond
    doubt (by the 95% interval of the paired difference); or when the mean divergence is above `gate.max_kl`.

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
    misses = {phase: misses_of(parts[phase], options.gate) for phase in pooled}
    missed = {phase: _worst(parts[phase], options.gate) for phase, lines in misses.items() if lines}
    reasons = tuple(f"{phase}: {line}" for phase, lines in misses.items() for line in lines)
    quality = Quality(**{phase: _measurement(result, phase) for phase, result in pooled.items()})
    remarks = (
        *_weaknesses([parts[phase] for phase in pooled], options.gate),
        *_untouched(plan, options.verify_lengths),
    )
    return Verification(quality, not missed, not remarks, reasons or remarks, missed)


def held_out_samples(options: PlanOptions) -> EvalSamples:
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


def misses_of(results: Sequence[EvalResult], gate: Gate) -> list[str]:
    """What of the gate the results of one phase, one a length, miss: a line each."""
    lines = []
    for name in dict.fromkeys(name for result in results for name in result.tasks):
        solved = [result for result in results if _is_solved(result.tasks.get(name), gate)]
        lines += _task_misses(name, solved, gate) if solved else []
    kl = merged(results).kl
    if gate.max_kl is not None and kl > gate.max_kl:
        lines.append(f"next-token distributions moved by {kl:.4g} nats, more than {gate.max_kl:g}")
    return lines


def _task_misses(name: str, solved: Sequence[EvalResult], gate: Gate) -> list[str]:
    pooled = merged(solved).tasks[name]
    if _drop_points(pooled) > gate.max_accuracy_drop:
        return [_fell(name, pooled, gate)]
    return [
        f"{_fell(name, result.tasks[name], gate)} at {', '.join(map(format_length, result.lengths))}"
        for result in solved
        if _drop_points(result.tasks[name]) > gate.max_accuracy_drop and _surely_fell(result.tasks[name].score)
    ]


def _surely_fell(score: Score) -> bool:
    return score.interval is not None and score.interval[1] < 0.0


def _fell(name: str, task: TaskResult, gate: Gate) -> str:
    score = task.score
    return (
        f"{name} fell from {score.dense:.1%} to {score.sparse:.1%} on {score.samples} samples, "
        f"more than {gate.max_accuracy_drop:g} points"
    )


def _is_solved(task: TaskResult | None, gate: Gate) -> bool:
    return task is not None and task.is_accuracy and task.score.dense >= gate.solved


def _drop_points(task: TaskResult) -> float:
    lost = sum(bool(outcome.correct) for outcome in task.dense) - sum(bool(outcome.correct) for outcome in task.sparse)
    return 100.0 * lost / len(task.dense)


def _worst(results: Sequence[EvalResult], gate: Gate) -> tuple[int, ...]:
    """The lengths that miss the gate by themselves; all of them where only the sum does."""
    alone = [result for result in results if misses_of([result], gate)]
    return tuple(length for result in alone or results for length in result.lengths)


def _weaknesses(parts: Sequence[Sequence[EvalResult]], gate: Gate) -> tuple[str, ...]:
    """Why accuracy says too little about the plan, if it does."""
    if gate.max_kl is not None:
        return ()
    answers = min(
        sum(len(task.dense) for result in results for task in result.tasks.values() if _is_solved(task, gate))
        for results in parts
    )
    if not answers:
        return (_VACUOUS.format(share=gate.solved),)
    return () if answers >= FEWEST_ANSWERS else (_TOO_FEW.format(found=answers, least=FEWEST_ANSWERS),)


def _untouched(plan: Plan, lengths: Sequence[int]) -> tuple[str, ...]:
    """The sparse buckets of a plan that were not run sparse at any verified length, a remark each."""
    remarks = []
    for phase, part in (("prefill", plan.prefill), ("decode", plan.decode)):
        found = [(part.bucket(length), length) for length in lengths] if part else []
        run = [bucket for bucket, length in found if _is_sparse_at(bucket, length)]
        for bucket in part.lengths if part else ():
            alias = isinstance(bucket, PrefillBucket) and bucket.same_as is not None
            longest = plan.model.context_length if bucket.up_to is None else bucket.up_to
            if _is_sparse_at(bucket, longest) and not (alias or bucket in run):
                up_to = "any length" if bucket.up_to is None else format_length(bucket.up_to)
                remarks.append(_UNTOUCHED.format(phase=phase, up_to=up_to))
    return tuple(remarks)


def _is_sparse_at(bucket: PrefillBucket | DecodeBucket, length: int) -> bool:
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


def _measurement(result: EvalResult, phase: PhaseName) -> Measurement:
    return Measurement(
        lengths=result.lengths,
        density=result.decode_share if phase == "decode" else result.prefill_density,
        kl=result.kl,
        tasks={name: task.score for name, task in result.tasks.items()},
    )


def after_a_missed_gate(options: PlanOptions, missed: Set[PhaseName]) -> str:
    """A sentence that names options which can be used together with those that were.

    Args:
        options: of the last plan.
        missed: the phases that missed the gate; where only both together missed it, either may be given more.
    """
    wanted = {phase for phase in options.phases if phase in missed} or set(options.phases)
    looser = "loosen --max-accuracy-drop" if options.gate.max_kl is None else "loosen --max-accuracy-drop or --max-kl"
    first, *rest = (*_more(options, wanted), looser)
    return f"{first[0].upper()}{first[1:]}, {', '.join(rest)}, or verify on more samples (--verify-samples)"


def _more(options: PlanOptions, phases: Set[str]) -> Iterator[str]:
    if "prefill" in phases:
        if options.preset is not None:
            yield f"search without the {options.preset} preset, which has one density a length"
        elif options.target_speedup is not None:
            yield "ask for less than this --target-speedup"
        else:
            yield "raise --target-density"
    if "decode" in phases:
        yield "choose other --filter-layers" if options.filter_rule == "fixed" else "raise --decode-budget"


def tightened(
    options: PlanOptions, profile: Profile, missed: Mapping[PhaseName, Collection[int]]
) -> PlanOptions | None:
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


def _denser(options: PlanOptions, profile: Profile, lengths: Collection[int]) -> PlanOptions:
    """The next density of the ladder at the lengths that missed."""
    if not options.target_density or options.target_speedup is not None:  # denser would miss the speedup
        return options
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = list(options.target_density)
    for number, entry in enumerate(entries):
        if entry.length in lengths:
            denser = (density for density in entry.densities if density > targets[number] * 1.001)
            targets[number] = next(denser, targets[number])
    return replace(options, target_density=tuple(targets))


def _more_careful(options: PlanOptions, profile: Profile) -> PlanOptions:
    """What was tried and diverged at most half as much. Where nothing was: half the loss (fewer layers attend to chosen
    tokens); at the least loss, the next larger budget."""
    tried = [trial.kl_bound for entry in profile.lengths for trial in entry.trials]
    if options.filter_rule == "dp" and tried:
        inside = [bound for bound in tried if bound <= options.decode_kl]
        return replace(options, decode_kl=max(inside) / 2) if inside else options
    if options.filter_rule == "dp" and options.decode_loss > _LEAST_LOSS:
        return replace(options, decode_loss=options.decode_loss * _LOSS_STEP)
    longest = profile.lengths[-1]
    budgets: tuple[Budget, ...] = longest.reuse.budgets if longest.reuse else ()
    spent = options.decode_budget.resolve(longest.length)
    larger = sorted((b.resolve(longest.length), position) for position, b in enumerate(budgets))
    return next(
        (replace(options, decode_budget=budgets[position]) for size, position in larger if size > spent),
        options,
    )


def tightened_remarks(asked: PlanOptions, used: PlanOptions, profile: Profile) -> tuple[str, ...]:
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
    if asked.decode_kl != used.decode_kl:
        lines.append(
            f"decode is planned for a divergence of {used.decode_kl:g} on calibration prompts: with "
            f"{asked.decode_kl:g}, the plan missed its gate"
        )
    if (asked.decode_loss, asked.decode_budget) != (used.decode_loss, used.decode_budget):
        lines.append(
            f"decode is planned for a loss of {used.decode_loss:g} and a budget of {used.decode_budget}: with "
            f"{asked.decode_loss:g} and {asked.decode_budget}, the plan missed its gate"
        )
    return tuple(lines)
