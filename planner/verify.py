"""Whether a plan meets its gates, measured on held-out prompts: prefill alone, decode alone, and both.

Divergence, top-1 and exact agreement with dense say how much a plan changes whether or not dense solves a task;
accuracy is held against a plan where it does. A plan whose means miss a gate misses it. One whose means meet all of
them is verified if their 95% bounds do so as well at every length, on at least `FEWEST_SAMPLES` samples a length over
all tasks; else it stays unverified, with what was measured. Accuracy has no bound of its own: fifty answers prove no
point of a hundred, but an answer that agrees exactly with dense's is as right as that one, so accuracy loses at most
what exact agreement does.

Results come from evaluation/, their intervals from its results.py, gates are held against them in gates.py, and what to
try after a miss is said in tighten.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsekv.planner.evaluation import EvalSamples, Mode, PhaseName, PlanMode, evaluate
from sparsekv.planner.evaluation.results import EvalResult, measurement_of
from sparsekv.planner.gates import misses_of, too_few, unproven, worst_lengths
from sparsekv.planner.progress import Progress
from sparsekv.planner.settled import Settled
from sparsekv.planner.tasks import Kit
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.schema import Plan, Quality
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel

# Verification must not tighten a plan on the very samples that `eval` shows by default.
_SEED_APART = 1_000_003
_PROVE = "verify on more samples to prove more, or loosen the gate"


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
    results = evaluate(loaded, modes, held_out_samples(options), kit, progress)
    return _verdict(plan, {phase: results[phase] for phase in phases}, options)


def _verdict(plan: Plan, results: Mapping[PhaseName, Sequence[EvalResult]], options: Settled) -> Verification:
    """What the results of each phase, one a length, say of a plan by its gates."""
    for phase, parts in results.items():
        _check_finite(parts, phase)
    gate, chunk = options.gate, options.prefill_chunk
    measured = {phase: measurement_of(parts, phase, chunk) for phase, parts in results.items()}
    misses = {phase: lines for phase, parts in results.items() if (lines := misses_of(parts, gate, phase))}
    missed = {phase: worst_lengths(results[phase], gate, phase) for phase in misses}
    few = tuple(too_few(next(iter(results.values()))))
    doubts = tuple(
        f"{phase}: met on average, not proven at 95%: {bounds}"
        for phase, found in measured.items()
        if (bounds := unproven(found, gate, phase))
    )
    remarks = (*few, *doubts, *((_PROVE,) if doubts and not few else ()), *_untouched(plan, options.verify_lengths))
    reasons = tuple(f"{phase}: {line}" for phase, lines in misses.items() for line in lines)
    return Verification(Quality(**measured), not missed, not remarks, reasons or remarks, missed)


def _check_finite(results: Sequence[EvalResult], phase: str) -> None:
    outcomes = [outcome for result in results for outcome in result.outcomes]
    bad = sum(not (math.isfinite(outcome.nll) and math.isfinite(outcome.kl)) for outcome in outcomes)
    if bad:
        raise GateError(
            f"expected finite probabilities from the plan, found nan or infinity in {bad} of {len(outcomes)} samples "
            f"({phase}); check the model in this precision without a plan, or use another --backend"
        )


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
                remarks.append(
                    f"{phase} {_range(after, bucket.up_to)} is sparse and was not run sparse at any verified length"
                )
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
