"""Whether a plan keeps what its gate asks for, measured on held-out prompts: prefill alone, decode alone, and both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsekv.planner.evaluate import Mode, PhaseName, PlanMode, evaluate_modes
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.progress import Progress
from sparsekv.planner.results import EvalResult, TaskResult, merged
from sparsekv.planner.tasks import Kit, Split, prepare
from sparsekv.plans.records import Measurement, Quality
from sparsekv.plans.schema import Plan
from sparsekv.runtime.load import LoadedModel

# Verification must not tighten a plan on the very samples that `eval` shows by default.
_SEED_APART = 1_000_003
_VACUOUS = "dense solves no task {share:.0%} of the time, so that accuracy says nothing about this plan"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was measured, and whether the gate was met.

    Attributes:
        quality: as the plan records it.
        passed: whether every phase met the gate.
        conclusive: whether the gate had anything to hold against the plan: a task that dense solves, or `max_kl`.
        reasons: what was missed, a line each; where all was met, what to know about the measurement.
        missed: for each phase that missed the gate, the lengths that did worst.
    """

    quality: Quality
    passed: bool
    conclusive: bool
    reasons: tuple[str, ...]
    missed: Mapping[PhaseName, tuple[int, ...]]


def verify(
    loaded: LoadedModel,
    plan: Plan,
    options: PlanOptions,
    progress: Progress | None = None,
    kit: Kit | None = None,
) -> Verification:
    """Runs a plan on held-out prompts and compares it with dense.

    A phase misses the gate when a task that dense solves at least `gate.solved` of the time loses more than
    `gate.max_accuracy_drop` points over all lengths, or when the mean divergence is above `gate.max_kl`.

    Args:
        loaded: the model, with nothing applied to it.
        plan: the plan; phases it does not have are not measured.
        options: settled: gate, tasks, verify_samples, verify_lengths, batch, seed.
        progress: where to report.
        kit: the evaluation split's, for those who verify often.

    Raises:
        PromptError: a task does not fit a length.
        PlanMismatchError, UnsupportedError, BackendError: the plan cannot be applied.
    """
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, options.backend) for phase in planned_phases(plan)}
    by_length = {
        length: evaluate_modes(
            loaded,
            modes,
            options.tasks,
            length,
            options.verify_samples or 0,
            batch=options.batch or 1,
            seed=options.seed + _SEED_APART,
            prefill_chunk=options.prefill_chunk,
            kit=source,
            progress=progress,
        )
        for length in options.verify_lengths
    }
    pooled = {phase: merged(results[phase] for results in by_length.values()) for phase in planned_phases(plan)}
    misses = {phase: misses_of(result, options.gate) for phase, result in pooled.items()}
    missed = {
        phase: _worst({length: results[phase] for length, results in by_length.items()}, options.gate)
        for phase, lines in misses.items()
        if lines
    }
    reasons = tuple(f"{phase}: {line}" for phase, lines in misses.items() for line in lines)
    quality = Quality(**{phase: _measurement(result, phase) for phase, result in pooled.items()})
    conclusive = options.gate.max_kl is not None or any(_solved(result, options.gate) for result in pooled.values())
    remarks = () if conclusive else (_VACUOUS.format(share=options.gate.solved),)
    return Verification(quality, not missed, conclusive, reasons or remarks, missed)


def planned_phases(plan: Plan) -> tuple[PhaseName, ...]:
    """What of a plan there is to measure."""
    if plan.prefill and plan.decode:
        return ("prefill", "decode", "both")
    return ("prefill",) if plan.prefill else ("decode",) if plan.decode else ()


def misses_of(result: EvalResult, gate: Gate) -> list[str]:
    """What of the gate a result misses, a line each."""
    lines = []
    for name, task in result.tasks.items():
        score = task.score
        if task.is_accuracy and score.dense >= gate.solved and _drop_points(task) > gate.max_accuracy_drop:
            lines.append(
                f"{name} fell from {score.dense:.1%} to {score.sparse:.1%} on {score.samples} samples, "
                f"more than {gate.max_accuracy_drop:g} points"
            )
    if gate.max_kl is not None and result.kl > gate.max_kl:
        lines.append(f"next-token distributions moved by {result.kl:.4g} nats, more than {gate.max_kl:g}")
    return lines


def _drop_points(task: TaskResult) -> float:
    lost = sum(bool(outcome.correct) for outcome in task.dense) - sum(bool(outcome.correct) for outcome in task.sparse)
    return 100.0 * lost / len(task.dense)


def _worst(by_length: Mapping[int, EvalResult], gate: Gate) -> tuple[int, ...]:
    """The lengths that miss the gate by themselves; all of them where only the sum does."""
    alone = tuple(length for length, result in by_length.items() if misses_of(result, gate))
    return alone or tuple(by_length)


def _solved(result: EvalResult, gate: Gate) -> bool:
    return any(task.is_accuracy and task.score.dense >= gate.solved for task in result.tasks.values())


def _measurement(result: EvalResult, phase: PhaseName) -> Measurement:
    return Measurement(
        lengths=result.lengths,
        density=result.decode_share if phase == "decode" else result.prefill_density,
        kl=result.kl,
        tasks={name: task.score for name, task in result.tasks.items()},
    )
