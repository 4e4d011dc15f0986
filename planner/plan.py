"""From a model to a plan: profile, refine, decode trials, cost, allocate, filter layers, verify, result.

A plan that misses its gate is tightened and tried again: a larger budget for prefill, allocated anew; for
decode what was tried and diverged less, or, where nothing was tried, first a smaller loss (fewer layers attend to
chosen tokens), then a larger budget.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsekv.planner.allocate import allocate, with_reached_densities
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.measure import measure_cost
from sparsekv.planner.cost.predict import predict
from sparsekv.planner.cost.remarks import plan_remarks
from sparsekv.planner.data_files import digest_of, versions, write_measured
from sparsekv.planner.decode_search import measure_decode, tries_decode
from sparsekv.planner.filter_layers import choose_filter_layers, takes_trials
from sparsekv.planner.job import Job, head_shape, job_of
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import mix_of
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.progress import Progress, Stages
from sparsekv.planner.refine import refine, refines
from sparsekv.planner.settled import Settled
from sparsekv.planner.tighten import after_a_missed_gate, tightened, tightened_remarks
from sparsekv.planner.verify import Verification, verify
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, Prediction, Provenance, Target
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel, load_model

MOST_ATTEMPTS = 6


def plan_model(model: Any, tokenizer: Any = None, *, progress: Progress | None = None, **options: Any) -> Plan:
    """Plans a model: `sparsekv.plan_model`.

    Args:
        model: an alias, hub id or folder, a `LoadedModel`, or a Hugging Face model together with its tokenizer.
        progress: where to report, such as `sparsekv.planner.progress.BarProgress()`; nowhere when None.
        **options: fields of `PlanOptions`.

    Returns:
        The plan, verified on held-out prompts; write it with `sparsekv.plans.files.write_plan`.

    Raises:
        GateError: no plan met the gate.
        SparseKVError: of the other kinds, for what cannot be planned.
    """
    asked = PlanOptions(**options)
    job = job_of(_loaded(model, tokenizer, asked), asked, progress=progress)
    return compile_plan(job, progress=progress).plan


def compile_plan(
    job: Job,
    *,
    profile_out: Path | None = None,
    cost_out: Path | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Profiles, measures, chooses and verifies, as far as the job leaves it to be done.

    Args:
        profile_out, cost_out: where to write the profile and the device cost.
        resume: a file for what is profiled, from which an interrupted run goes on; the caller removes it once the
            plan is written.
        progress: where to report; the stages that will run are numbered.

    Raises:
        GateError: no plan met the gate, or no density comes to the target speedup.
        UsageError, PromptError, BackendError: prompts do not fit, or the profile does not reach the targets.
    """
    started = time.monotonic()
    stages = Stages(progress, _stages(job))
    measured = job.profile or _profiled(job, stages, resume)
    if profile_out is not None:
        write_measured(job.given or measured, profile_out)
    job = replace(job, options=with_reached_densities(job.options, measured))
    cost = job.cost or _measured_cost(job, measured, stages)
    if cost_out is not None:
        write_measured(cost, cost_out)
    plan, used, verdicts = _verified(job, measured, cost, stages)
    remarks = (
        *(verdicts[-1].reasons if verdicts else ()),
        *tightened_remarks(job.options, used, measured),
        *plan_remarks(plan, used, measured, cost),
        *job.remarks,
    )
    return PlanResult(plan, time.monotonic() - started, len(verdicts), remarks)


def _stages(job: Job) -> tuple[str, ...]:
    """Those that will run, in order."""
    options, profiles = job.options, job.profile is None
    runs = {
        "profile": profiles,
        "refine": profiles and refines(options),
        "decode trials": profiles and tries_decode(job.model, options),
        "cost": job.cost is None,
        "allocate": "prefill" in options.phases,
        "filter layers": "decode" in options.phases,
        "evaluate": job.kit is not None,
    }
    return tuple(name for name, is_needed in runs.items() if is_needed)


def _profiled(job: Job, stages: Progress, resume: Path | None) -> Profile:
    """Everything that needs the model: what candidates do, what whole plans do, what decode segments do."""
    measured = profile(job, stages, resume)
    return measure_decode(job, refine(job, measured, stages), stages)


def _measured_cost(job: Job, measured: Profile, stages: Progress) -> DeviceCost:
    model, options = job.subject.model, job.options
    return measure_cost(
        head_shape(job.model),
        options.lengths,
        device=model.device,
        dtype=model.dtype,
        tile=measured.tile,
        families=options.families,
        backend=options.backend,
        offload=options.offload and "decode" in options.phases,
        host=job.host,
        progress=stages,
    )


def _verified(
    job: Job, measured: Profile, cost: DeviceCost, stages: Progress
) -> tuple[Plan, Settled, tuple[Verification, ...]]:
    """The first plan that meets its gate, the options it was compiled with, and what verifying each plan found; one
    plan, unverified, where nothing is verified."""
    used = job.options
    verdicts: tuple[Verification, ...] = ()
    while True:
        plan = compile_once(job.model, used, measured, cost, stages)
        if job.kit is None:
            return plan, used, ()
        anywhere = plan.model_copy(update={"targets": ()})  # the warning of another host or device is not for here
        verdict = verify(job.subject, anywhere, used, stages, job.kit)
        verdicts = (*verdicts, verdict)
        if verdict.passed:
            return verdict.recorded(plan), used, verdicts
        used = _tightened(used, measured, verdict, len(verdicts))
        stages.say(
            f"the plan missed its gate in {'; '.join(verdict.reasons)}; a stricter one is tried, "
            f"{len(verdicts) + 1} of at most {MOST_ATTEMPTS}"
        )


def compile_once(
    model: ModelInfo, options: Settled, measured: Profile, cost: DeviceCost, progress: Progress | None = None
) -> Plan:
    """One plan from what was measured, unverified: what its heads and layers compute, and what that is predicted to
    cost.

    Args:
        model: what the plan is for, as the profile has it.
        options: settled for the profile.

    Raises:
        UsageError, GateError: the profile does not reach the targets.
    """
    stages = progress or Progress()
    prefill = decode = None
    if "prefill" in options.phases:
        with stages.stage("allocate", total=1) as step:
            prefill = allocate(measured, cost, options, stages.say)
            step.advance()
    if "decode" in options.phases:
        with stages.stage("filter layers", total=1) as step:
            decode = choose_filter_layers(measured, cost, options)
            step.advance()
    return Plan(
        status="unverified",
        model=model,
        targets=(Target(device=cost.device, host=cost.host, backend=cost.backend, dtype=cost.dtype, chunk=cost.chunk),),
        prefill=prefill,
        decode=decode,
        cost=predict(measured, cost, prefill, decode),
        provenance=_provenance(options, measured, cost),
    )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and what is worth telling about it.

    Attributes:
        plan: the plan; verified unless that was left out, or the gate had nothing to hold against it.
        seconds: of the whole run.
        attempts: plans that were verified, the last one included.
        remarks: what to know about the verification, what was given up to meet the gate, heads that run dense, and
            what could not be predicted.
    """

    plan: Plan
    seconds: float
    attempts: int
    remarks: tuple[str, ...]

    @property
    def prefill_density(self) -> float | None:
        """Predicted share of tiles at the longest profiled length; None where prefill is not planned."""
        estimates = [entry.prefill for entry in self._lengths if entry.prefill]
        return estimates[-1].density if estimates else None

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted ratio of dense to sparse attention time, of prefill if planned, at the longest profiled length."""
        for phase in ("prefill", "decode"):
            estimates = [getattr(entry, phase) for entry in self._lengths if getattr(entry, phase)]
            if estimates:
                return float(estimates[-1].dense_us / max(estimates[-1].sparse_us, 1e-9))
        return None

    @property
    def filter_layers(self) -> tuple[int, ...]:
        """The filter layers of the longest bucket."""
        decode = self.plan.decode
        return tuple(segment.filter for segment in decode.lengths[-1].segments) if decode else ()

    @property
    def _lengths(self) -> tuple[Prediction, ...]:
        return self.plan.cost.lengths if self.plan.cost else ()


def _tightened(options: Settled, measured: Profile, verdict: Verification, attempts: int) -> Settled:
    stricter = tightened(options, measured, verdict.missed)
    if stricter is None or attempts == MOST_ATTEMPTS:
        raise GateError(
            f"expected a plan that keeps the accuracy of dense, found none in {attempts} attempts; the last one missed "
            f"it in {'; '.join(verdict.reasons)}. {after_a_missed_gate(options, set(verdict.missed))}"
        )
    return stricter


def _provenance(options: Settled, measured: Profile, cost: DeviceCost) -> Provenance:
    by_trials, by_loss = takes_trials(measured, options), not options.filter_layers
    settings: dict[str, Any] = {
        "target_density": list(options.target_density),
        "target_speedup": options.target_speedup,
        "crossover": options.crossover,
        "decode_budget": options.decode_budget.model_dump(exclude_none=True),
        "decode_loss": options.loss_bound if by_loss and not by_trials else None,
        "decode_kl": options.decode_bound if by_trials else None,
        "filter_rule": "dp" if by_loss else "fixed",
        "max_accuracy_drop": options.gate.max_accuracy_drop,
        "max_kl": {phase: options.gate.kl_bound(phase) for phase in ("prefill", "decode", "both")},
        "min_agreement": options.gate.min_agreement,
        "min_exact": options.gate.min_exact,
    }
    return Provenance(
        versions=versions(),
        preset=measured.preset,
        seed=options.seed,
        calibration=measured.calibration,
        mix=mix_of(measured.tasks, measured.samples),
        profile=digest_of(measured),
        device_cost=digest_of(cost),
        settings={name: value for name, value in settings.items() if value is not None},
    )


def _loaded(model: Any, tokenizer: Any, options: PlanOptions) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | Path):
        return load_model(model, device=options.device, dtype=options.dtype, device_map=options.device_map)
    if tokenizer is None:
        raise UsageError("expected the tokenizer of a model that is loaded already, found none; pass tokenizer=")
    return LoadedModel(model, tokenizer, describe_model(model))
